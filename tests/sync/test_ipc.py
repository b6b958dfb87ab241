"""Two buckets on a GPU: the tensors that another process reads there, by either kind of handle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.sync.ipc import IpcTransport
from tests.servers import Served
from tests.sync.reading import checksums, reader

pytestmark = pytest.mark.gpu
BUCKET = 1 << 16


@pytest.mark.parametrize("torch_handles", [False, True])
def test_another_process_reads_the_tensors(torch_handles: bool) -> None:
    chance = torch.Generator().manual_seed(0)
    sizes = {"a": (7, 11), "larger than a bucket": (300, 100), "b": (64, 128), "c": (50, 100), "d": (1,)}
    published = {name: torch.randn(size, generator=chance).cuda() for name, size in sizes.items()}
    published |= {"a": published["a"].bfloat16(), "counts": torch.arange(5).cuda()}
    received: dict[str, object] = {}
    transport = IpcTransport(BUCKET)

    async def publish(weights: dict[str, Tensor]) -> None:
        async for bucket in transport.buckets(weights.items(), True):
            if torch_handles:
                assert bucket.tensor_handles is not None
                other.ask({"handles": bucket.tensor_handles(Served("sglang", "http://nowhere", None, Path()))})
            else:
                pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in bucket.pieces]
                other.ask({"kind": "ipc", "pieces": pieces, "where": dict(bucket.where)})
            received.update(await asyncio.to_thread(other.answer))

    with reader("cuda") as other:
        asyncio.run(publish(published))
        transport.close()
    assert received == checksums({name: tensor.cpu() for name, tensor in published.items()})
