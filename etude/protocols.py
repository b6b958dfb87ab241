"""What the rooms ask of each other: one small protocol for each seam, met by structure and not by inheritance.

Each says who calls it and what it may rely on. Waiting is the caller's to bound: every coroutine here may be cancelled
at any await, and leaves nothing half done that a later call could trip over.

A worker's method also says how a call to all of its ranks is divided and put together again (`spread`), so that a
worker need not know what carries the call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from etude.records import Completion, Message, SamplingParams, Task, Turn

if TYPE_CHECKING:
    from torch import Tensor

    from etude.batch import Batch, BatchMeta

__all__ = [
    "ChatModel",
    "Crew",
    "DispatchMode",
    "Env",
    "Gather",
    "JournalProtocol",
    "Observation",
    "Renderer",
    "Reward",
    "RolloutEngine",
    "Scorer",
    "Split",
    "TokenGenerator",
    "TrainEngine",
    "WeightSync",
    "dispatch_mode",
    "get_dispatch_mode",
]

Ids = NDArray[np.int32]
E = TypeVar("E")
"""A store's events."""
P = ParamSpec("P")
R = TypeVar("R")


# -- talking to a model -----------------------------------------------------------------------------------------------


@runtime_checkable
class TokenGenerator(Protocol):
    """Token ids in, token ids out. Any number of calls may be under way at once."""

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, on_start: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation. Every token of it carries its log-prob and the version that sampled it.

        begun: is called, on any thread, when it is this request's turn, which may be long after it came.
        """
        ...


@runtime_checkable
class ChatModel(Protocol):
    """Messages in, a message out: what an environment or an agent talks to."""

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> tuple[Message, Turn]:
        """Answer a conversation, and say which tokens were read and written for it."""
        ...


class Renderer(Protocol):
    """A chat template and its inverse."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Ids:
        """The ids of a conversation, up to where the assistant is to speak."""
        ...

    def parse(self, completion: Ids) -> Message:
        """What the model said. A malformed tool call stays text."""
        ...


# -- judging ----------------------------------------------------------------------------------------------------------


class Reward(Protocol):
    """A reward function: text in, a number or named parts out. It may be a coroutine function."""

    def __call__(
        self, task: Task, answer: str
    ) -> float | Mapping[str, float] | Awaitable[float | Mapping[str, float]]: ...


class Scorer(Protocol):
    """A model that judges token sequences: a reward model behind an engine."""

    async def score(self, sequences: Sequence[Ids]) -> NDArray[np.float64]:
        """One number a sequence, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment answers. Example: `Observation("Higher.", reward=0.1)`."""

    content: str | Sequence[Message | Mapping[str, Any]] = ()
    """What the model is shown next: text, or messages (or their JSON form).

    A rollout that begins with text is text: what is shown later is continued as it stands, too. One that begins with
    messages is a conversation, in which text is a user's message. Where `reset` shows nothing, it begins with the
    task's own prompt.
    """
    reward: float | Mapping[str, float] | None = None
    """What the last answer earned: a number, or parts by name that are added up. It belongs to that answer's turn."""
    done: bool = False
    """Whether it is over."""
    truncated: bool = False
    """Whether it is over because it was cut off, and not because it came to its end."""
    tools: Sequence[Mapping[str, Any]] = ()
    """What the model may call, as JSON schemas; `reset` tells them for the whole rollout."""
    anchor: str | None = None
    """Names the state that the next answer is given in; where nobody names it, what is shown does."""
    role: int = 0
    """Which player of a game the model is; `reset` tells it."""


class Env(Protocol):
    """A conversation partner in plain Python: one object for one rollout, made when that begins.

    Either method may be a coroutine function, and is then awaited where the run is; any other is called on a thread
    that is this object's alone. All chance in it is to follow from the task, so that the tries at one task meet the
    same, and a run that was killed meets it again. One that has a `close` is closed when its rollout has ended.
    """

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """What the model is shown first."""
        ...

    def step(self, answer: Message) -> Observation | Awaitable[Observation]:
        """What comes of an answer."""
        ...


# -- the machines -----------------------------------------------------------------------------------------------------


class TrainEngine(Protocol):
    """Owner of weights, optimizer and their version. It never sees a loss by name, only what it is to minimise."""

    @property
    def version(self) -> int:
        """The policy version of the weights it holds."""
        ...

    def annotate(self, batch: Batch, columns: frozenset[str]) -> Batch:
        """The batch with these columns computed by the model as it stands."""
        ...

    def update(self, batch: Batch) -> Mapping[str, float]:
        """One optimizer step over an update batch; `version` goes up by one."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by their published names, as views and not as copies."""
        ...


