"""A loss on the scores of routers that evens the loads of experts.

    hidden ──► scores ──► balanced scores, equal in every bit ──► topk ──► …
                 ▲                                                         │
                 └── gradient of the tokens' experts + that of the loss ◄──┘

The loss of a layer is E · Σ_e f_e · mean_t p_te. f_e is expert e's share of all choices of an update batch, and p_te
token t's probability of it. f has no gradient and is known before the first pass. So the gradient is a sum over tokens,
and the split of a batch into passes does not change it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Scoring: TypeAlias = Literal["softmax", "sigmoid"]
"""The function that makes probabilities of scores; those of sigmoids are divided by their sum."""


@dataclass(frozen=True, eq=False)
class PassBalance:
    """The balance loss in one pass over P tokens."""

    shares: Tensor
    """[L, E]: the share of each expert in the choices of its layer, in the whole update batch."""
    weights: Tensor
    """[P]: the part of each token in the mean over the update batch."""
    rate: float
    """The coefficient of the loss in the gradient."""
    scoring: Scoring
    losses: dict[int, Tensor] = field(default_factory=dict)
    """This pass's part of the loss of each mixture, without the coefficient."""

    def of_tokens(self, rows: slice, padded: int) -> PassBalance:
        """Return the balance of a part of the tokens, if the pass has so many with padding."""
        weights = torch.cat([self.weights, self.weights.new_zeros(padded - len(self.weights))])
        return replace(self, weights=weights[rows])

    def apply(self, mixture: int, scores: Tensor) -> Tensor:
        """[P, E] → [P, E]: return the scores, whose gradient has that of the loss. A second call has equal results."""
        flat = scores.detach().reshape(-1, scores.shape[-1])
        probabilities, _ = _probabilities(flat, self.scoring)
        shares = self.shares[mixture].to(probabilities)
        of_tokens = (probabilities @ shares).double() * self.weights
        self.losses[mixture] = of_tokens.sum() * len(shares)
        factors = self.weights * (self.rate * len(shares))
        balanced: Tensor = _Balanced.apply(scores, shares, factors, self.scoring)  # type: ignore[no-untyped-call]
        return balanced


class _Balanced(torch.autograd.Function):
    """The scores themselves. The gradient of the loss is added to theirs."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shares: Tensor, factors: Tensor, scoring: Scoring) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.shares = shares
        ctx.factors = factors
        ctx.scoring = scoring
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scores,) = ctx.saved_tensors
        flat = scores.reshape(-1, scores.shape[-1])
        probabilities, slopes = _probabilities(flat, ctx.scoring)
        deviations = ctx.shares - (probabilities @ ctx.shares)[:, None]
        added = ctx.factors.to(probabilities)[:, None] * slopes * deviations
        return (grads[0] + added.view_as(scores)).to(scores.dtype), None, None, None


def _probabilities(scores: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """[P, E] → [P, E] of each: the probabilities, and the slope of each one's logarithm times itself."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scoring == "softmax":
        probabilities = wide.softmax(-1)
        return probabilities, probabilities
    sigmoids = wide.sigmoid()
    probabilities = sigmoids / sigmoids.sum(-1, keepdim=True)
    return probabilities, probabilities * (1 - sigmoids)


class WatchScores(TorchFunctionMode):
    """Notes how a router makes scores of its experts, while it is called in this context."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._products = 0
        self._has_sigmoid = False

    @property
    def scoring(self) -> Scoring | None:
        """The function of the scores; None if they are not the result of one linear map."""
        if self._products != 1:
            return None
        return "sigmoid" if self._has_sigmoid else "softmax"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_score_product(func, out, self._experts):
            self._products += 1
        elif func in (torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.sigmoid):
            self._has_sigmoid = True
        return out


def is_score_product(func: Any, out: Any, experts: int) -> bool:
    """Return true for the linear map whose results are the scores of so many experts."""
    return func is torch.nn.functional.linear and isinstance(out, Tensor) and out.shape[-1] == experts
