"""The interfaces between the packages: one small protocol for each. Classes satisfy them by structure, without
inheritance.

    TokenGenerator         sampling from a model
    Observation, Env       environments
    Crew, dispatch_mode    the ranks of a worker group, and how a call is split over them

The interfaces inside a package stand there: `Backend` in `etude/train/backend.py`, `WeightTransport` in
`etude/sync/transport.py`.

Timeouts are the caller's. A coroutine of these protocols may be cancelled at any await, and leaves no half-done work
that breaks a later call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from etude.images import PromptImages
from etude.records import Completion, Message, SamplingParams, Task

if TYPE_CHECKING:
    from etude.batch import Batch, BatchMeta, StoredBytes

Ids = NDArray[np.int32]
P = ParamSpec("P")
R = TypeVar("R")


# -- sampling from a model --------------------------------------------------------------------------------------------


@runtime_checkable
class TokenGenerator(Protocol):
    """Token ids in, token ids out. Any number of calls may run at the same time."""

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Sample one continuation. Each of its tokens has its log-prob and the policy version that sampled it.

        images: those of the prompt; a model that takes text alone refuses them. on_start: called once the request
        leaves the queue and runs, on any thread.
        """
        ...


# -- environments -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """The reply of an environment to an answer. Example: `Observation("Higher.", reward=0.1)`."""

    content: str | Sequence[Any] = ()
    """The next input of the model: text, messages (also as JSON objects), or texts and images, as one user message.

    An image is one of Pillow, or the bytes of a PNG, JPEG, WebP or GIF. The content of a message may have them too.
    The first observation chooses the form of the rollout. After text, the model continues plain text, and later
    observations are appended as they are. After messages, the rollout is a conversation, and text becomes a user
    message. If `reset` returns no content, the rollout begins with the task's prompt.
    """
    reward: float | Mapping[str, float] | None = None
    """The reward of the last answer, and of its turn: a number, or named parts that are summed. None adds nothing."""
    done: bool = False
    """True ends the rollout."""
    truncated: bool = False
    """True if the rollout ends at a limit, and not at its natural end."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The tools that the model may call, as JSON schemas. `reset` sets them for the whole rollout."""
    anchor: str | None = None
    """The name of the state in which the next answer is given; None uses `content` as the name."""
    role: int = 0
    """The player of a game that the model is. `reset` sets it."""
    opponent: int | None = None
    """The other player whose turn it is; None is the model's own turn. The policy answers for it too, in a conversation
    that only this player sees, and the answer is not trained. Give the answer's effect on the game, but no reward of
    the other player: all rewards are the model's."""


class Env(Protocol):
    """An environment in plain Python. Each rollout makes one object when it begins.

    A coroutine method is awaited on the run's event loop. Other methods are called on a thread that only this
    object uses.
    Random numbers must be derived from the task: the rollouts of a task then see the same ones, and so does a run that
    resumes. If the object has a `close`, it is called when the rollout ends.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Return the first observation of a rollout."""
        ...

    def step(self, answer: Message) -> Observation | Awaitable[Observation]:
        """Return the observation that follows an answer."""
        ...


# -- new weights, and workers -----------------------------------------------------------------------------------------

RunningPolicy = Literal["continue", "finish", "restart"]
"""The treatment of running requests when new weights arrive.

continue: they go on with the new weights. finish: they end first. restart: their tokens are dropped and drawn anew.
"""
KvPolicy = Literal["keep", "recompute"]
"""The treatment of the cached keys and values of running requests that go on with new weights."""
TransportName = Literal["shm", "ipc", "gloo", "nccl"]
"""The weight transports between ranks and servers that a run can choose; `etude/sync/` implements them."""


class Crew(Protocol):
    """The ranks of one worker group behind one interface. The caller does not know how many there are.

    A crew that inherits from this class keeps every stored value and batch in the controller, unless it overrides
    `call_for_ref`, `put`, `put_bytes`, `build_batch` and `fetch`.
    """

    def call(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call a worker's method on all ranks. The method's `dispatch_mode` splits the arguments and merges the
        results."""
        ...

    def call_for_ref(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Like `call`, for a method that returns a batch. The batch may stay on the ranks; the result is then a handle.

        The handle has the batch's `split`. It can be passed to other calls of this crew, or of a crew on the same
        machines.
        """
        return self.call(method, *args, **kwargs)

    def put(self, value: object) -> Any:
        """Store a value where the ranks can read it, and return its handle. The value lives as long as a handle
        does."""
        return value

    def put_bytes(self, content: bytes) -> bytes | StoredBytes:
        """Store bytes where the ranks can read them, and return a handle that batches carry in their place, or the
        bytes."""
        return content

    def build_batch(
        self,
        meta: BatchMeta,  # noqa: ARG002
        refs: Sequence[Any],
        factory: Callable[[Sequence[Any], Sequence[Any]], Batch],
        metadata: Sequence[Any],
    ) -> Batch:
        """Return the batch `factory(values, metadata)`, of stored values and metadata, one of each a rollout.

        meta: the lengths and groups of the batch. A crew may build the batch lazily, on the ranks that need it, a part
        at a time.
        """
        return factory(refs, metadata)

    def fetch(self, batch: Batch) -> Batch:
        """Copy a batch that stayed on the ranks into this process."""
        return batch

    def close(self) -> None:
        """Stop every worker within a bounded time."""
        ...


# -- how a call is split over ranks -----------------------------------------------------------------------------------


class Split(StrEnum):
    """The way in which the arguments of a call reach the ranks."""

    SAME = "same"  # every rank gets all arguments
    ROLLOUTS = "rollouts"  # batches are split over data-parallel ranks by whole rollouts; other arguments are the same
    GROUPS = "groups"  # like ROLLOUTS, but by whole groups, for statistics within a group


class Gather(StrEnum):
    """The way in which the ranks' results become one result."""

    FIRST = "first"  # the first rank's result; all ranks return the same
    CONCAT = "concat"  # batches, concatenated in the order of the split
    METRICS = "metrics"  # metrics, merged by the reduction of each
    ALL = "all"  # a list with one entry for each rank


@dataclass(frozen=True, slots=True)
class DispatchMode:
    """The split and the gather of one worker method."""

    split: Split
    gather: Gather


_DISPATCH_MODES: WeakKeyDictionary[Callable[..., Any], DispatchMode] = WeakKeyDictionary()


def dispatch_mode(
    split: Split = Split.SAME, gather: Gather = Gather.FIRST
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare how a crew splits a worker method's arguments and gathers its results. The method itself is unchanged."""

    def declare(method: Callable[P, R]) -> Callable[P, R]:
        _DISPATCH_MODES[method] = DispatchMode(split, gather)
        return method

    return declare


def get_dispatch_mode(method: Callable[..., Any]) -> DispatchMode:
    """Return the dispatch mode that a method declared. An override does not inherit it. Calling an undeclared method on
    a crew is a bug."""
    function = method.__func__ if isinstance(method, MethodType) else method
    assert function in _DISPATCH_MODES, f"{function.__qualname__} has no dispatch mode: decorate it with @dispatch_mode"
    return _DISPATCH_MODES[function]
