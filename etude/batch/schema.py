"""The schema of a batch: facts shared by all its rows and rollouts, needed to build one part of it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etude.errors import BatchError, RewardError
from etude.records import Rollout


@dataclass(frozen=True)
class BatchSchema:
    """The optional columns of a batch, and the model that its tokens train."""

    model: str
    """The model that the rows train."""
    part_names: tuple[str, ...]
    """The named parts of every reward."""
    has_anchor: bool
    """True if rows have `anchor`."""
    has_greedy_reward: bool
    """True if rollouts have `greedy_reward`."""
    column_names: tuple[str, ...] = ()
    """The columns that every rollout brings from its task."""
    alternatives: int | None = None
    """The number of alternatives that rows have for each token. None: no row has a sampled token."""
    source_names: tuple[str, ...] = ("",)
    """The data sources of the rollouts."""
    route_format: tuple[int, str] | None = None
    """The number of experts that each token went through, and their dtype. None: no row has routes."""

    @classmethod
    def from_records(
        cls,
        models: Sequence[str],
        anchored: Sequence[bool],
        rollouts: Sequence[Rollout],
        alternatives: Sequence[int | None] = (),
        route_formats: Sequence[tuple[int, str] | None] = (),
    ) -> BatchSchema:
        """Return the schema of rows of these models, each with an anchor or without; refuse inconsistent records.

        alternatives: of each row, the number of alternatives to each of its tokens; None without a sampled token.
        route_formats: of each row, `Sample.route_format`.
        """
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
            names[0],
            parts,
            _all_or_none("row", "anchor", anchored),
            _all_or_none("rollout", "greedy_reward", greedy),
            _column_names(rollouts),
            _one_width(alternatives),
            tuple(sorted({rollout.source for rollout in rollouts})),
            _one_route_format(route_formats),
        )

    def check_part(self, part: BatchSchema, *, rows: bool, rollouts: bool) -> BatchSchema:
        """Return this schema for a part that has rows, rollouts or neither; refuse a part of another batch."""
        same_rows = self._of_rows() == part._of_rows() and part.alternatives in (None, self.alternatives)
        same_rows &= part.route_format in (None, self.route_format)
        same_rollouts = self._of_rollouts() == part._of_rollouts()
        same_rollouts &= set(part.source_names) <= set(self.source_names)
        if (rows and not same_rows) or (rollouts and not same_rollouts):
            raise BatchError(f"These rows and rollouts have the schema {part}, but the batch has {self}.")
        return self

    def _of_rows(self) -> tuple[object, ...]:
        """Return the fields that follow from the rows."""
        return self.model, self.has_anchor

    def _of_rollouts(self) -> tuple[object, ...]:
        """Return the fields that follow from the rollouts."""
        return self.part_names, self.has_greedy_reward, self.column_names


def _one_width(alternatives: Sequence[int | None]) -> int | None:
    """Return the number of alternatives that all rows with a sampled token have; refuse rows that differ in it."""
    widths = sorted({width for width in alternatives if width is not None})
    if len(widths) > 1:
        raise BatchError(
            f"Some rows have {widths[0]} alternatives to each token, others {widths[-1]}. Every row of a batch needs "
            "as many: sample all of them with the same `correction.alternatives`."
        )
    return widths[0] if widths else None


def _one_route_format(formats: Sequence[tuple[int, str] | None]) -> tuple[int, str] | None:
    """Return the form of the routes that rows have; a row may have none. Refuse rows whose routes differ in it."""
    found = sorted({each for each in formats if each is not None})
    if len(found) > 1:
        (width, dtype), (other, other_dtype) = found[:2]
        raise BatchError(
            f"Some rows have routes of {width} experts a token ({dtype}), others of {other} ({other_dtype}): different "
            "models sampled them. Train on the rollouts of one model, or set `train.router_replay=none`."
        )
    return found[0] if found else None


def _column_names(rollouts: Sequence[Rollout]) -> tuple[str, ...]:
    """Return the names of the columns that the rollouts bring; refuse rollouts that differ in them."""
    names = sorted({name for rollout in rollouts for name in rollout.columns})
    for rollout in rollouts:
        if rollout.columns.keys() != set(names):
            raise BatchError(
                f"Rollout {rollout.id} brings the columns {sorted(rollout.columns)}; others bring {names}. Every "
                "rollout of a batch needs the same columns: give the number to all of them, or to none."
            )
    return tuple(names)


def _all_or_none(record: str, name: str, present: Sequence[bool]) -> bool:
    """Return whether the records have an optional field; refuse a mix of records with and without it."""
    if any(present) and not all(present):
        raise BatchError(
            f"Of {len(present)} {record}s {sum(present)} have `{name}`, and {record} {present.index(False)} has none. "
            f"Give it to all of them, or to none."
        )
    return any(present)
