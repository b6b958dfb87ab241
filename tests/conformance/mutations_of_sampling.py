"""Mistakes about what the sampler did: the sets that it drew from, and the tokens that it could have drawn."""

from __future__ import annotations

from functools import partial

from etude.algorithms import centering
from etude.batch import SupportSets
from etude.models.logprob_head import _LogpEntropy, map_logit_chunks
from etude.models.token_sets import TokenSets
from etude.train.forward import ForwardPass
from tests.conformance import test_centering as centered
from tests.conformance import test_supports as supports
from tests.conformance.mutations import Mutation

REPLAYED = partial(supports.test_replayed_sets_give_the_gradient_of_the_policy_that_acted, "top_p")
NO_DRIFT = partial(centered.test_equal_advantages_move_nothing, "reinforce", 1.0)
OVER_SETS = partial(supports.test_entropy_and_kl_are_over_the_sets, "grammar")

MUTATIONS = [
    Mutation("no set in the forward pass", _LogpEntropy.forward, "sets.restrict_(scaled, part)", "pass", REPLAYED),
    Mutation("no set in the backward pass", _LogpEntropy.backward, "ctx.sets.restrict_(grad, part)", "pass", REPLAYED),
    Mutation(
        "the trainer's own set",
        TokenSets._outside,
        "self.table.mask(index, logits.shape[1]).logical_not_()",
        "logits < logits.topk(3, 1).values[:, 2:]",
        partial(supports.test_a_later_update_still_uses_the_recorded_sets, "top_k"),
    ),
    Mutation(
        "complement of the set",
        TokenSets._outside,
        ".logical_not_()",
        "",
        supports.test_a_forced_token_moves_nothing,
    ),
    Mutation(
        "reference over the vocabulary",
        ForwardPass._compute_outputs,
        "sets.restrict_(reference, HeadRows(slice(start, stop)))",
        "pass",
        OVER_SETS,
    ),
    Mutation(
        "no set for other outputs",
        map_logit_chunks,
        "logits if sets is None else sets.restrict(logits, slice(start, stop))",
        "logits",
        OVER_SETS,
    ),
    Mutation(
        "off by one",
        SupportSets.select,
        "(place - missing)",
        "place",
        supports.test_any_micro_batches_with_sets_give_the_gradient_of_the_whole,
    ),
    Mutation("dropped tail", centering._with_rest, "rest.log()", "(0 * rest).log()", NO_DRIFT),
    Mutation(
        "weight of the drawn token",
        centering.expected_loss,
        "found.old_logp - found.behavior_logp",
        '(view.column("old_logp") - view.column("behavior_logp"))[:, None]',
        NO_DRIFT,
    ),
    Mutation(
        "sign flip", centering._view_of_alternatives, 'view.column("advantage")', '-view.column("advantage")', NO_DRIFT
    ),
    Mutation("dropped probability", centering.expected_loss, " * found.probability", "", NO_DRIFT),
]
