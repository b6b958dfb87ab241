"""Values computed from logits, a chunk [n, V] with one row for each token to predict.

Every function works in float32 or wider, divides the logits by the sampling temperature first, and keeps the gradient.
Logits of −inf are allowed: such a token cannot be chosen, and has probability 0 and no gradient.
The chunk's width is the whole vocabulary. The caller chooses its height, because the rows are independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.algorithms.view import upcast
from etude.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def token_logp(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, V], [n] → [n]: log π of each row's token."""
    return topk_logp(logits, ids[:, None], temperature)[:, 0]


def topk_logp(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, V], [n, k] → [n, k]: log π of k tokens of each row."""
    scaled = upcast(logits) / temperature
    return scaled.gather(1, ids.long()) - scaled.logsumexp(1, keepdim=True)


def topk_logp_with_tail(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, V], [n, k] → [n, k + 1]: log π of k tokens of each row; the last column is all other tokens together."""
    scaled = upcast(logits) / temperature
    whole = scaled.logsumexp(1, keepdim=True)
    others = scaled.scatter(1, ids.long(), -torch.inf)
    none = others.amax(1, keepdim=True) == -torch.inf
    rest = torch.where(none, 0.0, others).logsumexp(1, keepdim=True) - whole
    return torch.cat([scaled.gather(1, ids.long()) - whole, torch.where(none, -torch.inf, rest)], 1)


def top_tokens(logits: Tensor, count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """[n, V] → [n, k], [n, k]: the k most likely tokens of each row in descending order, and log π of them."""
    scaled = upcast(logits) / temperature
    top = scaled.topk(count, dim=1)
    return top.indices, top.values - scaled.logsumexp(1, keepdim=True)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, V] → [n]: −Σ_v π(v) log π(v), where 0 · log 0 is 0."""
    logp = (upcast(logits) / temperature).log_softmax(1)
    possible = logp > -torch.inf
    return -(logp.exp() * torch.where(possible, logp, 0.0)).sum(1)


def sum_pi_squared(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, V] → [n]: Σ_v π(v)², the probability that two samples agree."""
    return (upcast(logits) / temperature).softmax(1).square().sum(1)


def full_kl(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[n, V], [n, V] → [n]: KL(π ‖ π_ref) = Σ_v π(v) (log π(v) − log π_ref(v)).

    A token that the policy cannot choose adds nothing, for any probability under the reference. The KL is infinite if
    the policy can choose a token that the reference cannot.
    """
    logp = (upcast(logits) / temperature).log_softmax(1)
    ref_logp = (upcast(ref_logits) / temperature).log_softmax(1)
    possible = logp > -torch.inf
    gap = torch.where(possible, logp, 0.0) - torch.where(possible, ref_logp, 0.0)
    return (logp.exp() * gap).sum(1)
