"""The base of weight transports, and the protocols of the servers that receive weights.

Each transport is a file of this package: `shm`, `disk`, `ipc`, `broadcast`. `build_transport` of the package chooses it
by its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from etude.sync.weights import TensorMeta

BucketKind = Literal["shm", "disk", "group", "ipc"]
"""The way that the bytes of a bucket reach a server."""


class WeightEndpoints(Protocol):
    """The endpoints for weights of one kind of server: they begin, load and finish an update."""

    async def begin_update(self, server: WeightReceiver, /) -> None:
        """Open an update. One that an earlier failure left open is closed first."""
        ...

    async def load_bucket(self, server: WeightReceiver, bucket: Bucket, /) -> None:
        """Have the server load a bucket over its own weights."""
        ...

    async def finish_update(self, server: WeightReceiver, /) -> None:
        """Close the update. Its `kv` policy says what of the old weights stays cached."""
        ...

    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any], /) -> None:
        """Have all ranks of the server join a process group in which the sender is rank 0."""
        ...


class WeightReceiver(Protocol):
    """One replica behind a URL, as a transport uses it. It may be several processes, one for each of its ranks."""

    url: str
    ranks: int
    """The number of its processes that hold a share of the weights."""
    version: int
    """The policy version of the weights it holds."""

    @property
    def backend(self) -> WeightEndpoints:
        """The kind of the server."""
        ...

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request to one of its endpoints; a refusal raises an Etude error with the server's message."""
        ...

    async def abort(self) -> None:
        """End all running requests: every waiting call returns its tokens so far."""
        ...

    async def pause_for_update(self) -> None:
        """Pause between two tokens; running requests stay, with their cache as `kv` says."""
        ...

    async def resume(self) -> None:
        """Continue after a pause."""
        ...

    async def drain(self) -> None:
        """Wait until no request is running there."""
        ...

    async def interrupt(self) -> None:
        """End all running requests, so that they begin anew with the new weights, and wait until they have ended."""
        ...

    def withdraw(self) -> None:
        """Take it out of rotation: it gets no new requests until `set_version`."""
        ...

    async def set_version(self, version: int) -> None:
        """Record that it computes with the weights of this version from now on, and put it into rotation."""
        ...


@dataclass(frozen=True)
class Bucket:
    """Some of the weights, ready to be loaded."""

    kind: BucketKind
    pieces: tuple[TensorMeta, ...]
    where: Mapping[str, Any] = field(default_factory=dict)
    """The location of the weights for a server, as JSON."""
    tensor_handles: Callable[[WeightReceiver], str] | None = None
    """Build torch's own handles of the weights, in base 64, for a server that takes those."""
    send: Callable[[WeightReceiver], Coroutine[Any, Any, None]] | None = None
    """The sender's action while the server receives, for a broadcast."""


class WeightTransport(ABC):
    """One way of bringing bytes to servers."""

    @abstractmethod
    def buckets(self, weights: Iterable[tuple[str, Tensor]], whole: bool, /) -> AsyncGenerator[Bucket, None]:
        """Yield the weights as buckets. A request for the next means that all but the newest have been loaded.

        whole: not every server has the last published weights, so the unchanged ones must be sent too.
        """

    async def connect(self, server: WeightReceiver) -> None:  # noqa: B027
        """Prepare to bring weights to a server; do nothing if it is connected, or needs no connection."""

    def disconnect(self, server: WeightReceiver) -> None:  # noqa: B027
        """Forget a server that failed: the next `connect` starts from nothing."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""
