"""What the rows and rollouts of a batch have alike, which one has to know to make a part of it by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.errors import BatchError, RewardError
from etude.records import Rollout

__all__ = ["BatchSchema"]


@dataclass(frozen=True)
class BatchSchema:
    """Which columns there are that some batches have and others have not, and whose tokens they are."""

    model: str
    """The model that the rows train."""
    part_names: tuple[str, ...]
    """The named parts of every reward."""
    has_anchor: bool
    """Whether rows have `anchor`."""
    has_greedy_reward: bool
    """Whether rollouts have `greedy_reward`."""

    @classmethod
    def from_records(cls, models: Sequence[str], anchored: Sequence[bool], rollouts: Sequence[Rollout]) -> BatchSchema:
        """That of rows of these models, each with an anchor or without; refuses what does not go together."""
        names = sorted(set(models)) or ["policy"]
        if len(names) > 1:
            raise BatchError(f"A batch trains one model; these rows are of {' and '.join(names)}. Make one batch each.")
        parts = tuple(sorted({name for rollout in rollouts for name in rollout.parts}))
        for rollout in rollouts:
            if parts and rollout.parts.keys() != set(parts):
                raise RewardError(
                    f"Rollout {rollout.id} has reward parts {sorted(rollout.parts)}; others have "
                    f"{list(parts)}. Every rollout of a batch needs the same parts: give 0 where one has none."
                )
        greedy = [rollout.greedy_reward is not None for rollout in rollouts]
        return cls(
            names[0], parts, _all_or_none("row", "anchor", anchored), _all_or_none("rollout", "greedy_reward", greedy)
        )

    def check_part(self, part: BatchSchema, *, rows: bool, rollouts: bool) -> BatchSchema:
        """This one, as that of a part which has rows, or rollouts, or neither; refuses a part of another whole."""
        same_rows = (self.model, self.has_anchor) == (part.model, part.has_anchor)
        same_rollouts = (self.part_names, self.has_greedy_reward) == (part.part_names, part.has_greedy_reward)
        if (rows and not same_rows) or (rollouts and not same_rollouts):
            raise BatchError(f"These rows and rollouts are {part}, and no part of a batch that is {self}.")
        return self


def _all_or_none(record: str, name: str, present: Sequence[bool]) -> bool:
    """Whether the records have what they may do without; refuses some that have it and some that have not."""
    if any(present) and not all(present):
        raise BatchError(
            f"Of {len(present)} {record}s {sum(present)} have `{name}`, and {record} {present.index(False)} has none. "
            f"Give it to all of them, or to none."
        )
    return any(present)
