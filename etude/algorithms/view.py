"""A view of a batch for algorithms: its action tokens, packed together.

Everything else in a batch is context, and must not affect training. So a `View` gathers the action tokens of each
column into one flat column [A], in time order, and the formulas see no other tokens. A NaN in the context can enter
neither a sum nor a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from etude.algorithms.segments import Segments
from etude.errors import BatchError, MissingColumnError
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from etude.batch import Batch

Unit = Literal["rollout", "turn"]
"""The extent of a per-sequence quantity."""


class Ranks(Protocol):
    """The reductions over ranks for statistics of the whole rollout batch; each rank holds some of its groups."""

    rank: int
    """The index of this rank. Rank 0 does the work that must be done once."""
    count: int

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, entry by entry."""
        ...

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the ranks' values [n, …], which may differ in n, end to end in rank order."""
        ...

    def all_max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        ...


class SingleRank(Ranks):
    """The only rank: it holds the whole batch, so that its values are those of all ranks."""

    rank, count = 0, 1

    def all_reduce(self, values: Tensor) -> Tensor:
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        return values

    def all_max(self, number: int) -> int:
        return number


@dataclass(frozen=True, eq=False, kw_only=True)
class Outputs:
    """The outputs of the models for a batch in this forward pass, with gradients: flat columns [T].

    A loss declares the fields that it needs in `forward_outputs`; no others are computed.
    """

    logp: Tensor | None = None
    """log π_θ of each token, scaled by the temperature like the sampler's."""
    entropy: Tensor | None = None
    """The entropy of π_θ at each token."""
    full_kl: Tensor | None = None
    """KL(π_θ ‖ π_ref) over the whole vocabulary at each token."""
    topk_logp: Tensor | None = None
    """[T, k + 1]: log π_θ of each token in `teacher_topk_ids`; the last column is all other tokens together."""
    alternative_logp: Tensor | None = None
    """[T, k + 1]: log π_θ of each token in `alternative_ids`; the last column is all other tokens together."""
    value: Tensor | None = None
    """The critic's estimate of the state before each token."""
    score: Tensor | None = None
    """[U]: a reward model's score of each rollout."""


@dataclass(frozen=True, eq=False)
class View:
    """The A action tokens of a batch (or of a micro-batch), and their segments."""

    batch: Batch
    outputs: Outputs = field(default_factory=Outputs)
    ranks: Ranks = field(default_factory=SingleRank)
    """The ranks that share the rollout batch; every statistic of the whole batch goes through them."""

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of results: float64 if the batch's log-probs are, else float32."""
        logp = self.batch.behavior_logp if self.batch.old_logp is None else self.batch.old_logp
        return torch.float64 if logp is not None and logp.dtype == torch.float64 else torch.float32

    @cached_property
    def action_index(self) -> Tensor:
        """[A] int64: the indices of the action tokens in the batch."""
        return flatnonzero(self.batch.action)

    @cached_property
    def rollouts(self) -> Segments:
        """The rollouts of the batch as ranges of action tokens; one without an action is empty."""
        return Segments(torch.diff(torch.searchsorted(self.action_index, self.batch.rollout_token_offsets)))

    @cached_property
    def turns(self) -> Segments:
        """The turns of all rollouts as ranges of action tokens, in time order."""
        turn, rollout = self.column("turn", needed_by="A quantity over turns"), self.rollouts.segment_ids
        begins = torch.ones(len(turn), dtype=torch.bool, device=turn.device)
        begins[1:] = (turn[1:] != turn[:-1]) | (rollout[1:] != rollout[:-1])
        starts = flatnonzero(begins)
        return Segments(torch.diff(starts, append=starts.new_full((1,), len(turn))))

    def units(self, unit: Unit) -> Segments:
        """Return the rollouts or the turns."""
        return self.rollouts if unit == "rollout" else self.turns

    def column(self, name: str, needed_by: str = "") -> Tensor:
        """[A]: a column of the batch at the action tokens; half precision is widened to float32.

        Of a column of rollouts, each token gets its rollout's entry, and real numbers the dtype of results.
        """
        values = self.batch.require(name, needed_by)
        if self.batch.is_rollout_column(name):
            return self.rollouts.broadcast(values.to(self.dtype) if values.is_floating_point() else values)
        return upcast(values.index_select(0, self.action_index))

    def full_output(self, name: str, needed_by: str = "") -> Tensor:
        """Return a whole column of the forward pass, unchanged, with its gradient."""
        values: Tensor | None = self.outputs.__dict__[name]
        if values is None:
            raise MissingColumnError(
                f"{needed_by or 'A loss'} needs the model's `{name}`, which this forward pass did not compute. "
                f"Declare it in the loss's `forward_outputs`, or pass it in `Outputs({name}=…)`."
            )
        expected = self.batch.num_rollouts if name == "score" else self.batch.num_tokens
        if len(values) != expected or values.ndim != (2 if name in ("topk_logp", "alternative_logp") else 1):
            raise BatchError(
                f"The model's `{name}` has the shape {tuple(values.shape)}; for this batch it needs "
                f"{expected} entries, one for each {'rollout' if name == 'score' else 'token'}, in a flat column."
            )
        return values

    def output(self, name: str, needed_by: str = "") -> Tensor:
        """[A] or [A, k]: a column of the forward pass at the action tokens, with its gradient."""
        return upcast(self.full_output(name, needed_by).index_select(0, self.action_index))

    @cached_property
    def logp(self) -> Tensor:
        """[A]: log π_θ, with gradient."""
        return self.output("logp")

    def describe_token(self, index: int) -> str:
        """Return the name of an action token in errors."""
        rollout = int(self.rollouts.segment_ids[index])
        return f"action token {int(self.rollouts.position[index])} of rollout {self.batch.get_rollout_id(rollout)}"

    def scatter(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[A] → [T]: put values of the action tokens back among all tokens; `fill` elsewhere."""
        whole = torch.full((self.batch.num_tokens,), fill, dtype=values.dtype, device=values.device)
        return whole.index_copy_(0, self.action_index, values)


def upcast(values: Tensor) -> Tensor:
    """Widen half precision to float32, in which all maths is done; leave wider types unchanged."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def flatnonzero(mask: Tensor) -> Tensor:
    """[n] bool → the indices where it is true, in order."""
    if mask.device.type == "cpu":  # numpy finds them an order of magnitude faster than torch
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero()[:, 0]
