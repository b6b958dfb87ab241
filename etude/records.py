"""The data model of the system, as frozen records.

    Task        one row of a data set
    Rollout     one sample of a task, with its reward; rollouts of one task share a group
    Turn        one call to the model while a rollout is played: prompt ids and completion
    Sample      one token row for the trainer, made of turns that extend each other's prefix

`Message` and `ToolCall` are the conversation as agents and environments see it. Token ids are the conversation as the
model saw it.

Token ids are int32 arrays and log-probs float32 arrays, never Python lists: a rollout of a million tokens takes a few
megabytes. A record copies the arrays and mappings that it gets. Its arrays are read-only, also after pickling or a deep
copy. Records with arrays compare by identity.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from etude.frozen_arrays import FrozenRecord, check_same_length, read_only_array
from etude.images import ImageRef, ImageSpan, check_spans
from etude.support import SetKind, Support
from etude.token_routes import TokenRoutes

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def has_zero_variance(low: Any, high: Any, precision: float = sys.float_info.epsilon) -> Any:
    """Return True if the rewards of a group, from the smallest to the largest, are equal up to rounding.

    Rounding differs if a reward's parts were summed in another order. The bound assumes parts no larger than the
    rewards, or than 1 where parts cancel each other. `low` and `high` are numbers, or arrays or tensors, compared entry
    by entry.

    This is the one rule by which a group of two or more gives no gradient: its advantages are 0, and `collect.refill`
    replaces it.
    """
    return high - low <= 4 * precision * (1 + abs(high) + abs(low))


class Outcome(StrEnum):
    """The end of an attempt. `INFRA_ERROR` says nothing about the policy, so it never enters a baseline."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    UNRESPONSIVE = "unresponsive"
    CANCELLED = "cancelled"
    INFRA_ERROR = "infra_error"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call of the model. Example: `ToolCall("call_1", "search", '{"q": "etude"}')`."""

    id: str
    name: str
    arguments: str
    """The JSON text exactly as the model wrote it. It may be malformed; the reader parses it."""


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A part of a message that is not only text. Example: `ContentPart("image", url="file:///a.png")`."""

    kind: str
    """`text`, `image`, `audio`, or a kind that a server defines."""
    text: str = ""
    url: str = ""
    image: ImageRef | None = None
    """The image, once its bytes are in the store; `url` is then empty."""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation. Example: `Message("user", "What is 2 + 2?")`."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str | tuple[ContentPart, ...]
    reasoning: str = ""
    """The model's reasoning before the answer, where the chat template separates it from the content."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """The id of the call that a `tool` message answers."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams(FrozenRecord):
    """The sampling parameters of a request. The defaults sample from the model's own distribution, as training
    needs."""

    max_tokens: int = 1024
    min_tokens: int = 0
    temperature: float = 1.0
    """Larger is more random; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None
    """The grammar that the answer is held to; see `etude.chat.grammar`."""
    seed: int | None = None
    """None derives a seed from the run's seed, the task, the rollout and the prompt."""
    top_logprobs: int = 0
    """The number of most likely tokens to return beside the sampled one."""
    support: bool = False
    """True to return, for each token, the set of tokens that could be drawn."""
    alternatives: int = 0
    """The number of likeliest tokens to return at each place, with the log-probs that they were drawn by."""
    version: int | None = None
    """The policy version to sample with, of an engine that keeps several; None is the newest."""
    routes_start: int | None = None
    """The first token of prompt and answer whose experts are returned. None: no routes are."""

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

    @property
    def excludes_tokens(self) -> bool:
        """True if some tokens of the vocabulary may have no chance to be drawn."""
        return (
            self.top_p < 1
            or self.top_k > 0
            or self.min_p > 0
            or self.min_tokens > 0
            or self.temperature == 0
            or -math.inf in self.logit_bias.values()
            or self.grammar is not None
        )


FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True, eq=False)
class Completion(FrozenRecord):
    """The result of an engine for one prompt. Each token has its log-prob and the policy version that sampled it."""

    ids: NDArray[np.int32]  # [T]
    logp: NDArray[np.float32]  # [T] under the sampling distribution: the behavior log-probs
    version: NDArray[np.int32]  # [T]
    finish_reason: str
    """`stop`, `length` or `abort`."""
    text: str = ""
    raw_logp: NDArray[np.float32] | None = None
    """[T] under the model's own distribution: temperature 1, no top-k, top-p, min-p, penalty or bias."""
    top_ids: NDArray[np.int32] | None = None
    """[T, k]: the most likely tokens, if `SamplingParams.top_logprobs` is k > 0."""
    top_logp: NDArray[np.float32] | None = None
    """[T, k]: their log-probs at the sampling temperature, before top-k, top-p and min-p."""
    support: Support | None = None
    """The sets of tokens that could be drawn. None: every token was drawn from the whole vocabulary."""
    alternative_ids: NDArray[np.int32] | None = None
    """[T, k]: the tokens that were likeliest to be drawn, if `SamplingParams.alternatives` is k > 0."""
    alternative_logp: NDArray[np.float32] | None = None
    """[T, k]: their log-probs under the sampling distribution, as `logp` has them; -inf where fewer could be drawn."""
    routes: TokenRoutes | None = None
    """The experts that prompt and answer went through, if `SamplingParams.routes_start` asks for them."""

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {}
        for name, (dtype, dimensions) in _COMPLETION_COLUMNS.items():
            values = getattr(self, name)
            if values is not None:
                columns[name] = read_only_array(values, dtype, f"Completion.{name}", dimensions)
                object.__setattr__(self, name, columns[name])
        if self.support is not None:
            columns["support"] = self.support
        check_same_length("Completion", **columns)
        if self.support is not None:
            _check_drawn(self.ids, self.support)
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"Completion.finish_reason must be one of {', '.join(FINISH_REASONS)}; '{self.finish_reason}' was "
                "given."
            )


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores(FrozenRecord):
    """The log-probs of a prompt's tokens but the first, each given those before it, under the model's own
    distribution."""

    logp: NDArray[np.float32]  # [T - 1]
    top_ids: NDArray[np.int32]  # [T - 1, k]
    """The likeliest tokens at each place, the likeliest first."""
    top_logp: NDArray[np.float32]  # [T - 1, k]

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {}
        for name, (dtype, dimensions) in _PROMPT_SCORES_COLUMNS.items():
            columns[name] = read_only_array(getattr(self, name), dtype, f"PromptScores.{name}", dimensions)
            object.__setattr__(self, name, columns[name])
        check_same_length("PromptScores", **columns)


_PROMPT_SCORES_COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "logp": (np.float32, 1),
    "top_ids": (np.int32, 2),
    "top_logp": (np.float32, 2),
}


def _check_drawn(ids: NDArray[np.int32], support: Support) -> None:
    """Refuse a drawn token that is not in its set: the log-prob of such a token would be minus infinity."""
    wrong = np.flatnonzero(~support.contains(ids))
    if len(wrong):
        token = int(wrong[0])
        kind, data = support.get_set(int(support.index[token]))
        described = {SetKind.KEPT: f"{len(data)} ids", SetKind.BANNED: f"all but {len(data)} ids"}
        raise ValueError(
            f"Token {token} of an answer is {int(ids[token])}, which is not in the set of tokens that could be drawn "
            f"there ({described.get(kind, 'a part of the vocabulary')})."
        )


_COMPLETION_COLUMNS: dict[str, tuple[type[np.generic], int]] = {
    "ids": (np.int32, 1),
    "logp": (np.float32, 1),
    "version": (np.int32, 1),
    "raw_logp": (np.float32, 1),
    "top_ids": (np.int32, 2),
    "top_logp": (np.float32, 2),
    "alternative_ids": (np.int32, 2),
    "alternative_logp": (np.float32, 2),
}


POLICY = "policy"
"""The model of the turns that are trained on."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn(FrozenRecord):
    """One call to the model inside an attempt: the exact prompt ids, and the exact completion ids."""

    prompt: NDArray[np.int32]  # [P]
    completion: Completion
    index: int
    """Its index in the attempt, from 0."""
    model: str = POLICY
    tags: tuple[str, ...] = ()
    reward: float | None = None
    """The reward of this turn alone. The rollout's reward is on `Rollout`."""
    anchor: int | None = None
    """The id of the state in which the turn began, if an environment names it."""
    observed: int | None = None
    """The number of prompt tokens, before the `opened` ones, that came after the model's previous answer.

    They are tool output, another player's message, and the template around them. 0: the prompt follows no answer. None:
    the ids decide. The prompt then begins with an earlier turn's prompt and answer, and the rest is observed.
    """
    opened: int = 0
    """The number of tokens at the end of the prompt that begin the answer (a prefill): a forced tool call, the agent's
    own words, or an answer that continues. They are context, and never observed."""
    grammar: str | None = None
    """The grammar that the answer after the `opened` tokens was held to, for people who look. The sets of tokens that
    it left are in the completion."""
    images: tuple[ImageSpan, ...] = ()
    """The images of the prompt."""

    @property
    def oldest(self) -> int | None:
        """The oldest policy version among its tokens; None if the policy wrote none of them."""
        versions = self.completion.version
        return int(versions.min()) if self.model == POLICY and len(versions) else None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", read_only_array(self.prompt, np.int32, "Turn.prompt"))
        tokens = len(self.prompt)
        object.__setattr__(self, "images", check_spans("Turn.images", self.images, tokens))
        if self.completion.routes is not None:
            self.completion.routes.check_length(max(tokens + len(self.completion.ids) - 1, 0))
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
class Task(FrozenRecord):
    """One row of a dataset. Example: `Task(7, {"prompt": "2+2?", "ground_truth": "4"})`.

    It reads like a mapping of its fields: `task["prompt"]`, `task.get("hint")`, `"hint" in task`, `dict(task)`.
    """

    ordinal: int
    """Its index in the run's order of tasks. No index is reused or skipped."""
    fields: Mapping[str, Json]
    source: str = ""
    """The data source of the task. Evaluation reports scores by source."""
    images: Mapping[str, bytes] = field(default_factory=dict, repr=False, compare=False)
    """The bytes of images that its fields name, by digest, until they are in the store."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "images", dict(self.images))

    def __getitem__(self, name: str) -> Any:
        if name not in self.fields:
            raise KeyError(f"task {self.ordinal} has no field {name!r}; it has {', '.join(self.fields) or 'none'}")
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or `default` if the task has no field of this name."""
        return self.fields.get(name, default)

    def keys(self) -> KeysView[str]:
        """Return the names of the fields."""
        return self.fields.keys()


