"""What happens in a run, as frozen typed events, and the form they are written in.

A task is issued; rollouts of it are queued; an attempt at one starts, records its turns, is rewarded, and ends; a group
is admitted to a step, or its task dropped. Beside these a run notes its evaluations, publishings and resources. Nothing
else is ever written, and nothing written is ever changed: every status is derived from these (`transitions`).

How they are written is in `record`. A field added later needs a default, and old records are read with it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

from etude.errors import DataError
from etude.records import Completion, Outcome, Turn
from etude.store.blobs import pack_turn, unpack_turn
from etude.store.json_values import check_finite, to_json_value
from etude.store.rollout_limits import RETRIED, RolloutLimits, RolloutPurpose

__all__ = [
    "AttemptEnded",
    "AttemptReady",
    "AttemptRewarded",
    "AttemptStarted",
    "Event",
    "LateResultRecorded",
    "NoteRecorded",
    "PolicyEvaluated",
    "PolicyPublished",
    "ResourcePut",
    "RolloutCancelled",
    "RolloutEvent",
    "RolloutExpired",
    "RolloutQueued",
    "RolloutResumed",
    "RolloutSealed",
    "RolloutsAdmitted",
    "TaskDropped",
    "TaskIssued",
    "TurnRecorded",
    "TurnRewarded",
]


class Event:
    """One fact of a run."""

    __slots__ = ()
    kind: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        kind: Any = type(self)
        return {name: getattr(self, name) for name in _names(kind)}

    def payload(self) -> bytes:
        """What is kept beside the JSON: nothing, for most."""
        return b""

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> Self:  # noqa: ARG003
        """The event that was written so."""
        return cls(**document)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """What the fields of an event are called."""
    return tuple(column.name for column in fields(kind))


# -- tasks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskIssued(Event):
    """A row of the dataset became a task of the run. Example: `TaskIssued(7, 1203, "gsm8k", {"prompt": "2+2?"})`."""

    kind = "task_issued"

    task: int
    """Its ordinal, issued once."""
    row: int
    """The row of the dataset."""
    source: str
    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", to_json_value(self.fields, f"Task {self.task}: fields"))


@dataclass(frozen=True, slots=True)
class TaskDropped(Event):
    """No step trains on this task: the rollouts of it, all finished, are set aside."""

    kind = "task_dropped"

    task: int
    step: int
    """The step it was collected for."""
    cause: str
    """The filter or failure that dropped it."""


# -- rollouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutEvent(Event):
    """Something that happened to one rollout."""

    rollout: int


@dataclass(frozen=True, slots=True)
class RolloutQueued(RolloutEvent):
    """One more try at a task is wanted."""

    kind = "rollout_queued"

    task: int
    sample: int
    """Which try of its group it is, from 0."""
    use: RolloutPurpose = "train"
    limits: RolloutLimits | None = None
    """What a desk holds it to; None where whoever queued it watches over it."""
    life: int = 0
    """In which life of the desk's keeper it was asked for; 0 where nobody keeps the desk."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, as they go into JSON."""
        document = {name: getattr(self, name) for name in ("rollout", "task", "sample", "use", "life")}
        return document | {"limits": self.limits and self.limits.to_dict()}

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> RolloutQueued:  # noqa: ARG003
        """The event that was written so."""
        limits = document.get("limits")
        return cls(**document | {"limits": limits and RolloutLimits.from_dict(limits)})


@dataclass(frozen=True, slots=True)
class RolloutResumed(RolloutEvent):
    """It is asked for again, in a later life of the desk's keeper; until then it waits, and is played by nobody."""

    kind = "rollout_resumed"

    life: int


@dataclass(frozen=True, slots=True)
class RolloutSealed(RolloutEvent):
    """Who wanted it has read it: what it has earned by now is all that its agent may say of that."""

    kind = "rollout_sealed"


@dataclass(frozen=True, slots=True)
class RolloutCancelled(RolloutEvent):
    """Nobody wants it any more, queued or running."""

    kind = "rollout_cancelled"

    why: str


@dataclass(frozen=True, slots=True)
class RolloutExpired(RolloutEvent):
    """It waited in the queue for longer than it may, and was never started."""

    kind = "rollout_expired"

    why: str


@dataclass(frozen=True, slots=True)
class AttemptStarted(RolloutEvent):
    """An attempt is under way."""

    kind = "attempt_started"

    attempt: int
    """From 0, one more for each retry."""
    runner: str = ""
    """Who claimed it, and prepares it now; without one it runs at once."""
    at: float = field(default=0.0, compare=False)
    """When, in seconds since 1970 by a clock that somebody may set: to be looked at, and nothing follows from it. 0 is
    not known. So it is below."""


