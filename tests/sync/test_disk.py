"""A directory that appears complete, is removed after the next publish, and with `delta` holds only changed weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench.plan_worker import measured
from etude.errors import CheckpointError
from etude.models import create, tiny_config
from etude.sync.disk import DiskTransport, module_of
from etude.sync.transport import Bucket
from etude.sync.weights import WeightStream

MODEL = create(tiny_config(50, layers=2, hidden=32, context=128), seed=0)


def weights() -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in MODEL.named_weights()}


async def all_buckets(transport: DiskTransport, published: dict[str, Tensor], *, whole: bool) -> list[Bucket]:
    return [bucket async for bucket in transport.buckets(published.items(), whole)]


def written(transport: DiskTransport, published: dict[str, Tensor], *, whole: bool) -> tuple[Path, dict[str, Tensor]]:
    (bucket,) = asyncio.run(all_buckets(transport, published, whole=whole))
    directory = Path(bucket.where["directory"])
    tensors: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    assert sorted(tensors) == sorted(piece.name for piece in bucket.pieces)
    return directory, tensors


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_publish_is_a_directory_of_files_no_larger_than_a_bucket(tmp_path: Path) -> None:
    transport = DiskTransport(tmp_path, 20_000)
    first, tensors = written(transport, weights(), whole=True)
    assert same(tensors, weights())
    sizes = [file.stat().st_size for file in first.iterdir()]
    assert len(sizes) > 2 and max(sizes) < 25_000
    second, _ = written(transport, weights(), whole=True)
    assert list(tmp_path.iterdir()) == [second] != [first]
    transport.close()
    assert not list(tmp_path.iterdir())


def test_a_delta_has_every_weight_of_a_changed_module(tmp_path: Path) -> None:
    transport = DiskTransport(tmp_path, 1 << 20, delta=True)
    published = weights()
    assert same(written(transport, published, whole=True)[1], published)
    published["model.layers.1.self_attn.q_proj.weight"] += 1
    _, tensors = written(transport, published, whole=False)
    part = {name: weight for name, weight in published.items() if module_of(name) == "model.layers.1.self_attn"}
    assert len(part) > 3 and same(tensors, part)
    assert same(written(transport, published, whole=True)[1], published), "a server that missed one needs everything"
    assert not written(transport, published, whole=False)[1]


def test_a_weight_larger_than_a_bucket_is_written_or_removed_completely(tmp_path: Path) -> None:
    transport, bucket = DiskTransport(tmp_path, 100_000, delta=True), 100_000
    names = [f"model.layers.{layer}.mlp.{name}_proj.weight" for layer in (0, 1) for name in ("gate", "up", "down")]
    published = {name: torch.randn(128, 128) for name in ("model.embed_tokens.weight", *names)}
    held = measured(lambda: transport.write(WeightStream(published.items()), {}))
    assert 65_536 < held <= 2 * bucket, "parts are held in pieces"
    assert same(written(transport, published, whole=True)[1], published)
    published[names[-1]] = torch.randn(128, 128)
    directory, tensors = written(transport, published, whole=False)
    assert same(tensors, {name: published[name] for name in names[3:]})
    assert max(file.stat().st_size for file in directory.iterdir()) < bucket


def test_without_delta_everything_is_written(tmp_path: Path) -> None:
    transport = DiskTransport(tmp_path, 1 << 20)
    for _ in range(2):
        assert same(written(transport, weights(), whole=False)[1], weights())


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written to .*`directory`"):
        written(DiskTransport(tmp_path / "file", 1 << 20), weights(), whole=True)
    assert (tmp_path / "file").is_file()
