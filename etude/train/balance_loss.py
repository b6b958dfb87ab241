"""The balance loss of one update: the loads of experts in its whole batch, and the parts of the loss in each pass.

Tokens are counted by row, however passes share them: a prompt of four rollouts has four times the weight of an answer's
token. A row without a token to learn counts nothing, because a micro-batch of such rows is not computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.algorithms.view import Ranks
from etude.batch import Batch
from etude.models.balance import PassBalance, Scoring
from etude.models.routes import RouteShape


class BalanceLoss:
    """The balance loss of one update batch, of which this rank may have a part."""

    def __init__(self, batch: Batch, shape: RouteShape, scoring: Scoring, ranks: Ranks, rate: float) -> None:
        """batch: this rank's part, with routes. ranks: those with the others; all make this call together. rate: the
        coefficient of each layer's loss in the gradient."""
        counted = _learned_rows(batch)
        loads = _count_choices(batch, counted, shape)
        sums = ranks.all_reduce(torch.cat([loads.flatten(), counted.sum()[None]]))
        loads = sums[:-1].view_as(loads).double()
        self._shares = loads / loads.sum(1, keepdim=True).clamp(min=1)
        self._tokens = int(sums[-1])
        self._scoring = scoring
        self._rate = rate
        self._passes = list[PassBalance]()

    def start_pass(self, batch: Batch, places: Tensor, length: int) -> PassBalance:
        """Return the loss for a pass over a micro-batch. places: [T], its tokens' places among `length` packed ones."""
        counts = torch.zeros(length, dtype=torch.float64, device=batch.device)
        counts.index_add_(0, places, _learned_rows(batch).double())
        weights = counts / max(self._tokens, 1)
        started = PassBalance(self._shares.to(batch.device), weights, self._rate, self._scoring)
        self._passes.append(started)
        return started

    def total(self, ranks: Ranks) -> float:
        """Return the mean over layers of the loss, without its coefficient: 1 if all experts get equally many tokens.

        ranks: all that computed a part. All make this call together.
        """
        parts = [loss.cpu() for each in self._passes for loss in each.losses.values()]
        own = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
        return float(ranks.all_reduce(own)) / len(self._shares)


def _learned_rows(batch: Batch) -> Tensor:
    """[T]: return true for the tokens of rows that have a token to learn."""
    before = torch.cat([batch.offsets.new_zeros(1), batch.action.cumsum(0).to(batch.offsets)])
    learned = before[batch.offsets].diff() > 0
    return torch.repeat_interleave(learned, batch.offsets.diff(), output_size=batch.num_tokens)


def _count_choices(batch: Batch, counted: Tensor, shape: RouteShape) -> Tensor:
    """[L, E]: count the tokens of each expert, as the column `routes` has them. A rank without rows has no column."""
    size = shape.mixtures * shape.experts
    if batch.routes is None:
        return torch.zeros((shape.mixtures, shape.experts), dtype=torch.int64, device=batch.device)
    chosen = batch.routes[counted].long().view(-1, shape.mixtures, shape.per_token)
    layers = torch.arange(shape.mixtures, device=chosen.device)[:, None].expand_as(chosen)
    known = chosen != shape.none
    places = layers[known] * shape.experts + chosen[known]
    return places.bincount(minlength=size).view(shape.mixtures, shape.experts)
