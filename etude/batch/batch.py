"""The batch: rollouts as flat columns, without padding.

Four nested levels, each flat over the next::

    group    g0                       g1            compared with each other
    rollout  u0           u1          u2            one attempt; owns a reward
    row      r0     r1    r2          r3            one token sequence; tokens offsets[r] to offsets[r + 1]
    token    . . A  . . A . . A A A   . . A . A     A: the policy chose it

The rows of a rollout are adjacent and in time order. Its action tokens, read left to right, are the policy's choices,
however turns were merged into rows. This one rule makes every statistic a segment reduction over flat columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.batch import checks
from etude.batch.columns import Column, ColumnKind, ranges
from etude.batch.images import ImageContent, StoredBytes, image_columns, joined_images, select_images
from etude.batch.schema import BatchSchema
from etude.batch.split import split_rollouts
from etude.batch.support_sets import SupportSets
from etude.errors import BatchError, MissingColumnError
from etude.records import Rollout, Sample
from etude.support import Support
from etude.token_routes import blank_routes

_TOKEN, _TOKEN_K, _UNIT = ({"kind": kind} for kind in (ColumnKind.TOKEN, ColumnKind.TOKEN_K, ColumnKind.UNIT))


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch:
    """Rows of tokens with everything known about them. Columns that are `None` have not been computed.

    Index t of a column describes token t: its log-prob given the tokens before it, the value of the state before it.
    Token columns are meaningful where `action` is true; elsewhere they may hold anything, NaN included.
    """

    offsets: Tensor
    """[R + 1] int64: row r is tokens offsets[r] to offsets[r + 1]; rows may be empty."""
    unit: Tensor
    """[R] int64, never decreasing: the rollout of each row. A rollout may have no row."""
    group: Tensor
    """[U] int64: the group of each rollout, numbered from 0. Its length is the number of rollouts."""
    model: str = "policy"
    """The model these tokens train."""
    part_names: tuple[str, ...] = ()
    """The names of the columns of `reward_parts`."""
    source_names: tuple[str, ...] = ()
    """The data sources that `source` names."""

    ids: Tensor = field(metadata=_TOKEN)
    """int32: the tokens."""
    action: Tensor = field(metadata=_TOKEN)
    """bool: chosen by the policy."""
    observation: Tensor | None = field(default=None, metadata=_TOKEN)
    """bool: the environment's output between two answers, each token once, images left out. ECHO learns it."""
    image: Tensor | None = field(default=None, metadata=_TOKEN)
    """int32: the place in `images` of the image that the token takes a feature of; -1 is none."""
    feature: Tensor | None = field(default=None, metadata=_TOKEN)
    """int32: the index of that feature among the image's; -1 is none."""
    turn: Tensor | None = field(default=None, metadata=_TOKEN)
    """int32, never decreasing over a rollout's actions: the turn each action token belongs to."""
    version: Tensor | None = field(default=None, metadata=_TOKEN)
    """int32: the policy version that sampled the token."""
    behavior_logp: Tensor | None = field(default=None, metadata=_TOKEN)
    """log μ: the sampler's log-prob of the token. Immutable."""
    support: Tensor | None = field(default=None, metadata=_TOKEN)
    """int32: the place in `support_sets` of the tokens that the sampler could draw from; -1 is the whole vocabulary."""
    old_logp: Tensor | None = field(default=None, metadata=_TOKEN)
    """log π_old: the trainer's log-prob at the start of the step."""
    ref_logp: Tensor | None = field(default=None, metadata=_TOKEN)
    """The reference policy's log-prob."""
    teacher_logp: Tensor | None = field(default=None, metadata=_TOKEN)
    """The distillation teacher's log-prob."""
    entropy: Tensor | None = field(default=None, metadata=_TOKEN)
    """The entropy of π_old at the token."""
    sum_pi_squared: Tensor | None = field(default=None, metadata=_TOKEN)
    """Σ_v π_old(v)² at the token, for the optimal token baseline."""
    value: Tensor | None = field(default=None, metadata=_TOKEN)
    """The critic's estimate at the start of the step, read before the token."""
    anchor: Tensor | None = field(default=None, metadata=_TOKEN)
    """int64: the name of the state that a turn began in, read at the turn's first action token, for GiGPO."""
    token_reward: Tensor | None = field(default=None, metadata=_TOKEN)
    """The reward of a token: a turn's reward is at that turn's last action token."""
    advantage: Tensor | None = field(default=None, metadata=_TOKEN)
    """A: filled by an advantage estimator."""
    returns: Tensor | None = field(default=None, metadata=_TOKEN)
    """The critic's target: filled by GAE."""
    weight: Tensor | None = field(default=None, metadata=_TOKEN)
    """Detached importance weight of the mismatch correction; multiplies the policy loss."""
    keep: Tensor | None = field(default=None, metadata=_TOKEN)
    """bool: false where a correction rejected the token from the policy loss."""
    chosen: Tensor | None = field(default=None, metadata=_TOKEN)
    """bool: tokens picked over the whole rollout batch (covariance selection)."""

    teacher_topk_ids: Tensor | None = field(default=None, metadata=_TOKEN_K)
    """int64 [T, k]: the teacher's most likely tokens."""
    teacher_topk_logp: Tensor | None = field(default=None, metadata=_TOKEN_K)
    """[T, k]: the teacher's log-probs of them."""

    alternative_ids: Tensor | None = field(default=None, metadata=_TOKEN_K)
    """int32 [T, k]: the tokens that were likeliest to be drawn."""
    alternative_logp: Tensor | None = field(default=None, metadata=_TOKEN_K)
    """[T, k]: the sampler's log-probs of them; -inf where fewer could be drawn."""
    old_alternative_logp: Tensor | None = field(default=None, metadata=_TOKEN_K)
    """[T, k + 1]: log π_old of them; the last column is all other tokens together."""

    routes: Tensor | None = field(default=None, metadata=_TOKEN_K)
    """[T, L · k]: the experts of each token, context included, in each of L mixtures. uint8, where 255 is none: the
    router then chooses itself. For a model with more than 255 experts int16, where -1 is none."""

    reward: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] float64: the rollout's own reward, token rewards not included."""
    metric: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] float64: the sum of all the rollout's rewards, before penalties."""
    reward_parts: Tensor | None = field(default=None, metadata=_UNIT)
    """[U, parts] float64: the named parts of the reward."""
    greedy_reward: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] float64: the reward of the greedy answer to the same task, for ReMax."""
    truncated: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] bool: cut off at a length limit."""
    final_value: Tensor | None = field(default=None, metadata=_UNIT)
    """[U]: the critic's estimate of the state after the last action, for truncated rollouts, which have not ended."""
    trainer_version: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] int64: the trainer's policy version at the start of the step."""
    role: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] int64: the player of a game."""
    source: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] int64: the data source of the rollout's task, by its place in `source_names`."""
    rollout_id: Tensor | None = field(default=None, metadata=_UNIT)
    """[U] int64: the run-wide name of the rollout; random choices are keyed by it, errors cite it."""

    support_sets: SupportSets | None = None
    """The sets that `support` names, each once."""
    images: tuple[ImageContent, ...] = ()
    """The images that `image` names, each once: their bytes, or handles to them."""

    extra: Mapping[str, Column] = field(default_factory=dict)
    """The columns of plug-ins: numbers of the tasks (`data.batch_columns`), and what a program adds."""

    def __post_init__(self) -> None:
        checks.check_layout(self)
        for name, column in self.columns():
            checks.check_column(self, name, column)
        checks.check_values(self)

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """T: the number of tokens, context included."""
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.unit)

    @property
    def num_rollouts(self) -> int:
        """U."""
        return len(self.group)

    @property
    def device(self) -> torch.device:
        """The device of every column."""
        return self.ids.device

    @cached_property
    def num_groups(self) -> int:
        """The number of groups: the largest group number plus one."""
        return int(self.group.max()) + 1 if self.num_rollouts else 0

    @cached_property
    def rollout_row_offsets(self) -> Tensor:
        """[U + 1]: rollout u is rows rollout_row_offsets[u] to rollout_row_offsets[u + 1]."""
        rollouts = torch.arange(self.num_rollouts + 1, device=self.unit.device)
        return torch.searchsorted(self.unit.contiguous(), rollouts)

    @cached_property
    def rollout_token_offsets(self) -> Tensor:
        """[U + 1]: rollout u is tokens rollout_token_offsets[u] to rollout_token_offsets[u + 1]."""
        return self.offsets[self.rollout_row_offsets]

    def columns(self) -> Iterator[tuple[str, Column]]:
        """Yield every column that is present, those of plug-ins last."""
        for name, kind in COLUMNS.items():
            values = self.__dict__[name]
            if values is not None:
                yield name, Column(kind, values)
        yield from self.extra.items()

    def is_token_column(self, name: str) -> bool:
        """Return true for a column of Etude with one entry for each token."""
        return COLUMNS.get(name) is ColumnKind.TOKEN

    def is_rollout_column(self, name: str) -> bool:
        """Return true for a column with one entry for each rollout, of Etude or of a plug-in."""
        kind = self.extra[name].kind if name in self.extra else COLUMNS.get(name)
        return kind is ColumnKind.UNIT

    def require(self, name: str, needed_by: str = "") -> Tensor:
        """Return the column, or raise an error that names it and the algorithm that declared it."""
        values = self.__dict__[name] if name in COLUMNS else self.extra[name].tensor if name in self.extra else None
        if values is None:
            there = ", ".join(name for name, _ in self.columns())
            subject = needed_by or "An algorithm"
            remedy = f"batch.replace({name}=…)" if name in COLUMNS else f'batch.replace(extra={{"{name}": Column(…)}})'
            raise MissingColumnError(
                f"{subject} needs the column `{name}`, which this batch does not have (it has {there}). "
                f"Add it with `{remedy}`, or choose an algorithm that does not need it."
            )
        assert isinstance(values, Tensor)
        return values

    def get_rollout_id(self, rollout: int) -> int:
        """Return the name of a rollout for errors: its run-wide id, or its index where the batch has no ids."""
        return rollout if self.rollout_id is None else int(self.rollout_id[rollout])

    # -- making others of it ------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> Batch:
        """Return the same rows with some columns changed or added; only those are checked again."""
        unknown = changes.keys() - {f.name for f in fields(self)}
        if unknown:
            raise BatchError(f"`{sorted(unknown)[0]}` is not a column of a batch. Put a plug-in's column into `extra`.")
        if changes.keys() & _CHECKED_TOGETHER:
            return Batch(**{f.name: changes.get(f.name, self.__dict__[f.name]) for f in fields(self)})
        other = self._replace_unchecked(changes)
        for name, column in other.columns():
            if name in changes or "extra" in changes:
                checks.check_column(other, name, column)
        if changes.keys() & checks.CHECKED:
            checks.check_values(other)
        return other

    def _replace_unchecked(self, changes: Mapping[str, Any]) -> Batch:
        other = object.__new__(Batch)
        other.__dict__.update({f.name: changes.get(f.name, self.__dict__[f.name]) for f in fields(self)})
        return other

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch on another device."""
        layout = {name: self.__dict__[name].to(device) for name in ("offsets", "unit", "group")}
        columns = {name: Column(column.kind, column.tensor.to(device)) for name, column in self.columns()}
        sets = None if self.support_sets is None else self.support_sets.to(device)
        return self._replace_unchecked(layout | _column_fields(columns) | {"support_sets": sets})

    def select(self, rollouts: Tensor | Sequence[int]) -> Batch:
        """Return these rollouts (indices, or a mask), in this order, with all their rows.

        Groups are renumbered from 0.
        """
        units = checks.resolve_rollouts(self, rollouts)
        rows_of = self.rollout_row_offsets[units + 1] - self.rollout_row_offsets[units]
        rows = ranges(self.rollout_row_offsets[units], rows_of)
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        tokens = ranges(self.offsets[rows], lengths)
        layout = {
            "offsets": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            "unit": torch.repeat_interleave(torch.arange(len(units), device=self.device), rows_of),
            "group": torch.unique(self.group[units], return_inverse=True)[1],
        }
        columns = {
            name: Column(column.kind, column.tensor[units if column.kind is ColumnKind.UNIT else tokens])
            for name, column in self.columns()
        }
        changes = layout | _column_fields(columns)
        if self.support_sets is not None:
            changes["support"], changes["support_sets"] = self.support_sets.select(changes["support"])
        if self.images:
            changes |= select_images(changes["image"], changes["feature"], self.images)
        return self._replace_unchecked(changes)

    def split(self, parts: int, by: str = "rollout") -> list[Batch]:
        """Split into batches of whole rollouts (or whole groups), in order, with about as many tokens each.

        No part is empty, however unequal the rollouts are. With fewer rollouts (or groups) than parts, each becomes one
        batch. No split goes through a rollout, so a quantity over a rollout is the same in a micro-batch as in the
        whole.
        """
        return [self.select(places) for places in split_rollouts(self.rollout_token_offsets, self.group, parts, by)]

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """Join batches in order. Groups stay separate: equal numbers in two batches are two groups."""
        if not batches:
            raise BatchError("An empty list of batches cannot be joined: at least one is needed.")
        batches = _share_images(_share_sources(_share_support(batches)))
        first = batches[0]
        kinds = {name: column.kind for name, column in first.columns()}
        for i, other in enumerate(batches):
            if (other.model, other.part_names) != (first.model, first.part_names):
                raise BatchError(
                    f"Batch {i} is of model `{other.model}` and reward parts {other.part_names}, batch 0 of "
                    f"`{first.model}` and {first.part_names}: only like batches can be joined."
                )
            unshared = kinds.keys() ^ {name for name, _ in other.columns()}
            if unshared:
                raise BatchError(
                    f"Batches 0 and {i} cannot be joined: only one of them has the column `{sorted(unshared)[0]}`."
                )
        shift = [0, *np.cumsum([b.num_tokens for b in batches]).tolist()]
        units = [0, *np.cumsum([b.num_rollouts for b in batches]).tolist()]
        groups = [0, *np.cumsum([b.num_groups for b in batches]).tolist()]
        columns = [dict(b.columns()) for b in batches]
        joined = {name: Column(kind, torch.cat([c[name].tensor for c in columns])) for name, kind in kinds.items()}
        offsets = [first.offsets[:1], *(b.offsets[1:] + s for b, s in zip(batches, shift, strict=False))]
        layout = {
            "offsets": torch.cat(offsets),
            "unit": torch.cat([b.unit + s for b, s in zip(batches, units, strict=False)]),
            "group": torch.cat([b.group + s for b, s in zip(batches, groups, strict=False)]),
        }
        return first._replace_unchecked(layout | _column_fields(joined))

    @classmethod
    def from_records(
        cls,
        samples: Sequence[Sample],
        rollouts: Sequence[Rollout],
        form: BatchSchema | None = None,
        images: Mapping[str, bytes | StoredBytes] | None = None,
    ) -> Batch:
        """Build a batch of rows in time order within each rollout.

        Every rollout stays in its group, those without a row included. `metric` has the rewards of turns too. Penalties
        and KL terms change the reward later, but not this column.
        form: the schema of the whole batch, where these are only some of its rollouts, or none.
        images: the bytes of the rows' images, or handles to them, by digest.
        """
        if not rollouts and form is None:
            raise BatchError("A batch needs at least one rollout; none was given.")
        place = _places(samples, rollouts)
        ordered = sorted(samples, key=lambda sample: place[sample.rollout])
        own = BatchSchema.from_records(
            [row.model for row in samples],
            [row.anchor is not None for row in ordered],
            rollouts,
            [row.num_alternatives for row in ordered],
            [row.route_format for row in ordered],
        )
        form = own if form is None else form.check_part(own, rows=bool(ordered), rollouts=bool(rollouts))
        lengths = [len(row.ids) for row in ordered]
        paid = [np.zeros(len(row.ids)) if row.reward is None else row.reward for row in ordered]
        support = Support.concat([row.support or len(row.ids) for row in ordered])
        seen = [np.zeros(len(row.ids), np.bool_) if row.observation is None else row.observation for row in ordered]
        labels = np.unique([rollout.group for rollout in rollouts], return_inverse=True)[1]

        def flat(name: str, dtype: type[np.generic]) -> Tensor:
            columns = [getattr(sample, name) for sample in ordered]
            return torch.from_numpy(np.concatenate([np.empty(0, dtype), *columns]))

        def column(values: Iterable[float | None], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(list(values), dtype=dtype)

        names = form.part_names
        parts = np.array([[r.parts[name] for name in names] for r in rollouts], np.float64)
        unit = column(place[sample.rollout] for sample in ordered)
        reward = column((rollout.reward for rollout in rollouts), torch.float64)
        token_reward = torch.from_numpy(np.concatenate([np.empty(0), *paid]))
        return cls(
            offsets=torch.tensor([0, *np.cumsum(lengths).tolist()]),
            unit=unit,
            group=torch.from_numpy(labels.astype(np.int64)),
            model=form.model,
            part_names=names,
            ids=flat("ids", np.int32),
            action=flat("action", np.bool_),
            observation=torch.from_numpy(np.concatenate([np.empty(0, np.bool_), *seen])),
            turn=flat("turn", np.int32),
            version=flat("version", np.int32),
            behavior_logp=flat("logp", np.float32),
            support=None if support is None else torch.from_numpy(support.index.copy()),
            support_sets=None if support is None else SupportSets.from_support(support),
            token_reward=token_reward,
            reward=reward,
            metric=reward.index_add(0, unit.repeat_interleave(column(lengths)), token_reward),
            reward_parts=torch.from_numpy(parts.reshape(len(rollouts), len(names))) if names else None,
            truncated=column((rollout.truncated for rollout in rollouts), torch.bool),
            role=column(rollout.role for rollout in rollouts),
            source=column(form.source_names.index(rollout.source) for rollout in rollouts),
            source_names=form.source_names,
            rollout_id=column(rollout.id for rollout in rollouts),
            anchor=flat("anchor", np.int64) if form.has_anchor else None,
            alternative_ids=_alternatives(ordered, "alternative_ids", form.alternatives, 0),
            alternative_logp=_alternatives(ordered, "alternative_logp", form.alternatives, -np.inf),
            routes=_routes(ordered, form.route_format),
            **image_columns(ordered, images or {}),
            greedy_reward=column((rollout.greedy_reward for rollout in rollouts), torch.float64)
            if form.has_greedy_reward
            else None,
            extra={
                name: Column(ColumnKind.UNIT, column((rollout.columns[name] for rollout in rollouts), torch.float64))
                for name in form.column_names
            },
        )


def _share_support(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with places in one table of sets, if any has sets. One without has the whole vocabulary."""
    tables = [batch.support_sets for batch in batches if batch.support_sets is not None]
    if not tables:
        return list(batches)
    joined = SupportSets.concat(tables)
    shared = []
    before = 0
    for batch in batches:
        places = batch.support
        if places is None:
            places = torch.full_like(batch.ids, -1)
        shared.append(batch.replace(support=torch.where(places < 0, -1, places + before), support_sets=joined))
        before += 0 if batch.support_sets is None else len(batch.support_sets.kind)
    return shared


