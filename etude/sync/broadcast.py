"""Publishing across machines: a broadcast in a process group that the sender creates with each replica.

    sender (rank 0) ──broadcast──► rank 1 … rank n of one replica

Each replica has its own group, so that one failing replica does not affect the others. `nccl` runs between GPUs. `gloo`
runs between CPUs, and serves machines without a GPU. The sender broadcasts the tensors of a bucket one after another,
while the server's endpoint receives them in the same order. For `nccl` the bucket is in GPU memory.

    waits for      the replica's ranks to join, and then to receive; the group's timeout ends both
    unblocked by   the ranks, or the server's refusal. After a refusal the caller does not wait: torch may still wait on
                   a separate thread, until the timeout
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed
from torch import Tensor

from etude.errors import EngineError, EtudeError
from etude.sync.transport import Bucket, WeightReceiver, WeightTransport
from etude.sync.weights import TensorMeta, WeightStream, dtype_name, gather_full_tensor

BroadcastBackend = Literal["gloo", "nccl"]
CLOSE_TIMEOUT = 5.0
"""Seconds that a group with no pending operation gets to close."""
_dist: Any = torch.distributed  # which process groups it has depends on how torch was built


class BroadcastTransport(WeightTransport):
    """The transport to servers that join a process group."""

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
        """device: for `nccl`, the GPU to send from; by default the caller's, because threads may differ in theirs."""
        self._backend = backend
        self.device = torch.device("cpu") if backend == "gloo" else device or _current_device()
        """The device that sent tensors must be on."""
        self._bucket_bytes = bucket_bytes
        self._dtype = dtype
        self._address = address
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, _BroadcastGroup] = {}
        self.name = f"etude-{secrets.token_hex(4)}"
        """The name of every group; each group has its own store."""

    async def buckets(self, weights: Iterable[tuple[str, Tensor]], _whole: bool, /) -> AsyncGenerator[Bucket, None]:
        stream = WeightStream(weights, self._dtype)
        while named := await asyncio.to_thread(self._next_tensors, stream):
            pieces = tuple(TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape), 0) for name, tensor in named)
            send = partial(self._send, [tensor for _, tensor in named])
            yield Bucket("group", pieces, {"group": self.name}, send=send)

    async def connect(self, server: WeightReceiver) -> None:
        """Create a group with all ranks of a server."""
        if server.url in self._groups:
            return
        group = _BroadcastGroup(self.name, self.device, server.ranks + 1, self._timeout)
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
                both.create_task(server.backend.join_group(server, init_info))
                both.create_task(_run_in_thread(group.wait_for_ranks))
        except* (EtudeError, OSError, RuntimeError) as ends:
            group.release()
            raise EngineError(" ".join(str(error) for error in ends.exceptions)) from ends
        self._groups[server.url] = group

    def disconnect(self, server: WeightReceiver) -> None:
        group = self._groups.pop(server.url, None)
        if group is not None:
            group.release()

    def close(self) -> None:
        ends = [group.release() for group in self._groups.values()]
        self._groups.clear()
        for thread in ends:
            thread.join(CLOSE_TIMEOUT)

    def _next_tensors(self, stream: WeightStream) -> list[tuple[str, Tensor]]:
        """Return tensors ready to be sent: at least one, and no more than fit into a bucket."""
        bucket: list[tuple[str, Tensor]] = []
        room = self._bucket_bytes
        while (following := stream.peek()) is not None and (not bucket or stream.next_nbytes() <= room):
            name, tensor, dtype = following
            room -= stream.next_nbytes()
            bucket.append((name, gather_full_tensor(tensor).to(device=self.device, dtype=dtype).contiguous()))
            stream.advance()
        return bucket

    async def _send(self, tensors: Sequence[Tensor], server: WeightReceiver) -> None:
        """Broadcast tensors in the group with a server."""
        if server.url not in self._groups:
            raise EngineError(f"{server.url} has left the process group that weights are broadcast in.")
        await _run_in_thread(partial(self._groups[server.url].broadcast, tensors))


def local_address_towards(url: str) -> str:
    """Return the address of this machine on the route to a server, by which the server reaches it."""
    there = urlsplit(url)
    try:
        family, kind, *_, place = socket.getaddrinfo(there.hostname, there.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            address: str = probe.getsockname()[0]
    except OSError as error:
        raise EngineError(f"{url} cannot be reached from here: {error}. Set this machine's `address`.") from error
    return address


class _BroadcastGroup:
    """A process group separate from the trainer's own. The sender holds its store."""

    def __init__(self, name: str, device: torch.device, size: int, timeout: timedelta) -> None:
        """device: the GPU to send from by `nccl`, or the CPU to send by `gloo`."""
        self.name = name
        self.size = size
        self._device = device
        self._timeout = timeout
        self._store: Any = None
        self._group: Any = None

    def listen(self, address: str) -> int:
        """Open the store that all ranks connect to; return its port."""
        self._store = _dist.TCPStore(address, 0, self.size, True, self._timeout, wait_for_workers=False)
        port: int = self._store.port
        return port

    def wait_for_ranks(self) -> None:
        """Wait for all ranks to join. The prefixes are those of torch's own helper for a named group."""
        named = _dist.PrefixStore(self.name, self._store)
        store = _dist.PrefixStore(f"{self.name}/", named)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread, which begins with GPU 0
            options = _dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = _dist.ProcessGroupNCCL(_dist.PrefixStore("cuda/", store), 0, self.size, options)
        else:
            self._group = _dist.ProcessGroupGloo(_dist.PrefixStore("cpu/", store), 0, self.size, self._timeout)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast the tensors in turn. Their bytes are copied: a receiver reads what was sent, in any dtype."""
        options = _dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait(self._timeout)

    def release(self) -> Thread:
        """Release the group on a separate thread, and return the thread.

        torch waits there for pending operations: with `nccl` it returns at once, with `gloo` after the timeout.
        """
        held = [self._group]
        self._group = self._store = None
        return _start_thread(lambda: _abort_group(held))


def _current_device() -> torch.device:
    """Return the GPU of this thread."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


async def _run_in_thread(work: Callable[[], None]) -> None:
    """Run `work` on a separate thread. Neither a cancelled caller nor a closing event loop waits for it."""
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
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, failure)

    _start_thread(run)
    await done


def _start_thread(work: Callable[[], None]) -> Thread:
    thread = Thread(target=work, name="etude-group")  # not a daemon: Python must not exit while torch is inside a call
    thread.start()
    return thread


def _abort_group(held: list[Any]) -> None:
    with suppress(RuntimeError, AttributeError):
        held[0].abort()
    held.clear()
