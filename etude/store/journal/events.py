"""The events of a run, as frozen typed records with their JSON form.

A task is issued and its rollouts are queued. An attempt at a rollout starts, records its turns, is rewarded, and ends.
A group of rollouts is admitted to a step, or its task is dropped. A run also records its evaluations, published
policies and resources. Nothing else is ever written, and no event is ever changed: every status is derived from events
(`transitions`).

`event_records` defines how they are stored. A field added later needs a default, with which old records are read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self, TypeAlias, get_args

from etude.errors import DataError
from etude.images import ImageSpan
from etude.records import Completion, Outcome, Turn
from etude.store.journal.blobs import pack_turn, unpack_turn
from etude.store.journal.json_values import check_finite, to_json_value
from etude.store.queue.rollout_limits import RETRIED, RolloutLimits, RolloutPurpose

TURN_FIELDS = ("index", "model", "tags", "reward", "anchor", "observed", "opened")
"""The fields of a turn that are not its arrays."""


def spans_to_lists(spans: Sequence[ImageSpan]) -> list[list[str | int]]:
    """Return spans as JSON values: the digest of each image, then start, stop and first."""
    return [[span.digest, span.start, span.stop, span.first] for span in spans]


def spans_from_lists(lists: Sequence[Sequence[Any]]) -> tuple[ImageSpan, ...]:
    """Return the spans of JSON values."""
    return tuple(ImageSpan(*each) for each in lists)


class BaseEvent:
    """One fact of a run. `Event` is the union of all kinds."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        kind: Any = type(self)
        return {name: getattr(self, name) for name in _names(kind)}

    def payload(self) -> bytes:
        """The bytes that are stored beside the JSON; empty for most events."""
        return b""

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> Self:  # noqa: ARG003
        """Restore an event from its JSON fields and its payload."""
        return cls(**document)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(column.name for column in fields(kind))


# -- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskIssued(BaseEvent):
    """A row of the dataset became a task of the run. Example: `TaskIssued(7, 1203, "gsm8k", {"prompt": "2+2?"})`."""

    kind = "task_issued"

    task: int
    """Its ordinal, issued once."""
    row: int
    """The row of the dataset."""
    source: str
    fields: Mapping[str, Any]
    use: RolloutPurpose = "train"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", to_json_value(self.fields, f"Task {self.task}: fields"))


@dataclass(frozen=True, slots=True)
class TaskDropped(BaseEvent):
    """No step trains on this task; its rollouts, all finished, are set aside."""

    kind = "task_dropped"

    task: int
    step: int
    """The step for which it was collected."""
    cause: str
    """The filter or failure that dropped it."""


# -- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutEvent(BaseEvent):
    """An event of one rollout."""

    rollout: int


@dataclass(frozen=True, slots=True)
class RolloutQueued(RolloutEvent):
    """A rollout of a task was queued."""

    kind = "rollout_queued"

    task: int
    sample: int
    """Index of this sample within its group, from 0."""
    use: RolloutPurpose = "train"
    limits: RolloutLimits | None = None
    """Limits that the rollout queue enforces; None if the caller that queued it enforces its own."""
    epoch: int = 0
    """Epoch of the owning run that queued it; 0 if the queue has no owner."""
    greedy: bool = False
    """True if each token is the most probable one."""
    floor: int = 0
    """No token of it can be of a lower policy version."""
    resources: Mapping[str, int] = field(default_factory=dict)
    """The versions of resources that each of its attempts gets, by name."""

    def to_dict(self) -> dict[str, Any]:
        return BaseEvent.to_dict(self) | {"limits": self.limits and self.limits.to_dict()}

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> RolloutQueued:  # noqa: ARG003
        limits = document.get("limits")
        return cls(**document | {"limits": limits and RolloutLimits.from_dict(limits)})


@dataclass(frozen=True, slots=True)
class RolloutResumed(RolloutEvent):
    """The run enqueued the rollout again, in a later epoch. Until then it was suspended."""

    kind = "rollout_resumed"

    epoch: int
    floor: int = 0
    """The floor of the policy versions from now on."""
    forgiven: int = 0
    """Number of its first attempts that do not count any more."""


@dataclass(frozen=True, slots=True)
class RolloutSealed(RolloutEvent):
    """The run has read the rollout: its agent can record no more rewards."""

    kind = "rollout_sealed"


@dataclass(frozen=True, slots=True)
class RolloutCancelled(RolloutEvent):
    """The rollout was cancelled, queued or running."""

    kind = "rollout_cancelled"

    why: str


@dataclass(frozen=True, slots=True)
class RolloutExpired(RolloutEvent):
    """The rollout waited in the queue for longer than its limit, and no attempt was started."""

    kind = "rollout_expired"

    why: str