@dataclass(frozen=True, slots=True)
class AttemptReady(RolloutEvent):
    """An attempt that was prepared runs now. Its first turn, reward or note says so as well."""

    kind = "attempt_ready"

    attempt: int


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecorded(RolloutEvent):
    """One call to the model, exact tokens in and out. Turns of an attempt are written in order, each once."""

    kind = "turn_recorded"

    attempt: int
    turn: Turn
    at: float = field(default=0.0, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The fields, with the arrays of the turn left to the payload."""
        turn, completion = self.turn, self.turn.completion
        names = ("index", "model", "tags", "reward", "anchor", "observed", "opened")
        turn_fields = {name: getattr(turn, name) for name in names}
        return {
            "rollout": self.rollout,
            "attempt": self.attempt,
            "turn": turn_fields,
            "completion": {"finish_reason": completion.finish_reason, "text": completion.text},
            "at": self.at,
        }

    def payload(self) -> bytes:
        """The arrays of the turn."""
        return pack_turn(self.turn)

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> TurnRecorded:
        """The event that was written so."""
        prompt, columns = unpack_turn(payload)
        completion = Completion(**{**columns, **document["completion"]})
        turn_fields = document["turn"] | {"tags": tuple(document["turn"]["tags"])}
        turn = Turn(prompt, completion, **turn_fields)
        return cls(document["rollout"], document["attempt"], turn, document.get("at", 0.0))


@dataclass(frozen=True, slots=True)
class AttemptRewarded(RolloutEvent):
    """The reward of an attempt: final, given once, while it runs or after it ended but before its task is settled."""

    kind = "rewarded"

    attempt: int
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    """Whether the attempt was cut off at a length limit."""
    paid: float = 0.0
    """What its turns were paid beside that, in all."""
    role: int = 0
    """Which player of a game it was."""

    def __post_init__(self) -> None:
        where = f"Attempt {self.attempt} of rollout {self.rollout}: reward"
        object.__setattr__(self, "reward", check_finite(self.reward, where))
        object.__setattr__(self, "paid", check_finite(self.paid, f"{where} of its turns"))
        parts = {name: check_finite(value, f"{where} part '{name}'") for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True)
class TurnRewarded(RolloutEvent):
    """One turn of an attempt earned something, beside the reward of the whole. Several of a turn add up."""

    kind = "turn_rewarded"

    attempt: int
    turn: int
    """The index of one that was recorded."""
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"Attempt {self.attempt} of rollout {self.rollout}: reward of turn {self.turn}"
        object.__setattr__(self, "reward", check_finite(self.reward, where))
        parts = {name: check_finite(value, f"{where} part '{name}'") for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True)
class NoteRecorded(RolloutEvent):
    """Something about an attempt that somebody will want to look at; nothing follows from it."""

    kind = "noted"

    attempt: int
    name: str
    data: Any = None
    """As JSON has it."""

    def __post_init__(self) -> None:
        where = f"Attempt {self.attempt} of rollout {self.rollout}: the note '{self.name}'"
        object.__setattr__(self, "data", to_json_value(self.data, where))


@dataclass(frozen=True, slots=True)
class AttemptEnded(RolloutEvent):
    """An attempt is over. Its rollout ends with it, or with `retry` is queued once more."""

    kind = "attempt_ended"

    attempt: int
    outcome: Outcome
    error: str = ""
    """For anything but success: what happened, in words."""
    retry: bool = False
    watched: bool = False
    """Whether it was ended by who watches over it, and not by who played it."""
    at: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        if self.retry and self.outcome not in RETRIED:
            raise DataError(
                f"Attempt {self.attempt} of rollout {self.rollout} ended {self.outcome}, which cannot be retried; "
                f"what can: {', '.join(sorted(RETRIED))}."
            )


@dataclass(frozen=True, slots=True)
class LateResultRecorded(RolloutEvent):
    """An attempt was handed in after it was over by another's word: this is kept, and changes nothing."""

    kind = "late_result_recorded"

    attempt: int
    outcome: Outcome
    error: str = ""
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"Attempt {self.attempt} of rollout {self.rollout}: late reward"
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        object.__setattr__(self, "reward", None if self.reward is None else check_finite(self.reward, where))
        parts = {name: check_finite(value, f"{where} part '{name}'") for name, value in self.parts.items()}
        object.__setattr__(self, "parts", parts)


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutsAdmitted(Event):
    """A step trains on exactly these rollouts. Their tasks are settled: what else was tried at them is set aside."""

    kind = "admitted"

    step: int
    rollouts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollouts", tuple(int(rollout) for rollout in self.rollouts))


@dataclass(frozen=True, slots=True)
class PolicyEvaluated(Event):
    """The policy was evaluated: `PolicyEvaluated(20, "val", {"mean@4": 0.61}, [{"answer": "4", "reward": 1}])`."""

    kind = "evaluated"

    step: int
    name: str
    scores: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]] = ()
    """What was asked and answered, one mapping each; kept as a payload."""

    def __post_init__(self) -> None:
        where = f"The evaluation '{self.name}' of step {self.step}"
        object.__setattr__(self, "scores", {name: float(score) for name, score in self.scores.items()})
        object.__setattr__(self, "samples", tuple(to_json_value(list(self.samples), f"{where}: samples")))

    def to_dict(self) -> dict[str, Any]:
        """The fields without the samples."""
        return {"step": self.step, "name": self.name, "scores": self.scores}

    def payload(self) -> bytes:
        """The samples, compressed."""
        return zlib.compress(json.dumps(self.samples).encode()) if self.samples else b""

    @classmethod
    def from_dict(cls, document: dict[str, Any], payload: bytes) -> PolicyEvaluated:
        """The event that was written so."""
        return cls(**document, samples=json.loads(zlib.decompress(payload)) if payload else ())


@dataclass(frozen=True, slots=True)
class PolicyPublished(Event):
    """Every engine computes with this version of the policy."""

    kind = "published"

    version: int
    step: int


@dataclass(frozen=True, slots=True)
class ResourcePut(Event):
    """A new version of what rollouts share. Example: `ResourcePut("endpoint", 1, {"base_url": "http://…/v1"})`."""

    kind = "resource_put"

    name: str
    version: int
    """From 1, one more for each put."""
    value: Any
    """As JSON has it."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "value", to_json_value(self.value, f"Version {self.version} of the resource '{self.name}'")
        )
