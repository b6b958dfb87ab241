"""Distillation from a teacher's most likely tokens.

There are two ways to distil. *On-policy* distillation is an advantage (`distillation`), with any policy loss: it needs
only the teacher's log-prob of the sampled token. *Supervised* distillation is the loss in this module: it compares
distributions over the teacher's k most likely tokens, on tokens sampled by any policy.

Self-distillation is either of the two with the policy itself as the teacher. The teacher's prompt contains more than
the student's: a demonstration (SDFT, 2601.19897), or feedback on its own attempt (SDPO, 2601.20802). Only the prompt
for the teacher's columns differs; the loss does not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from etude.algorithms.base import LossValue, TokenLoss
from etude.algorithms.reduce import Denominators
from etude.algorithms.sources import means_by_source, source_weights
from etude.algorithms.view import View
from etude.lazy import torch
from etude.observe import Mean, Metrics

if TYPE_CHECKING:
    from torch import Tensor

Direction = Literal["forward", "reverse"]


def tail_probability(logp: Tensor) -> Tensor:
    """[A, k] → [A]: the probability of all tokens that are not listed."""
    return (1 - logp.exp().sum(-1)).clamp(min=0)


def topk_kl(student: Tensor, teacher: Tensor, direction: Direction) -> Tensor:
    """[A, k + 1], [A, k] → [A]: the KL divergence over the k listed tokens and one bucket for all others.

    The student's bucket is its last column. It comes from the logits, so it has a gradient even where it is tiny; 1
    minus a sum of probabilities would not. The teacher's bucket needs no gradient, and is 1 minus its sum.
    forward: KL(teacher ‖ student); reverse: KL(student ‖ teacher). Both are 0 or more; a sum over the listed tokens
    alone can be below 0.
    """
    least = 8 * torch.finfo(student.dtype).eps  # a teacher's bucket below this is rounding
    student, rest = student[:, :-1], student[:, -1]
    rest_teacher = tail_probability(teacher)
    log_teacher = rest_teacher.clamp(min=least).log()
    if direction == "forward":
        known = teacher.exp() * (teacher - student)
        held = rest_teacher > least
        return known.sum(-1) + torch.where(held, rest_teacher * (log_teacher - torch.where(held, rest, 0.0)), 0.0)
    known = student.exp() * (student - teacher)
    empty = rest == -torch.inf  # every token is listed
    finite = torch.where(empty, 0.0, rest)
    return known.sum(-1) + torch.where(empty, 0.0, finite.exp() * (finite - log_teacher))


class TopKDistillation(TokenLoss):
    """Supervised distillation: the KL divergence to the teacher over its k most likely tokens and a rest bucket.

    forward: Σ q(log q − log p), q the teacher's; the student covers all tokens that are likely for the teacher.
    reverse: Σ p(log p − log q); the student keeps to tokens that are likely for the teacher.
    Sources: 1503.02531 (forward), 2306.08543 and 2306.13649 (reverse); as self-distillation 2601.19897 and 2601.20802,
    where the teacher is the policy itself with a longer prompt.
    Assumes that both distributions have the same temperature. Without the bucket the truncated divergence can go below
    0, and its minimum is not where the two agree.
    """

    direction: Direction = Field("forward", description="KL of the teacher to the student (forward), or back (reverse)")
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="factor of the loss of each data source, by its name; 1 for those not named. Larger learns more "
        "from the source's teacher, 0 nothing",
    )

    def required_columns(self) -> frozenset[str]:
        more = {"source"} if self.weights else set()
        return super().required_columns() | {"teacher_topk_ids", "teacher_topk_logp"} | more

    def forward_outputs(self) -> frozenset[str]:
        return frozenset({"topk_logp"})

    def __call__(self, view: View, denominators: Denominators) -> LossValue:
        by = "Top-k distillation"
        student = view.output("topk_logp", needed_by=by)
        teacher = view.column("teacher_topk_logp", needed_by=by).to(student.dtype)
        loss = topk_kl(student, teacher, self.direction)
        metrics = Metrics(
            {
                "distillation_kl": Mean.over(loss.detach().sum(), len(loss)),
                "teacher_tail": Mean.over(tail_probability(teacher).sum(), len(loss)),
            }
        )
        metrics.merge(means_by_source(view, "distillation_kl", loss.detach()))
        if self.weights:
            loss = loss * source_weights(view, self.weights, by).to(loss.dtype)
        return LossValue(self.reduce_terms(loss, view, denominators), metrics)