@dataclass(frozen=True, slots=True)
class AttemptStarted(RolloutEvent):
    """An attempt has started."""

    kind = "attempt_started"

    attempt: int
    """Index of the attempt, from 0; each retry adds one."""
    runner: str = ""
    """The runner that claimed the rollout and now prepares the attempt. An attempt without a runner is running at
    once."""
    at: float = field(default=0.0, compare=False)
    """Wall-clock time in seconds since 1970, for people to inspect; no rule depends on it. 0 is unknown. The same holds
    for `at` below."""


@dataclass(frozen=True, slots=True)
class AttemptReady(RolloutEvent):
    """An attempt moved from preparing to running. Its first turn, reward or note does the same."""

    kind = "attempt_ready"

    attempt: int


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecorded(RolloutEvent):
    """One model call, with the exact tokens of its prompt and completion. Turns of an attempt are written in order,
    each once."""

    kind = "turn_recorded"

    attempt: int
    turn: Turn
    at: float = field(default=0.0, compare=False)
    """The time at which the answer was complete; for an agent, at which it was written."""
    began: float = field(default=0.0, compare=False)
    """The time at which the engine began with the request; for an agent, at which the model endpoint passed it to the
    engine. From then until `at` the answer was sampled. 0 is unknown."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, without the arrays of the turn, which are in the payload."""
        turn = {name: getattr(self.turn, name) for name in TURN_FIELDS}
        turn |= {} if self.turn.grammar is None else {"grammar": self.turn.grammar}
        turn |= {"images": spans_to_lists(self.turn.images)} if self.turn.images else {}
        completion = {name: getattr(self.turn.completion, name) for name in ("finish_reason", "text")}
        return BaseEvent.to_dict(self) | {"turn": turn, "completion": completion}

    def payload(self) -> bytes:
        return pack_turn(self.turn)

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> TurnRecorded:
        prompt, columns = unpack_turn(payload)
        completion = Completion(**{**columns, **document["completion"]})
        stored = document["turn"]
        read = {"tags": tuple(stored["tags"]), "images": spans_from_lists(stored.get("images", ()))}
        turn = Turn(prompt, completion, **stored | read)
        others = {name: value for name, value in document.items() if name not in ("turn", "completion")}
        return cls(turn=turn, **others)


@dataclass(frozen=True, slots=True)
class AttemptRewarded(RolloutEvent):
    """The final reward of an attempt, recorded once: while it runs, or after its end but before its task is closed."""

    kind = "attempt_rewarded"

    attempt: int
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    """True if the attempt was cut off at a length limit."""
    paid: float = 0.0
    """Sum of turn rewards, in addition to `reward`."""
    role: int = 0
    """Index of the player in a game."""
    extracted: str | None = None
    """The answer that the reward extracts from the text of an answer that scores the model."""

    def __post_init__(self) -> None:
        _check_reward(self, "reward")
        paid = check_finite(self.paid, f"Attempt {self.attempt} of rollout {self.rollout}: reward of its turns")
        object.__setattr__(self, "paid", paid)


@dataclass(frozen=True, slots=True)
class TurnRewarded(RolloutEvent):
    """A reward of one turn, in addition to the reward of the attempt. Several rewards of a turn add up."""

    kind = "turn_rewarded"

    attempt: int
    turn: int
    """Index of a recorded turn."""
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_reward(self, f"reward of turn {self.turn}")


@dataclass(frozen=True, slots=True)
class NoteRecorded(RolloutEvent):
    """Information about an attempt for people to inspect; no state depends on it."""

    kind = "note_recorded"

    attempt: int
    name: str
    data: Any = None
    """Any JSON value."""

    def __post_init__(self) -> None:
        where = f"Attempt {self.attempt} of rollout {self.rollout}: the note '{self.name}'"
        object.__setattr__(self, "data", to_json_value(self.data, where))


