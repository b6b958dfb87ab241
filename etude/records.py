"""The words of the system, as frozen records: what is asked, what was tried, what was said, what is trained on.

They are read in this order: a `Task` is asked; each wanted try at it is a `Rollout`; each execution of a rollout is an
`Attempt`; each call to the model inside an attempt is a `Turn`; turns joined by prefix become `Sample` rows, the only
thing a trainer sees. `Message` and `ToolCall` are how people and agents speak; token ids are what the model saw.

Token ids are int32 arrays, log-probs float32 arrays, never Python lists: a million-token rollout is a few megabytes.
Arrays and mappings handed to a record are copied, and arrays are read-only, also after a record was pickled or deeply
copied: a record is a fact. Those that hold arrays are equal only to themselves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Attempt",
    "Completion",
    "ContentPart",
    "Message",
    "Outcome",
    "Rollout",
    "Sample",
    "SamplingParams",
    "Task",
    "ToolCall",
    "Turn",
    "has_zero_variance",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def has_zero_variance(low: Any, high: Any, precision: float = sys.float_info.epsilon) -> Any:
    """Whether rewards between these two, the least and the largest of a group, are all one reward, but for the rounding
    of sums that were added up in another order: of parts that are no larger than they are, or than 1 where parts cancel
    each other. Numbers, or arrays or tensors of them, entry by entry.

    The one rule by which a group of two or more teaches nothing: its advantages are 0, and it is replaced where
    `collect.refill` has groups replaced.
    """
    return high - low <= 4 * precision * (1 + abs(high) + abs(low))


def _read_only_array(values: ArrayLike, dtype: type[np.generic], name: str, dimensions: int = 1) -> NDArray[Any]:
    """One read-only array of the record's dtype and dimensions; other shapes and lossy casts are refused."""
    array = np.asarray(values)
    if array.ndim != dimensions:
        wanted = {1: "one-dimensional", 2: "two-dimensional"}[dimensions]
        raise ValueError(f"{name} must be {wanted}; an array of shape {array.shape} was given.")
    if array.size and not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise ValueError(
            f"{name} must be {np.dtype(dtype).name}; {array.dtype.name} cannot be cast to it without loss."
        )
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    lost = array.dtype.kind in "iu" and not np.array_equal(cast, array)
    if lost or (array.dtype.kind == "f" and not np.array_equal(np.isinf(cast), np.isinf(array))):
        raise ValueError(f"{name} has values that do not fit into {np.dtype(dtype).name}.")
    cast.setflags(write=False)
    return cast


