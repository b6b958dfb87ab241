"""Servers that keep a model's weights, and receive only the trained adapters."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.chat import Tokenizer
from etude.checkpoint import export_adapter
from etude.models import LoraAdapterConfig, Model, adapt, adapter_config, load
from etude.records import SamplingParams
from etude.rollout import ServerPool
from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig
from tests.processes import started_by
from tests.recipes.runs import step_metrics, train
from tests.rollout.test_server_pool import until
from tests.served import joined, on, options_of, started
from tests.worlds import make_tasks

pytestmark = on("vllm")
PROMPTS = [np.array([5, 6, 7, first], np.int32) for first in range(8, 14)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
Said = tuple[list[int], list[float]]


@dataclass
class World:
    """A server of a model, which takes adapters."""

    server: ServerPool
    model: Path

    def says(self) -> Said:
        return _said(self.server)


@pytest.fixture(scope="module")
def world(served_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with started("vllm", served_models[0], tmp_path_factory.mktemp("adapters"), adapter_rank=4) as server:
        yield World(server, served_models[0])


def adapted(model: Path, seed: int) -> Model:
    """Return the model with adapters that change its output."""
    made = adapt(load(model, dtype=torch.float32), LoraAdapterConfig(rank=4, alpha=8), seed=seed)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.adapter_weights().values():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=chance))
    return made


def embedded(model: Model, directory: Path) -> Said:
    with TorchEngine(model, Tokenizer.load(directory), TorchEngineConfig(kv_gib=0.01)) as engine:
        return _said(engine)


def _said(engine: ServerPool | TorchEngine) -> Said:
    completions = engine.generate_all(PROMPTS, [GREEDY] * len(PROMPTS))
    assert all(completion.raw_logp is not None for completion in completions)
    return (
        [token for completion in completions for token in completion.ids.tolist()],
        [
            logp
            for completion in completions
            for logp in ([] if completion.raw_logp is None else completion.raw_logp.tolist())
        ],
    )


def test_a_server_computes_with_each_adapter_that_it_receives(world: World, tmp_path: Path) -> None:
    """The server reuses nothing of the adapter before: the prompt is the same."""
    before: list[Said] = []
    for version in (1, 2):
        model = adapted(world.model, version)
        written = export_adapter(model.adapter_weights(), adapter_config(model, world.model), tmp_path / str(version))
        asyncio.run(world.server.load(written, version))
        ids, logp = world.says()
        wanted_ids, wanted = embedded(model, world.model)
        assert len(ids) > 12 and ids == wanted_ids and np.allclose(logp, wanted, atol=2e-3)
        assert all(completion[0] != ids or not np.allclose(completion[1], logp, atol=1e-2) for completion in before)
        before += [(ids, logp), embedded(load(world.model, dtype=torch.float32), world.model)]
        assert {server.version for server in world.server.servers} == {version}


def test_a_run_publishes_only_its_adapters(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's answers are sampled with its adapters: the trainer's log-probs equal the server's."""
    shutil.copytree(world.model, tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    options = {"rollout": "vllm", "rollout.max_num_seqs": 32, **joined(world.server, monkeypatch)}
    options |= {"rollout.adapters": "only", "lora.rank": 4, "train.learning_rate": 0.1}
    lines = step_metrics(train(tmp_path, tmp_path / "run", **options, steps=3))
    whole = (tmp_path / "model" / "model.safetensors").stat().st_size
    for line in lines:
        assert line["mismatch/k3"] < 1e-5 and 0 < line["publish_bytes"] < whole / 4
    assert not (tmp_path / "run" / "published").exists()


@pytest.mark.soak
def test_a_restarted_server_has_the_newest_adapter(world: World, tmp_path: Path) -> None:
    model = adapted(world.model, 7)
    written = export_adapter(model.adapter_weights(), adapter_config(model, world.model), tmp_path / "7")
    asyncio.run(world.server.load(written, 7))
    replica = world.server.replicas[0]
    assert replica._process._reaper is not None
    os.kill(started_by(replica._process._reaper.pid), signal.SIGKILL)
    until(lambda: replica.restart_count == 1 and replica.server.is_up and replica.server.version == 7, 300)
    ids, logp = world.says()
    wanted_ids, wanted = embedded(model, world.model)
    assert ids == wanted_ids and np.allclose(logp, wanted, atol=2e-3)


@pytest.mark.soak
def test_a_run_starts_a_server_that_takes_its_adapters(served_models: tuple[Path, Path], tmp_path: Path) -> None:
    """Two ranks train. The server's first weights are kept for as long as it may be restarted."""
    shutil.copytree(served_models[0], tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    options = {f"rollout.{name}": value for name, value in options_of("vllm", tmp_path).items()}
    options |= {"rollout": "vllm", "rollout.adapters": "only", "lora.rank": 9, "train.learning_rate": 0.1, "ranks": 2}
    for line in step_metrics(train(tmp_path, tmp_path / "run", **options, steps=4)):
        assert line["mismatch/k3"] < 1e-5 and line["publish_bytes"] > 0