@dataclass(frozen=True, slots=True)
class AttemptEnded(RolloutEvent):
    """An attempt is over. Its rollout ends with it, or is queued again if `retry` is true."""

    kind = "attempt_ended"

    attempt: int
    outcome: Outcome
    error: str = ""
    """Description of what happened, for any outcome but success."""
    retry: bool = False
    ended_by_queue: bool = False
    """True if the rollout queue ended it, and not its runner."""
    at: float = field(default=0.0, compare=False)
    truncated: bool = False
    """True if its runner says that a limit cut it off."""
    role: int = 0
    """Index of the player in a game, as its runner says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        if self.retry and self.outcome not in RETRIED:
            raise DataError(
                f"Attempt {self.attempt} of rollout {self.rollout} ended {self.outcome}, which cannot be retried. "
                f"Only these can: {', '.join(sorted(RETRIED))}."
            )


@dataclass(frozen=True, slots=True)
class LateResultRecorded(RolloutEvent):
    """A runner reported an attempt that the rollout queue had ended before. The report is stored and changes
    nothing."""

    kind = "late_result_recorded"

    attempt: int
    outcome: Outcome
    error: str = ""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        _check_reward(self, "late reward", may_lack=True)


def _check_reward(
    event: AttemptRewarded | TurnRewarded | LateResultRecorded, subject: str, *, may_lack: bool = False
) -> None:
    """Make the reward of an event and its parts floats, which must be finite."""
    where = f"Attempt {event.attempt} of rollout {event.rollout}: {subject}"
    if event.reward is not None or not may_lack:
        object.__setattr__(event, "reward", check_finite(event.reward, where))  # type: ignore[arg-type]
    parts = {name: check_finite(value, f"{where} part '{name}'") for name, value in event.parts.items()}
    object.__setattr__(event, "parts", parts)


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutsAdmitted(BaseEvent):
    """A step trains on exactly these rollouts. Their tasks are closed: other rollouts of these tasks are set aside."""

    kind = "rollouts_admitted"

    step: int
    rollouts: tuple[int, ...]
    end: int
    """The first ordinal that the step did not look at."""
    version: int
    """The trainer's version of the policy when the step used these rollouts."""
    skipped: tuple[int, ...] = ()
    """The ordinals before `end` that later steps look at, because their rollouts were slower."""

    def __post_init__(self) -> None:
        for name in ("rollouts", "skipped"):
            object.__setattr__(self, name, tuple(int(number) for number in getattr(self, name)))


@dataclass(frozen=True, slots=True)
class AdvantagesEstimated(BaseEvent):
    """The advantage of each rollout that a step trained on: `AdvantagesEstimated(3, (70, 71), (0.7, -0.7))`.

    It has no effect. A step that is replayed after a resume writes it again.
    """

    kind = "advantages_estimated"

    step: int
    rollouts: tuple[int, ...]
    advantages: tuple[float, ...]
    """The mean over the tokens that a rollout's model sampled, with six digits; NaN without such tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(int(id) for id in self.rollouts))
        object.__setattr__(self, "advantages", tuple(float(f"{value:.6g}") for value in self.advantages))


@dataclass(frozen=True, slots=True)
class PolicyEvaluated(BaseEvent):
    """The policy was evaluated: `PolicyEvaluated(20, "val", {"mean@4": 0.61}, [{"answer": "4", "reward": 1}])`."""

    kind = "policy_evaluated"

    step: int
    name: str
    scores: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]] = ()
    """Prompts and answers, one mapping each; stored as a payload."""

    def __post_init__(self) -> None:
        where = f"The evaluation '{self.name}' of step {self.step}"
        object.__setattr__(self, "scores", {name: float(score) for name, score in self.scores.items()})
        object.__setattr__(self, "samples", tuple(to_json_value(list(self.samples), f"{where}: samples")))

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "name": self.name, "scores": self.scores}

    def payload(self) -> bytes:
        return zlib.compress(json.dumps(self.samples).encode()) if self.samples else b""

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> PolicyEvaluated:
        return cls(**document, samples=json.loads(zlib.decompress(payload)) if payload else ())


@dataclass(frozen=True, slots=True)
class EvaluationNumbered(BaseEvent):
    """A way of scoring has a number, which the ids of its rollouts begin with: `EvaluationNumbered("val-3f…", 2071)`.
    No other one has it."""

    kind = "evaluation_numbered"

    evaluation: str
    number: int


@dataclass(frozen=True, slots=True)
class PolicyPublished(BaseEvent):
    """Every engine computes with this version of the policy."""

    kind = "policy_published"

    version: int
    step: int


@dataclass(frozen=True, slots=True)
class ResourcePut(BaseEvent):
    """A new version of a resource that rollouts share. Example: `ResourcePut("endpoint", 1, {"base_url":
    "http://…/v1"})`."""

    kind = "resource_put"

    name: str
    version: int
    """Version number, from 1."""
    value: Any
    """Any JSON value."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "value", to_json_value(self.value, f"Version {self.version} of the resource '{self.name}'")
        )


Event: TypeAlias = (
    TaskIssued
    | TaskDropped
    | (RolloutQueued | RolloutResumed | RolloutSealed | RolloutCancelled | RolloutExpired)
    | (AttemptStarted | AttemptReady | AttemptRewarded | AttemptEnded | LateResultRecorded)
    | (TurnRecorded | TurnRewarded | NoteRecorded)
    | (RolloutsAdmitted | AdvantagesEstimated | PolicyPublished | ResourcePut)
    | (PolicyEvaluated | EvaluationNumbered)
)
EVENTS: dict[str, type[Event]] = {event.kind: event for event in get_args(Event)}
"""The events by their kind."""
