"""The rollouts of one task, while no step has trained on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from etude.records import has_zero_variance


class GroupStatus(Enum):
    """The use of a group for a step."""

    OPEN = "some rollouts have not ended"
    USABLE = "a step can train on it"
    ZERO_VARIANCE = "a step trains on it only where it finds too few others"
    FAILED = "no step can train on it"

    @property
    def is_candidate(self) -> bool:
        """True if a step can train on the group, or if that is undecided."""
        return self in (GroupStatus.OPEN, GroupStatus.USABLE)


@dataclass(slots=True, eq=False)
class TaskGroup:
    """The state of one task's rollouts."""

    task: int
    place: int
    """Its place in the windows."""
    floor: int | None = None
    """No token of its rollouts is older than this version; None before any was issued."""
    running: set[int] = field(default_factory=set)
    """The rollouts that were issued and have not ended."""
    held: tuple[int, ...] = ()
    """Rollouts of a stopped run that are to be issued again, and are not yet."""
    metrics: dict[int, float] = field(default_factory=dict)
    status: GroupStatus = GroupStatus.OPEN
    decided: int = 0
    """Its number in the order in which groups were decided."""

    @property
    def has_zero_variance(self) -> bool:
        """True if all its metrics are equal, also to the greedy answer where there is one: DAPO's filter (2503.14476),
        if `refill` is set. A single rollout compares with nothing, and does not count as equal."""
        values = self.metrics.values()
        return len(values) > 1 and bool(has_zero_variance(min(values), max(values)))

    def sampled(self, size: int) -> tuple[int, ...]:
        """Return the samples of the group that were scored."""
        return tuple(sample for sample in sorted(self.metrics) if sample < size)