class RolloutEngine(TokenGenerator, Protocol):
    """Owner of a copy of the weights, stamped with a version. A `WeightSync` is its only writer."""

    @property
    def version(self) -> int:
        """The policy version of the weights it holds."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens. Requests under way stay, and go on after `resume`."""
        ...

    async def resume(self) -> None:
        """Go on with what is under way."""
        ...

    async def sleep(self) -> None:
        """Give the memory back. Nothing may be under way."""
        ...

    async def wake(self) -> None:
        """Take the memory again. The weights may be stale until the next publish."""
        ...


class WeightSync(Protocol):
    """Brings weights from where they are trained to where they are sampled."""

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Mapping[str, float]:
        """Returns once every engine computes with exactly these; what it cost (bytes, seconds) comes back as metrics.

        A failure in the middle leaves an engine on its old weights, or out of service; never on a mixture.
        """
        ...


class Crew(Protocol):
    """The worker processes of one pool, spoken to as one. Nobody outside knows how many there are."""

    def call(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call a worker's method on all ranks, divided and joined as the method's `spread` says."""
        ...

    def call_for_ref(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """As `call`, of a method that gives a batch, which may stay where it was made: what is returned then stands
        for it. It has the batch's `split` and can be given to other calls, of this crew or of one beside it."""
        ...

    def put(self, value: object) -> Any:
        """Lay a value down where ranks can look at it, and return what stands for it, here or there; it stays for as
        long as anybody has that."""
        ...

    def build_batch(
        self,
        outline: BatchMeta,
        refs: Sequence[Any],
        make: Callable[[Sequence[Any], Sequence[Any]], Batch],
        metadata: Sequence[Any],
    ) -> Batch:
        """The batch `make(values, told)` of values that were kept, one for each rollout, and of what the controller
        knows of each. It is of this outline, and may be made only where it is needed, a part at a time."""
        ...

    def fetch(self, batch: Batch) -> Batch:
        """A batch that stayed where it was made, here, for somebody to look at."""
        ...

    def close(self) -> None:
        """End every worker, within a bounded time."""
        ...


# -- the journal ------------------------------------------------------------------------------------------------------


class JournalProtocol(Protocol[E]):
    """The append-only journal of a run's events. Status is derived from them, never set. Any thread may call it."""

    @property
    def position(self) -> int:
        """The position of the newest event: events are numbered from 1, without a gap."""
        ...

    def append(self, events: Sequence[E]) -> int:
        """Write these events, all or none, and return the position of the last one.

        When it returns they survive the death of the process.
        """
        ...

    def read(self, position: int = 0) -> Iterator[tuple[int, E]]:
        """The events after a position, each with its own, in the order they were written."""
        ...

    def turns(self, rollout: int, attempt: int | None = None) -> list[Turn]:
        """The turns of an attempt in order; by default of a rollout's last one."""
        ...

    def admitted(self, position: int = 0) -> dict[int, tuple[int, ...]]:
        """Which rollouts each step trained on, for the steps admitted after a position."""
        ...

    def flush(self) -> None:
        """Make all that is written survive the loss of power too. A checkpoint calls it before it names a position."""
        ...

    def close(self) -> None:
        """Let go of it. Nothing may be asked afterwards."""
        ...


# -- how a call is divided over ranks ---------------------------------------------------------------------------------


class Split(StrEnum):
    """How the arguments of a call reach the ranks."""

    SAME = "same"  # every rank gets all of them
    ROLLOUTS = "rollouts"  # batches are cut over data-parallel ranks by whole rollouts; the rest is the same
    GROUPS = "groups"  # the same by whole groups, for statistics within them


class Gather(StrEnum):
    """How the ranks' results become one."""

    FIRST = "first"  # all ranks return the same: the first one's
    CONCAT = "concat"  # batches, end to end in the order they were cut
    METRICS = "metrics"  # merged by each metric's own reduction
    ALL = "all"  # a list with one entry for each rank


@dataclass(frozen=True, slots=True)
class DispatchMode:
    """How one method of a worker is called on all ranks."""

    split: Split
    gather: Gather


_DISPATCH_MODES: WeakKeyDictionary[Callable[..., Any], DispatchMode] = WeakKeyDictionary()


def dispatch_mode(
    split: Split = Split.SAME, gather: Gather = Gather.FIRST
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare how a worker's method is divided and gathered. The method itself is unchanged, and called as it is."""

    def declare(method: Callable[P, R]) -> Callable[P, R]:
        _DISPATCH_MODES[method] = DispatchMode(split, gather)
        return method

    return declare


def get_dispatch_mode(method: Callable[..., Any]) -> DispatchMode:
    """What a method declared. One that overrides another declares for itself; to call an undeclared one on a crew is a
    mistake in the program."""
    function = method.__func__ if isinstance(method, MethodType) else method
    assert function in _DISPATCH_MODES, f"{function.__qualname__} does not say how it is spread over ranks: decorate it"
    return _DISPATCH_MODES[function]
