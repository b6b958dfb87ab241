"""Entropy: a bonus on it, and training only on the tokens with high entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from etude.algorithms.view import Ranks, View
from etude.config import Config
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class EntropyConfig(Config):
    """Two uses of the policy's entropy H_t at a token.

    Bonus: −coefficient · (H reduced as the policy loss is), so that it does not depend on the micro-batch. Its gradient
    is exact for each token with the visited states held fixed.

    Top share (2506.01939, which keeps 0.2): the policy trains only on the most uncertain tokens of the rollout batch,
    where a reasoning branches. The others are dropped from the policy loss and still count in its denominators. Assumes
    that entropies are π_old's. They are known before the update, so the pick does not depend on the micro-batch.
    Ours: the share of all action tokens is rounded to a whole number, at least one. Tokens as uncertain as the last one
    picked are picked too, so that neither the order of tokens nor the split over ranks matters. Entropies
    that differ by rounding alone count as different, and rounding depends on the size of the passes.
    """

    coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus in the loss; 0 is off")
    top_share: float | None = Field(
        None, gt=0, lt=1, description="train only on this share of tokens, the most uncertain ones; none trains on all"
    )

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that it reads."""
        return frozenset() if self.top_share is None else frozenset({"entropy"})

    def forward_outputs(self) -> frozenset[str]:
        """Return the fields of `Outputs` that the forward pass must compute for it."""
        return frozenset({"entropy"}) if self.coefficient else frozenset()


def top_entropy_mask(view: View, share: float) -> Tensor:
    """[A] bool: the most uncertain `share` of the rollout batch's action tokens."""
    entropy = view.column("entropy", needed_by="The top-entropy mask")
    return entropy >= top_share_threshold(entropy, share, view.ranks)


def top_share_threshold(values: Tensor, share: float, ranks: Ranks) -> Tensor:
    """[]: the smallest of the largest `share` of all ranks' values [A], or inf if there are no values.

    Each rank sends only as many of its largest values as there are in the share, not all of them.
    """
    count = int(ranks.all_reduce(torch.tensor(float(len(values)), dtype=torch.float64, device=values.device)))
    wanted = min(count, max(1, round(share * count)))
    offered = ranks.all_gather(values.topk(min(wanted, len(values)), sorted=False).values)
    return offered.kthvalue(len(offered) - wanted + 1).values if wanted else values.new_tensor(torch.inf)