@dataclass(frozen=True, slots=True)
class Rollout(FrozenRecord):
    """One sample of a task, with its reward. Advantages compare the rollouts of a group with each other."""

    id: int
    task: int
    """The ordinal of its task."""
    group: int
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of the reward, if the reward function returned them."""
    outcome: Outcome = Outcome.SUCCEEDED
    truncated: bool = False
    """True if a length limit cut it off. A truncated rollout is not finished."""
    role: int = 0
    """The player of a game, for baselines per role."""
    greedy_reward: float | None = None
    """The reward of the greedy answer to the same task, if one was sampled."""
    source: str = ""
    """The data source of its task."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Numbers of its task that the batch carries for the user's own loss or advantage (`data.batch_columns`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", dict(self.parts))
        object.__setattr__(self, "columns", dict(self.columns))
        object.__setattr__(self, "outcome", Outcome(self.outcome))


@dataclass(frozen=True, slots=True, eq=False)
class Sample(FrozenRecord):
    """One token row for the trainer. All columns have one entry a token, at the same index.

    `action` is true for the tokens that the policy sampled. The others (prompt, tool output) are context, and get no
    loss. Where `action` is false, `logp` may have any value, and `version` and `turn` are ignored.
    """

    ids: NDArray[np.int32]  # [T]
    action: NDArray[np.bool_]  # [T]
    logp: NDArray[np.float32]  # [T]
    version: NDArray[np.int32]  # [T]
    turn: NDArray[np.int32]  # [T]
    rollout: int
    """The id of its rollout. A rollout may have several rows."""
    model: str = "policy"
    reward: NDArray[np.float64] | None = None
    """[T] the reward of each token, without the rollout's own reward. None: no token has one."""
    anchor: NDArray[np.int64] | None = None
    """[T] at each action token, the id of the state in which its turn began. None: the states are unknown."""
    observation: NDArray[np.bool_] | None = None
    """[T] true for the tokens that the environment showed between two answers. Each such token is true in one row only.
    None: no such token."""
    support: Support | None = None
    """The sets of tokens that the sampler could draw from. None, and at context: the whole vocabulary."""
    alternative_ids: NDArray[np.int32] | None = None
    """[T, k] at each action token, the tokens that were likeliest to be drawn. None: they were not recorded."""
    alternative_logp: NDArray[np.float32] | None = None
    """[T, k]: their log-probs under the sampling distribution."""
    routes: NDArray[Any] | None = None
    """[T, L · k]: the experts of each token in the sampler, as `TokenRoutes.spread` has them. None: not recorded."""
    images: tuple[ImageSpan, ...] = ()
    """The images among its context."""

    def __post_init__(self) -> None:
        for name, dtype in _SAMPLE_COLUMNS.items():
            object.__setattr__(self, name, read_only_array(getattr(self, name), dtype, f"Sample.{name}"))
        columns: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLE_COLUMNS}
        for name, dtype in _OPTIONAL_SAMPLE_COLUMNS.items():
            if getattr(self, name) is not None:
                dimensions = 2 if name.startswith("alternative") else 1
                columns[name] = read_only_array(getattr(self, name), dtype, f"Sample.{name}", dimensions)
                object.__setattr__(self, name, columns[name])
        if self.support is not None:
            columns["support"] = self.support
        if self.routes is not None:
            columns["routes"] = read_only_array(self.routes, self.routes.dtype.type, "Sample.routes", 2)
            object.__setattr__(self, "routes", columns["routes"])
        check_same_length(f"The sample of rollout {self.rollout}", **columns)
        images = check_spans(f"The sample of rollout {self.rollout}", self.images, len(self.ids))
        object.__setattr__(self, "images", images)

    @property
    def num_alternatives(self) -> int | None:
        """The number of alternatives to each token; 0 if none were recorded, None if the policy sampled no token."""
        if not self.action.any():
            return None
        return 0 if self.alternative_ids is None else self.alternative_ids.shape[1]

    @property
    def route_format(self) -> tuple[int, str] | None:
        """The number of experts that each token went through, and their dtype; None if they were not recorded."""
        return None if self.routes is None else (self.routes.shape[1], self.routes.dtype.name)


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
    "alternative_ids": np.int32,
    "alternative_logp": np.float32,
}
