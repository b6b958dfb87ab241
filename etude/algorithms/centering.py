"""Score centering: the sampler's expectation of a token's own loss is subtracted from that loss.

At a place the sampler draws token a with probability q(a), and the loss moves the weights by A·g(a)·∇log p(a); g holds
the ratio, the weight, the clip. Write A as its mean at this place, and a rest. The mean's part, Ā·E_q[g ∇log p], knows
nothing of which token was good. With q = p it is 0. With another sampler it pulls p towards q where Ā > 0 and drives it
away where Ā < 0, in every step: a drift. What is left after the subtraction is the covariance of A and g ∇log p.

    L_t = ℓ(a) − Σ_v q(v) w(v) ℓ(v)

ℓ is the loss's own token term with the advantage of the drawn token, and w the correction's weight of v. v runs over
the k tokens that were recorded, and over all others as one. So no loss is written again for it.

Exact if all that could be drawn is recorded, or if q is in proportion to p on the rest. Source: 2609.20807.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from etude.algorithms.view import Outputs, View
from etude.errors import BatchError
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

    from etude.algorithms.base import PolicyLoss
    from etude.algorithms.corrections import CorrectionConfig

TOLERANCE = 1e-3
"""The largest difference of a drawn token's log-prob from that of the same token among its alternatives."""


class Alternatives(NamedTuple):
    """[A, k + 1] of each: log-probs of the recorded tokens, and of all others as one. An impossible one has 0."""

    possible: Tensor
    """bool: the sampler could draw it."""
    logp: Tensor
    """log π_θ, with gradient."""
    old_logp: Tensor
    behavior_logp: Tensor
    probability: Tensor
    """The sampler's."""


def expected_loss(loss: PolicyLoss, view: View, correction: CorrectionConfig) -> tuple[Tensor, Metrics]:
    """[A]: return Σ_v q(v) w(v) ℓ(v) at each action token, and its metrics."""
    found = _read_alternatives(view, correction)
    terms, _ = loss.per_token_loss(_view_of_alternatives(view, found))
    weight = correction.weigh_tokens(found.old_logp - found.behavior_logp) * found.probability
    terms = torch.where(found.possible, terms.view(found.logp.shape), 0.0)
    expected = (weight.detach() * terms).sum(1)
    with torch.no_grad():
        drift = torch.where(found.possible, (weight - found.logp.exp()).abs(), 0.0).sum(1) / 2
        mass = found.probability[:, :-1].sum(1)
    count = len(expected)
    return expected, Metrics(
        {
            "center/mass": Mean.over(mass.sum(), count),
            "center/drift": Mean.over(drift.sum(), count),
            "center/loss": Mean.over(expected.detach().sum(), count),
        }
    )


def check_alternatives(view: View) -> None:
    """Refuse alternatives of another distribution than the one that the tokens were drawn from."""
    recorded = view.column("alternative_logp", needed_by="`correction.center`")
    ids = view.column("alternative_ids", needed_by="`correction.center`")
    same = (ids == view.column("ids")[:, None]) & (recorded > -torch.inf)
    behavior = view.column("behavior_logp", needed_by="`correction.center`")
    gap = torch.where(same, (recorded - behavior[:, None]).abs(), 0.0).amax(1)
    if len(gap) and float(gap.max()) > TOLERANCE:
        token = int(gap.argmax())
        raise BatchError(
            f"The sampler reports two log-probs of {view.describe_token(token)}: its own, and that among its "
            f"alternatives. They differ by {float(gap[token]):.3g}, so they are of two distributions. Leave "
            "`correction.center` out."
        )


def _read_alternatives(view: View, correction: CorrectionConfig) -> Alternatives:
    logp = view.output("alternative_logp", needed_by="`correction.center`")
    behavior = _with_rest(view.column("alternative_logp", needed_by="`correction.center`")).to(logp.dtype)
    if correction.policies == "two":
        old = behavior
    elif view.batch.old_alternative_logp is None:  # the first update's own pass
        old = logp.detach()
    else:
        old = view.column("old_alternative_logp").to(logp.dtype)
    possible = (behavior > -torch.inf) & (logp.detach() > -torch.inf) & (old > -torch.inf)
    return Alternatives(
        possible,
        torch.where(possible, logp, 0.0),
        torch.where(possible, old, 0.0),
        torch.where(possible, behavior, 0.0),
        torch.where(possible, behavior.exp(), 0.0),
    )


def _with_rest(logp: Tensor) -> Tensor:
    """[A, k] → [A, k + 1]: add the log-prob of all other tokens together."""
    rest = (1 - logp.double().exp().sum(1, keepdim=True)).clamp(min=0)
    return torch.cat([logp, rest.log().to(logp.dtype)], 1)


def _view_of_alternatives(view: View, found: Alternatives) -> View:
    """Return a view in which each alternative is an action token of its rollout."""
    batch, count = view.batch, found.logp.shape[1]
    ends = (view.rollouts.lengths * count).cumsum(0)
    rollouts = torch.arange(batch.num_rollouts, device=batch.device)
    total = found.logp.numel()
    version = None if batch.version is None else batch.version[view.action_index].repeat_interleave(count)
    of_rollouts = {name: column for name, column in batch.extra.items() if batch.is_rollout_column(name)}
    others = type(batch)(  # a batch: its module loads torch, which options must not wait for
        offsets=torch.cat([ends.new_zeros(1), ends]),
        unit=rollouts,
        group=batch.group,
        ids=batch.ids.new_zeros(total),
        action=batch.action.new_ones(total),
        old_logp=found.old_logp.reshape(-1),
        behavior_logp=found.behavior_logp.reshape(-1),
        advantage=view.column("advantage").repeat_interleave(count),
        version=version,
        trainer_version=batch.trainer_version,
        extra=of_rollouts,
    )
    return View(others, Outputs(logp=found.logp.reshape(-1)), view.ranks)
