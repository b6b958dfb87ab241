"""A broadcast to one replica: the tensors that its ranks receive, and the error if one fails."""

from __future__ import annotations

import asyncio
import socket
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import EngineError
from etude.sync import ReplicaWeightSync
from etude.sync.broadcast import BroadcastTransport, local_address_towards
from tests.servers import Served
from tests.sync.reading import Reader, checksums, reader


class Replica(Served):
    """A reader in place of a server: it joins and fetches as the plug-in does."""

    def __init__(self, by: Reader, refuses: str = "") -> None:
        super().__init__("vllm", "http://127.0.0.1:9", None, Path())
        self.by, self.refuses = by, refuses
        self.addresses: list[str] = []
        """Where it was to meet the sender."""
        self.received: dict[str, Any] = {}
        """What it fetched."""

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        if path == self.refuses:
            await asyncio.sleep(0.3)  # by now the sender waits
            raise EngineError(f"I refuse {path}.")
        if path not in ("/init_weight_transfer_engine", "/update_weights"):
            return {"success": True}
        assert body is not None
        (request,) = body.values()
        self.addresses += [request["group"]["address"]] if "group" in request else []
        self.by.ask(request)
        self.received |= await asyncio.to_thread(self.by.answer)
        return None

    async def abort(self) -> None:
        """Do nothing: no request is under way."""

    async def resume(self) -> None:
        """Do nothing: nothing was paused."""

    async def set_version(self, version: int) -> None:
        self.version = version


@pytest.fixture(scope="module")
def by() -> Iterator[Reader]:
    """One reader process for all tests that do not change it."""
    with reader() as one_reader:
        yield one_reader


async def broadcast(
    transport: BroadcastTransport, replica: Replica, published: dict[str, torch.Tensor]
) -> dict[str, Any]:
    await transport.connect(replica)
    received: dict[str, Any] = {}
    async for bucket in transport.buckets(published.items(), True):
        pieces = [[piece.name, piece.dtype, list(piece.shape), piece.offset] for piece in bucket.pieces]
        replica.by.ask({"kind": "group", "pieces": pieces, "where": dict(bucket.where)})
        assert bucket.send is not None
        _, reply = await asyncio.gather(bucket.send(replica), asyncio.to_thread(replica.by.answer))
        received |= reply
    return received


def test_a_replica_receives_every_tensor_and_may_join_again(by: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)
    published = {"a": torch.randn(30, 40), "b": torch.randn(7).bfloat16(), "c": torch.arange(9), "d": torch.ones(200)}
    transport = BroadcastTransport("gloo", 4800, timeout=20)
    replica = Replica(by)
    assert asyncio.run(broadcast(transport, replica, published)) == checksums(published)
    assert asyncio.run(broadcast(transport, replica, published)) == checksums(published), "once joined, it stays"
    transport.disconnect(replica)
    assert asyncio.run(broadcast(transport, replica, published)) == checksums(published), "and it may come back"
    transport.close()
    named = BroadcastTransport("gloo", 4800, address="localhost", timeout=20)
    assert asyncio.run(broadcast(named, replica, published)) == checksums(published)
    assert replica.addresses == ["127.0.0.1", "127.0.0.1", "localhost"]
    named.close()


def test_the_trainers_address_is_the_one_it_reaches_the_server_from() -> None:
    assert local_address_towards("http://127.0.0.1:8000") == local_address_towards("http://localhost") == "127.0.0.1"
    with pytest.raises(EngineError, match="cannot be reached from here"):
        local_address_towards("http://no.such.host.invalid:1")


@pytest.mark.parametrize("refuses", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_server_that_refuses_at_once_is_not_waited_for(refuses: str, tmp_path: Path) -> None:
    """torch would wait for it to join, or to receive."""
    with reader() as by:
        by.ask({"kind": "disk", "pieces": [], "where": {"directory": str(tmp_path)}})
        assert by.answer() == {}, "it is there"
        replica = Replica(by, refuses)
        fleet = ReplicaWeightSync(
            [replica], BroadcastTransport("gloo", 1 << 24, address="127.0.0.1", timeout=12), timeout=12
        )
        began = time.monotonic()
        with pytest.raises(EngineError, match=f"I refuse {refuses}"):
            asyncio.run(fleet.publish([("a", torch.ones(1 << 21)), ("b", torch.ones(1 << 21))], 1))
        assert time.monotonic() - began < 9
        assert replica.withdrawn


def test_at_most_two_buckets_are_held(by: Reader) -> None:
    """The weights are created for the publish, and freed once they are sent."""
    held: set[int] = set()
    most = 0

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(24):
            made = torch.full((256, 256), float(number))
            held.add(number)
            weakref.finalize(made, held.discard, number)
            most = max(most, len(held))
            yield f"layer.{number}.weight", made
            del made

    bucket = 4  # tensors
    replica = Replica(by)
    transport = BroadcastTransport("gloo", bucket * 256 * 256 * 4, address="127.0.0.1", timeout=20)
    asyncio.run(ReplicaWeightSync([replica], transport).publish(weights(), 1))
    transport.close()
    assert len(replica.received) == 24
    assert most <= 2 * bucket + 1, "and the tensor that is next"
    assert not held