class _Record:
    """Pickled and copied by being made again, so that what holds at construction holds everywhere."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[Any], tuple[Any, ...]]:
        record: Any = self
        return type(self), tuple(getattr(self, column.name) for column in fields(record))


class Outcome(StrEnum):
    """How an attempt ended. Only `INFRA_ERROR` says nothing about the policy, so it never enters a baseline."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    UNRESPONSIVE = "unresponsive"
    CANCELLED = "cancelled"
    INFRA_ERROR = "infra_error"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function the model asked for. Example: `ToolCall("call_1", "search", '{"q": "etude"}')`."""

    id: str
    name: str
    arguments: str
    """The JSON text exactly as the model wrote it, which may be malformed: parsing it is the reader's business."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A piece of a message that is not all text. Example: `ContentPart("image", url="file:///a.png")`."""

    kind: str
    """`text`, `image`, `audio`, or a server's own word."""
    text: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation. Example: `Message("user", "What is 2 + 2?")`."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str | tuple[ContentPart, ...]
    reasoning: str = ""
    """What the model thought aloud before answering, where the template keeps it apart from the content."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """For a `tool` message: the call it answers."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams(_Record):
    """How tokens are drawn. The defaults sample from the model's own distribution, which is what training needs."""

    max_tokens: int = 1024
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None derives one from the run seed, the task, the try and the prompt."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report beside the sampled one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        limits = {
            "temperature": (0 <= self.temperature < math.inf, "0 or more, and finite"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or more"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "above 0 and finite"),
            "logit_bias": (all(bias < math.inf for bias in self.logit_bias.values()), "finite, or minus infinity"),
            "max_tokens": (self.max_tokens >= 1, "1 or more"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
        }
        for name, (valid, wanted) in limits.items():
            if not valid:
                raise ValueError(f"SamplingParams.{name} must be {wanted}; {getattr(self, name)} was given.")


FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True, eq=False)
class Completion(_Record):
    """What an engine returns for one prompt. Every token carries its log-prob and the version that sampled it."""

    ids: NDArray[np.int32]  # [T]
    logp: NDArray[np.float32]  # [T] under the sampling distribution: the behaviour log-probs
    version: NDArray[np.int32]  # [T]
    finish_reason: str
    """`stop`, `length` or `abort`."""
    text: str = ""
    raw_logp: NDArray[np.float32] | None = None
    """[T] under the model's own distribution: temperature 1, nothing cut off, penalised or biased."""
    top_ids: NDArray[np.int32] | None = None
    """[T, k]: the likeliest tokens, where `SamplingParams.top_logprobs` asked for them."""
    top_logp: NDArray[np.float32] | None = None
    """[T, k]: their log-probs at the sampling temperature, before anything was cut off."""

    def __post_init__(self) -> None:
        columns = {}
        for name, (dtype, dimensions) in _COMPLETION_COLUMNS.items():
            values = getattr(self, name)
            if values is not None:
                columns[name] = _read_only_array(values, dtype, f"Completion.{name}", dimensions)
                object.__setattr__(self, name, columns[name])
        _check_same_length("Completion", **columns)
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"Completion.finish_reason must be one of {', '.join(FINISH_REASONS)}; '{self.finish_reason}' was "
                "given."
            )


_COMPLETION_COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "ids": (np.int32, 1),
    "logp": (np.float32, 1),
    "version": (np.int32, 1),
    "raw_logp": (np.float32, 1),
    "top_ids": (np.int32, 2),
    "top_logp": (np.float32, 2),
}


@dataclass(frozen=True, slots=True, eq=False)
class Turn(_Record):
    """One call to the model inside an attempt, as the endpoint saw it: exact ids in, exact ids out."""

    prompt: NDArray[np.int32]  # [P]
    completion: Completion
    index: int
    """Its place in the attempt, from 0."""
    model: str = "policy"
    tags: tuple[str, ...] = ()
    reward: float | None = None
    """A reward given for this turn alone; the rollout's own is on the rollout."""
    anchor: int | None = None
    """Names the state that the turn began in, where an environment tells it."""
    observed: int | None = None
    """How many tokens at the end of the prompt, before the `opened` ones, were shown after the model's answer before:
    tool output, another player's words, and the template around them. 0 where the prompt follows no answer; None where
    the ids decide: the prompt begins with an earlier turn's prompt and answer, and what follows is observed."""
    opened: int = 0
    """How many tokens at the very end of the prompt begin the answer: a call that it has to make, words that the agent
    gave, or an answer that goes on. They are context, and never observed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _read_only_array(self.prompt, np.int32, "Turn.prompt"))
        tokens = len(self.prompt)
        if not 0 <= self.opened <= tokens:
            raise ValueError(
                f"Turn.opened must be from 0 to the {tokens} tokens of the prompt; {self.opened} was given."
            )
        if self.observed is not None and not 0 <= self.observed <= tokens - self.opened:
            raise ValueError(
                f"Turn.observed must be from 0 to the {tokens} tokens of the prompt, less the {self.opened} that begin "
                f"the answer; {self.observed} was given."
            )


@dataclass(frozen=True, slots=True)
class Task(_Record):
    """One row of a dataset. Example: `Task(7, {"prompt": "2+2?", "ground_truth": "4"})`.

    Its fields are read as those of a mapping: `task["prompt"]`, `task.get("hint")`, `"hint" in task`, `dict(task)`.
    """

    ordinal: int
    """Its place in the run's order, which is never reused and never skipped."""
    fields: Mapping[str, Json]
    source: str = ""
    """The data source it came from: evaluation reports by it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", dict(self.fields))

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise KeyError(f"task {self.ordinal} has no field {name!r}; it has {', '.join(self.fields) or 'none'}")
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or `default` where there is none of this name."""
        return self.fields.get(name, default)

    def keys(self) -> KeysView[str]:
        """The names of its fields."""
        return self.fields.keys()


