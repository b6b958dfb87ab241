"""Two buckets of shared memory: the tensors that another process reads there, and the memory that they take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.sync.shm import SharedBucket, ShmTransport
from etude.sync.transport import Bucket
from etude.sync.weights import WeightStream
from tests.servers import Served
from tests.sync.reading import Reader, checksums, reader

BUCKET = 1 << 16


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Return tensors of several sizes and dtypes; the second is larger than a bucket."""
    chance = torch.Generator().manual_seed(seed)
    sizes = {"a": (7, 11), "b": (300, 100), "c": (3,), "d": (64, 128), "e": (50, 100), "f": (1,)}
    made = {name: torch.randn(size, generator=chance) for name, size in sizes.items()}
    return made | {"a": made["a"].bfloat16(), "counts": torch.arange(5)}


async def fetched(
    transport: ShmTransport, published: dict[str, Tensor], by: Reader, *, torch_handles: bool
) -> list[Bucket]:
    """Fetch every bucket in the other process, check the tensors, and return the buckets."""
    seen: list[Bucket] = []
    received: dict[str, Any] = {}
    async for bucket in transport.buckets(published.items(), True):
        seen.append(bucket)
        if torch_handles:
            assert bucket.tensor_handles is not None
            by.ask({"handles": bucket.tensor_handles(Served("sglang", "http://nowhere", None, Path()))})
        else:
            pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in bucket.pieces]
            by.ask({"kind": "shm", "pieces": pieces, "where": dict(bucket.where)})
        received |= await asyncio.to_thread(by.answer)
    assert received == checksums(published)
    return seen


def test_another_process_reads_every_tensor_and_two_buckets_exist() -> None:
    with reader() as by:
        for torch_handles in (False, True):
            check_fetched(by, torch_handles=torch_handles)


def check_fetched(by: Reader, *, torch_handles: bool) -> None:
    """Publish three times and check the fetched tensors; check that nothing is left."""
    transport = ShmTransport(BUCKET)
    for seed in range(3):
        buckets = asyncio.run(fetched(transport, weights(seed), by, torch_handles=torch_handles))
        assert len(buckets) > 2
        paths = {bucket.where["path"] for bucket in buckets}
        assert len(paths) == 2 and all(Path(path).exists() for path in paths)
    largest = max(BUCKET, max(tensor.nbytes for tensor in weights().values()))
    assert transport.held_bytes <= 2 * (largest + 64)
    transport.close()
    assert not any(Path(path).exists() for path in paths)


def test_a_slot_casts_and_aligns(caplog: pytest.LogCaptureFixture) -> None:
    slot = SharedBucket(BUCKET)
    for _ in range(2):
        pieces = slot.fill(WeightStream(weights().items(), torch.float16))
    (warned,) = (record.getMessage() for record in caplog.records)
    assert warned.startswith("`dtype=float16` rounds weights of float32 on their way.")
    assert [piece.name for piece in pieces] == ["a", "b", "c"]
    assert all(piece.offset % 64 == 0 and piece.dtype == "float16" for piece in pieces)
    slot.close()
    assert slot.capacity == 0


def test_a_bucket_that_shared_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not fit into /dev/shm.*`bucket_mib`"):
        SharedBucket(1 << 50).fill(WeightStream(weights().items()))
