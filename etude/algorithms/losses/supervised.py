"""Losses that learn from recorded data: demonstrations, tool output, returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from etude.algorithms.base import Loss, LossValue, TokenLoss
from etude.algorithms.reduce import Denominators
from etude.algorithms.view import View, flatnonzero, upcast
from etude.lazy import torch
from etude.observe import Mean, Metrics, Sum

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(
    value: Tensor, old_value: Tensor | None, returns: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """Return ½·max((V − G)², (V_old + clip(V − V_old) − G)²) and a mask of the clipped values; no V_old, no clip."""
    plain = (value - returns) ** 2
    if old_value is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    with torch.no_grad():  # where the clipped term is larger, the value is out of bounds: no gradient
        near = (value.clamp(old_value - clip, old_value + clip) - returns) ** 2
        cut = near > plain
    return 0.5 * torch.where(cut, near, plain), cut


class SFT(TokenLoss):
    """Supervised fine-tuning: −log π_θ of the demonstrated tokens.

    The demonstrated tokens are the batch's action tokens. Assumes that each is worth imitating. `token-mean` weights
    all tokens equally, `seq-mean-token-mean` all demonstrations.
    """

    def __call__(self, view: View, denominators: Denominators) -> LossValue:
        logp = view.logp
        nll = Mean.over(-logp.detach().sum(), len(logp))
        return LossValue(-self.reduce_terms(logp, view, denominators), Metrics({"nll": nll}))


class ValueLoss(TokenLoss):
    """The critic's regression to the returns: ½·max((V − G)², (V_old + clip(V − V_old, ±c) − G)²).

    Source: 1506.02438 for the targets, the clip from the code of 1707.06347. Assumes returns that stay constant during
    the update. The maximum is pessimistic, as PPO's: a value that has moved further than c towards its target gets no
    gradient, one that moved away gets its full gradient.
    """

    clip: float | None = Field(0.2, gt=0, description="largest move of a value within a step; none does not bound it")

    def required_columns(self) -> frozenset[str]:
        return super().required_columns() | {"returns"} | ({"value"} if self.clip is not None else set())

    def forward_outputs(self) -> frozenset[str]:
        return frozenset({"value"})

    def __call__(self, view: View, denominators: Denominators) -> LossValue:
        value, returns = view.output("value", needed_by="The value loss"), view.column("returns")
        if self.clip is None:
            loss, cut = clipped_value_loss(value, None, returns, clip=0.0)
        else:
            loss, cut = clipped_value_loss(value, view.column("value"), returns, clip=self.clip)
        metrics = Metrics(
            {
                "value_loss": Mean.over(loss.detach().sum(), len(loss)),
                "value_clip_share": Mean.over(cut.count_nonzero(), len(cut)),
            }
        )
        return LossValue(self.reduce_terms(loss, view, denominators), metrics)


class EchoLoss(Loss):
    """ECHO: −log π_θ of the tool-output tokens, averaged over those of the update batch.

    Assumes that an agent learns about its environment by predicting tool output. The loss is added to a policy loss
    with a weight. It is the only term with a gradient on tokens that the policy did not choose: the environment's
    output between two answers, each token once, however turns became rows. Its denominator counts only these tokens, so
    their number does not dilute the policy loss. The metric `echo_tokens` is their number: 0 if all rollouts were
    single answers.
    """

    def required_columns(self) -> frozenset[str]:
        return frozenset({"observation"})

    def __call__(self, view: View, denominators: Denominators) -> LossValue:
        seen = view.batch.require("observation", needed_by="ECHO") & ~view.batch.action
        logp = upcast(view.full_output("logp", needed_by="ECHO").index_select(0, flatnonzero(seen)))
        total = -logp.sum()
        metrics = Metrics({"echo_nll": Mean.over(total.detach(), len(logp)), "echo_tokens": Sum.of(len(logp))})
        return LossValue(total / max(denominators.observations, 1), metrics)