@dataclass(frozen=True, slots=True, eq=False)
class Attempt(_Record):
    """One execution of a rollout: its turns and how it ended."""

    index: int
    turns: tuple[Turn, ...]
    outcome: Outcome
    error: str = ""
    """For anything but success: what happened, in words."""


@dataclass(frozen=True, slots=True)
class Rollout(_Record):
    """One wanted try at a task, scored. Rollouts with the same group are compared with each other."""

    id: int
    task: int
    """The ordinal of its task."""
    group: int
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts the reward is made of, where the reward function gave them."""
    outcome: Outcome = Outcome.SUCCEEDED
    truncated: bool = False
    """Whether it was cut off at a length limit; a truncated rollout is not a finished one."""
    role: int = 0
    """Which player of a game it was, for baselines per role."""
    greedy_reward: float | None = None
    """What the greedy answer to the same task earned, where one was drawn beside it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", dict(self.parts))
        object.__setattr__(self, "outcome", Outcome(self.outcome))


@dataclass(frozen=True, slots=True, eq=False)
class Sample(_Record):
    """One token sequence ready for training. The columns speak of the same token at the same index.

    `action` marks the tokens the policy chose; the others (prompt, tool output) are context and train nothing.
    Where `action` is false, `logp` may be anything and `version` and `turn` are ignored.
    """

    ids: NDArray[np.int32]  # [T]
    action: NDArray[np.bool_]  # [T]
    logp: NDArray[np.float32]  # [T]
    version: NDArray[np.int32]  # [T]
    turn: NDArray[np.int32]  # [T]
    rollout: int
    """The id of the rollout it is a row of."""
    model: str = "policy"
    reward: NDArray[np.float64] | None = None
    """[T] what was paid when each token was there, the rollout's own reward not included; None is nothing."""
    anchor: NDArray[np.int64] | None = None
    """[T] at each action token, the state that its turn began in; None where nobody tells."""
    observation: NDArray[np.bool_] | None = None
    """[T] what the environment showed between two answers, each token in one row only; None is nothing."""

    def __post_init__(self) -> None:
        for name, dtype in _SAMPLE_COLUMNS.items():
            object.__setattr__(self, name, _read_only_array(getattr(self, name), dtype, f"Sample.{name}"))
        columns = {name: getattr(self, name) for name in _SAMPLE_COLUMNS}
        for name, dtype in _OPTIONAL_SAMPLE_COLUMNS.items():
            if getattr(self, name) is not None:
                columns[name] = _read_only_array(getattr(self, name), dtype, f"Sample.{name}")
                object.__setattr__(self, name, columns[name])
        _check_same_length(f"The sample of rollout {self.rollout}", **columns)


_SAMPLE_COLUMNS: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "action": np.bool_,
    "logp": np.float32,
    "version": np.int32,
    "turn": np.int32,
}
_OPTIONAL_SAMPLE_COLUMNS: dict[str, type[np.generic]] = {
    "reward": np.float64,
    "anchor": np.int64,
    "observation": np.bool_,
}


def _check_same_length(owner: str, **columns: NDArray[Any]) -> None:
    """The mask law begins here: columns that speak of the same tokens have the same length."""
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{owner} has columns of different lengths ({listed}); each must have one entry per token.")