def _share_images(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with places in one tuple of images, if any has images."""
    if not any(batch.images for batch in batches):
        return list(batches)
    fields_of = joined_images(batches)
    return [batch._replace_unchecked(changes) for batch, changes in zip(batches, fields_of, strict=True)]


def _share_sources(batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with places in one list of data sources."""
    names = tuple(sorted({name for batch in batches for name in batch.source_names}))
    shared = []
    for batch in batches:
        places = batch.source
        if places is not None and batch.source_names != names:
            places = places.new_tensor([names.index(name) for name in batch.source_names])[places]
        shared.append(batch.replace(source=places, source_names=names))
    return shared


def _alternatives(samples: Sequence[Sample], name: str, width: int | None, none: float) -> Tensor | None:
    """Return a column of the alternatives, `width` to each token, or None if there are none.

    none: the entry where fewer could be drawn. A row without a sampled token has it everywhere.
    """
    if not width:
        return None
    dtype = np.int32 if name == "alternative_ids" else np.float32
    columns = [np.empty((0, width), dtype)]
    for sample in samples:
        unsampled = sample.num_alternatives is None
        columns.append(np.full((len(sample.ids), width), none, dtype) if unsampled else getattr(sample, name))
    return torch.from_numpy(np.concatenate(columns))


def _routes(samples: Sequence[Sample], route_format: tuple[int, str] | None) -> Tensor | None:
    """Return the column of the experts that tokens went through, or None if no row has them. Others have none."""
    if route_format is None:
        return None
    width = route_format[0]
    dtype = np.dtype(route_format[1])
    columns = [np.empty((0, width), dtype)]
    for sample in samples:
        columns.append(blank_routes(len(sample.ids), width, dtype) if sample.routes is None else sample.routes)
    return torch.from_numpy(np.concatenate(columns))


def _places(samples: Sequence[Sample], rollouts: Sequence[Rollout]) -> dict[int, int]:
    """Return the position of each rollout by its id. Each row must belong to one of them."""
    place = {rollout.id: u for u, rollout in enumerate(rollouts)}
    if len(place) < len(rollouts):
        twice = next(rollout.id for u, rollout in enumerate(rollouts) if place[rollout.id] != u)
        raise BatchError(f"Two rollouts have the id {twice}. Give each rollout of the run its own id.")
    for r, sample in enumerate(samples):
        if sample.rollout not in place:
            raise BatchError(f"Row {r} belongs to rollout {sample.rollout}, which is not among the rollouts given.")
    return place


_CHECKED_TOGETHER = frozenset({"offsets", "unit", "group", "ids", "action", "image", "feature", "images"})
"""The fields that only a check of the whole batch covers."""

COLUMNS: dict[str, ColumnKind] = {f.name: f.metadata["kind"] for f in fields(Batch) if "kind" in f.metadata}
"""The columns of Etude, by name."""

OWN_NAMES = frozenset(f.name for f in fields(Batch))
"""The names that no column of a plug-in can have."""


def _column_fields(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return columns by the fields of a batch that hold them."""
    own = {name: column.tensor for name, column in columns.items() if name in COLUMNS}
    return own | {"extra": {name: column for name, column in columns.items() if name not in COLUMNS}}
