"""Losses over pairs: a group is two answers to one task, and the one with the higher reward is the preferred one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from etude.algorithms.base import Loss, LossValue
from etude.algorithms.reduce import Denominators
from etude.algorithms.view import View, upcast
from etude.errors import BatchError
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor


def find_pairs(view: View) -> tuple[Tensor, Tensor]:
    """Return the preferred and the other rollout of each group [G]; refuse a group without two different rewards."""
    group, reward = view.batch.group, view.batch.require("reward", needed_by="A loss over pairs")
    sizes = torch.bincount(group)
    odd = (sizes != 2).nonzero()
    if len(odd):
        g = int(odd[0])
        raise BatchError(
            f"Group {g}{_name_rollouts(view, g)} has {int(sizes[g])} rollouts, but a preference is between two. "
            f"Give each group exactly one preferred and one other answer."
        )
    both = group.argsort(stable=True).view(-1, 2)
    first, second = reward[both[:, 0]], reward[both[:, 1]]
    level = (first == second).nonzero()
    if len(level):
        g = int(level[0])
        raise BatchError(
            f"Group {g}{_name_rollouts(view, g)} has two rewards of {float(first[g]):g}, which prefers neither. "
            f"Give the preferred answer the higher reward, or leave the pair out."
        )
    swap = first < second
    return torch.where(swap, both[:, 1], both[:, 0]), torch.where(swap, both[:, 0], both[:, 1])


def _name_rollouts(view: View, group: int) -> str:
    named = [str(view.batch.get_rollout_id(u)) for u in (view.batch.group == group).nonzero()[:, 0].tolist()]
    return f" (rollouts {', '.join(named)})" if named else ""


def preference_loss(margin: Tensor, *, label_smoothing: float) -> Tensor:
    """Return −(1 − ε)·log σ(margin) − ε·log σ(−margin)."""
    logsigmoid = torch.nn.functional.logsigmoid
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


class DPO(Loss):
    """Direct preference optimization: −log σ(β·(Δ_chosen − Δ_rejected)), Δ = Σ log π_θ/π_ref over a rollout's actions.

    Source: 2305.18290; label smoothing (the conservative form) from its authors' note. Assumes preferences that follow
    Bradley and Terry's model, whose reward is then β·log π_θ/π_ref. The mean is over the groups of the update batch.
    """

    split_unit: ClassVar[Literal["rollout", "group"]] = "group"

    beta: float = Field(
        0.1, gt=0, description="strength with which the policy is held to the reference; larger stays closer"
    )
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="probability that a preference in the data is wrong")

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward", "ref_logp"})

    def __call__(self, view: View, denominators: Denominators) -> LossValue:
        chosen, rejected = find_pairs(view)
        implied = self.beta * view.rollouts.sum(view.logp - view.column("ref_logp", needed_by="DPO"))
        margin = implied[chosen] - implied[rejected]
        loss = preference_loss(margin, label_smoothing=self.label_smoothing).sum() / max(denominators.groups, 1)
        seen, count = implied.detach(), len(margin)
        return LossValue(
            loss,
            Metrics(
                {
                    "accuracy": Mean.over((margin > 0).sum(), count),
                    "margin": Mean.over(margin.detach().sum(), count),
                    "chosen_reward": Mean.over(seen[chosen].sum(), count),
                    "rejected_reward": Mean.over(seen[rejected].sum(), count),
                }
            ),
        )


class RewardModelLoss(Loss):
    """A reward model from preferences: −log σ(score_chosen − score_rejected).

    Source: Bradley and Terry (1952), as in 2203.02155. Assumes one score for a whole rollout, from the model's head.
    Only differences within a pair are learned, so scores of different tasks have no common zero.
    The mean is over the groups of the update batch.
    """

    split_unit: ClassVar[Literal["rollout", "group"]] = "group"

    def required_columns(self) -> frozenset[str]:
        return frozenset({"reward"})

    def forward_outputs(self) -> frozenset[str]:
        return frozenset({"score"})

    def __call__(self, view: View, denominators: Denominators) -> LossValue:
        chosen, rejected = find_pairs(view)
        score = upcast(view.full_output("score", needed_by="The reward model's loss"))
        margin = score[chosen] - score[rejected]
        loss = preference_loss(margin, label_smoothing=0.0).sum() / max(denominators.groups, 1)
        count = len(margin)
        return LossValue(
            loss,
            Metrics(
                {
                    "accuracy": Mean.over((margin > 0).sum(), count),
                    "margin": Mean.over(margin.detach().sum(), count),
                }
            ),
        )
