"""What a carrier asks of an engine that is a server, and what it hands over."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from etude.sync.weights import TensorMeta

__all__ = ["Bucket", "BucketKind", "BucketStream", "NamedBackend", "WeightReceiver", "WeightTransport"]

BucketKind = Literal["shm", "disk", "group", "ipc"]
"""How the bytes of a parcel reach a server."""


class NamedBackend(Protocol):
    """What kind of server it is."""

    @property
    def name(self) -> str:
        """`vllm` or `sglang`."""
        ...


class WeightReceiver(Protocol):
    """One replica behind a URL, as a carrier sees it. It may be several processes, one for each of its ranks."""

    url: str
    ranks: int
    """How many processes of it hold a share of the weights."""
    version: int
    """The policy version of the weights it holds."""

    @property
    def backend(self) -> NamedBackend:
        """Whose endpoints it has."""
        ...

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask one of its endpoints; a refusal is an error of ours that repeats what it said."""
        ...

    async def abort(self) -> None:
        """End all that is under way: every waiting call returns what it has."""
        ...

    async def resume(self) -> None:
        """Go on after a pause."""
        ...

    async def drain(self) -> None:
        """Wait until nothing is under way there."""
        ...

    def withdraw(self) -> None:
        """Take it out of rotation: nothing new is asked of it until it is stamped."""
        ...

    async def set_version(self, version: int) -> None:
        """It computes with the weights of this version from now on, and is in rotation."""
        ...


@dataclass(frozen=True)
class Bucket:
    """Some of the weights, ready to be fetched."""

    kind: BucketKind
    pieces: tuple[TensorMeta, ...]
    where: Mapping[str, Any] = field(default_factory=dict)
    """What a server needs to find them, as JSON."""
    tensor_handles: Callable[[WeightReceiver], str] | None = None
    """The same as torch's own handles, in base 64, for a server that takes those."""
    send: Callable[[WeightReceiver], Coroutine[Any, Any, None]] | None = None
    """What the sender does while the server fetches."""


class WeightTransport(Protocol):
    """One way of bringing bytes to servers."""

    def buckets(self, weights: Iterable[tuple[str, Tensor]], whole: bool, /) -> BucketStream:
        """The weights in parcels. Asking for one more says that all but the newest have been fetched.

        whole: not every server has what was published last, so what did not change since must come too.
        """
        ...

    async def connect(self, server: WeightReceiver) -> None:
        """Prepare to bring weights to a server; nothing happens where that was done."""
        ...

    def disconnect(self, server: WeightReceiver) -> None:
        """Forget a server that failed: the next `join` begins anew."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class BucketStream(Protocol):
    """Parcels, made one at a time."""

    async def next(self) -> Bucket | None:
        """The next one; none at the end."""
        ...
