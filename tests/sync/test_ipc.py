"""Two buckets on a GPU: the tensors that another process reads there, by either kind of handle."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from etude.errors import EngineError
from etude.sync import ipc
from etude.sync.ipc import IpcTransport
from tests.servers import Served
from tests.sync.reading import checksums, reader

BUCKET = 1 << 16


@pytest.mark.gpu
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


def test_a_handle_in_a_form_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    described = ("Tensor", (2,), (1,), 0, "storage", "uint8")
    handle = (0, b"memory", 2, 0, False, b"counter", 0, b"event", True)
    monkeypatch.setattr(ipc, "reduce_tensor", lambda _: (None, (*described, *handle)))
    assert ipc._handle(torch.zeros(2)) == (0, 2, b"memory", 0, b"counter", 0, b"event", True)
    monkeypatch.setattr(ipc, "reduce_tensor", lambda _: (None, (*described, "0", *handle)))
    with pytest.raises(EngineError, match=r"in a form that Etude does not know \(str, int, bytes"):
        ipc._handle(torch.zeros(2))
