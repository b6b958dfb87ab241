"""Publishing across machines: a broadcast in a process group that the sender makes with each replica.

    sender (rank 0) ──broadcast──► rank 1 … rank n of one replica

One group for each replica, so that one that dies takes no other with it. `nccl` runs between GPUs; `gloo` between
processors, and is how all of this runs where there is no GPU. A parcel is sent one tensor after the other while the
server's endpoint fetches in the same order, from a bucket in the sender's memory: that of a GPU for `nccl`.

    waits for      the replica's ranks to join, and then to fetch; both end by the group's own timeout
    unblocked by   them, or by the server's refusal, after which nobody waits: what torch still waits for, it does on a
                   thread of its own, until that timeout
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

from etude.errors import EngineError, EtudeError
from etude.sync.transport import Bucket, WeightReceiver
from etude.sync.weight_update_endpoints import get_weight_update_endpoints
from etude.sync.weights import TensorMeta, WeightStream, dtype_name, gather_full_tensor

__all__ = ["BroadcastBackend", "BroadcastTransport", "local_address_towards"]

BroadcastBackend = Literal["gloo", "nccl"]
CLOSE_TIMEOUT = 5.0
"""Seconds for a group to end where nobody waits in it."""
_dist: Any = torch.distributed  # which process groups it has depends on how torch was built


class BroadcastTransport:
    """A `WeightTransport` to servers that join a process group."""

    def __init__(
        self,
        backend: BroadcastBackend,
        bucket_bytes: int,
        dtype: torch.dtype | None = None,
        *,
        address: str | None = None,
        timeout: float = 300.0,
        device: torch.device | None = None,
    ) -> None:
        """device: for `nccl`, the GPU that is sent from; by default the caller's: another thread may have another."""
        self._backend = backend
        self.device = torch.device("cpu") if backend == "gloo" else device or _current_device()
        """Where what is sent must lie."""
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._address = address
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, _BroadcastGroup] = {}
        self.name = f"etude-{secrets.token_hex(4)}"
        """What the groups are called, each in a store of its own."""

    def buckets(self, weights: Iterable[tuple[str, Tensor]], _whole: bool, /) -> _BroadcastBuckets:
        """The weights, a bucket at a time."""
        return _BroadcastBuckets(self, WeightStream(weights, self._dtype), self._bucket_bytes)

    async def connect(self, server: WeightReceiver) -> None:
        """Make a group with all ranks of a server."""
        if server.url in self._groups:
            return
        group = _BroadcastGroup(self.name, self._backend, server.ranks + 1, self._timeout)
        address = self._address or local_address_towards(server.url)
        port = group.listen(address)
        init_info = {
            "name": group.name,
            "backend": self._backend,
            "address": address,
            "port": port,
            "size": group.size,
            "timeout": self._timeout.total_seconds(),
        }
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(get_weight_update_endpoints(server).join_group(server, init_info))
                both.create_task(_run_in_thread(group.wait_for_ranks))
        except* (EtudeError, OSError, RuntimeError) as ends:
            group.release()
            raise EngineError(" ".join(str(error) for error in ends.exceptions)) from ends
        self._groups[server.url] = group

    def disconnect(self, server: WeightReceiver) -> None:
        """End the group with a server that failed."""
        group = self._groups.pop(server.url, None)
        if group is not None:
            group.release()

    def close(self) -> None:
        """End all groups."""
        ends = [group.release() for group in self._groups.values()]
        self._groups.clear()
        for thread in ends:
            thread.join(CLOSE_TIMEOUT)

    def group(self, server: WeightReceiver) -> _BroadcastGroup:
        """The group with a server."""
        if server.url not in self._groups:
            raise EngineError(f"{server.url} has left the process group that weights are broadcast in.")
        return self._groups[server.url]


def local_address_towards(url: str) -> str:
    """The address of this machine from which it reaches a server, and the server it."""
    there = urlsplit(url)
    try:
        family, kind, *_, place = socket.getaddrinfo(there.hostname, there.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # which sends nothing
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise EngineError(f"{url} cannot be reached from here: {error}. Say from where with `address`.") from error
    return address


class _BroadcastGroup:
    """A process group apart from the one that the trainer's ranks may have. Its store lives with the sender."""

    def __init__(self, name: str, backend: BroadcastBackend, size: int, timeout: timedelta) -> None:
        self.name = name
        self.size = size
        self._backend = backend
        self._timeout = timeout
        self._store: Any = None
        self._group: Any = None

    def listen(self, address: str) -> int:
        """Open the store that all ranks meet at; returns its port."""
        self._store = _dist.TCPStore(address, 0, self.size, True, self._timeout, wait_for_workers=False)
        port: int = self._store.port
        return port

    def wait_for_ranks(self) -> None:
        """Wait for all ranks. The prefixes are those under which torch's own helper has a named group meet."""
        named = _dist.PrefixStore(self.name, self._store)
        store = _dist.PrefixStore(f"{self.name}/", named)
        if self._backend == "nccl":
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = _dist.ProcessGroupNCCL(_dist.PrefixStore("cuda/", store), 0, self.size, options)
        else:
            self._group = _dist.ProcessGroupGloo(_dist.PrefixStore("cpu/", store), 0, self.size, self._timeout)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast each in turn, as bytes: what is read is what was written, whatever a transport calls its dtype."""
        options = _dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait(self._timeout)

    def release(self) -> Thread:
        """Let go of it, on a thread of its own: torch waits there for who waits in it, which is over at once with
        `nccl`, and with `gloo` when the timeout is."""
        held = [self._group]
        self._group = self._store = None
        return _start_thread(lambda: _abort_group(held))


class _BroadcastBuckets:
    """Buckets of tensors, ready to be sent."""

    def __init__(self, transport: BroadcastTransport, stream: WeightStream, bucket_bytes: int) -> None:
        self._transport = transport
        self._stream = stream
        self._bucket_bytes = bucket_bytes

    async def next(self) -> Bucket | None:
        """The next bucket."""
        tensors = await asyncio.to_thread(self._bucket)
        if not tensors:
            return None
        pieces = tuple(TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0) for name, tensor in tensors)

        async def sent(server: WeightReceiver) -> None:
            group = self._transport.group(server)
            await _run_in_thread(lambda: group.broadcast([tensor for _, tensor in tensors]))

        return Bucket("group", pieces, {"group": self._transport.name}, send=sent)

    def _bucket(self) -> list[tuple[str, Tensor]]:
        """Tensors as they are to be sent: at least one, and no more than a bucket of them."""
        bucket: list[tuple[str, Tensor]] = []
        room = self._bucket_bytes
        while (following := self._stream.peek()) is not None and (not bucket or self._stream.next_nbytes() <= room):
            name, tensor, dtype = following
            room -= self._stream.next_nbytes()
            bucket.append(
                (name, gather_full_tensor(tensor).to(device=self._transport.device, dtype=dtype).contiguous())
            )
            self._stream.advance()
        return bucket


def _current_device() -> torch.device:
    """The GPU of this thread."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


async def _run_in_thread(work: Callable[[], None]) -> None:
    """Do this on a thread of its own. Who gives it up does not wait for it, nor does the loop when it ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
            loop.call_soon_threadsafe(finish, failure)

    _start_thread(run)
    await done


def _start_thread(work: Callable[[], None]) -> Thread:
    thread = Thread(target=work, name="etude-group")  # which Python waits for when it ends: torch cannot be left midway
    thread.start()
    return thread


def _abort_group(held: list[Any]) -> None:
    with suppress(RuntimeError, AttributeError):
        held[0].abort()
    held.clear()
