"""Sets of tokens: over those recorded, the gradient is that of the policy that acted; over the vocabulary, not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etude.algorithms import KLS, AlgorithmConfig, AlgorithmState, Denominators, KLTerm, Outputs, View
from etude.algorithms.advantages.group import RLOO
from etude.algorithms.corrections import CorrectionConfig
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.losses import LOSSES
from etude.batch import SupportSets
from etude.support import Support
from etude.train.micro_batches import iterate_micro_batches
from tests.conformance.supports import CUTS, IDS, LENGTH, STATES, SampledAnswers, sample, state_logits

SUM = "seq-mean-token-sum"
ALGORITHMS = {
    "log-prob": AlgorithmConfig(advantage=RLOO(), loss=LOSSES["reinforce"](reduction=SUM)),
    "ratio": AlgorithmConfig(advantage=RLOO(), loss=LOSSES["ppo"](reduction=SUM, clip_low=0.999, clip_high=999.0)),
    "clip": AlgorithmConfig(advantage=RLOO(), loss=LOSSES["ppo"](reduction=SUM, clip_low=0.2, clip_high=0.2)),
}
TOLERANCE = 1e-14
LOGP = frozenset({"logp"})
WHOLE_VOCABULARY = {
    "top_k": (0.550, 0.453, 0.359),
    "top_p": (0.287, 0.231, 0.231),
    "min_p": (0.165, 0.176, 0.215),
    "all three": (0.141, 0.144, 0.144),
    "grammar": (0.924, 0.505, 0.813),
    "bans, then top_p": (0.523, 0.479, 0.429),
}
"""The relative error of the gradient of log-prob, ratio and clip, without the sets."""


def exact(result: Tensor, expected: Tensor) -> None:
    """Check that two gradients are equal up to rounding, relative to their length."""
    assert expected.norm() > 1e-3, "the expected gradient is zero: the check would show nothing"
    assert (result - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.parametrize("name", CUTS)
def test_replayed_sets_give_the_gradient_of_the_policy_that_acted(name: str) -> None:
    drawn = sample(name)
    replayed = drawn.forward(drawn.batch, LOGP)
    for algorithm in ALGORITHMS.values():
        exact(-drawn.gradient(drawn.expected_loss(algorithm, replayed)), drawn.true_gradient)


@pytest.mark.parametrize("name", CUTS)
def test_over_the_whole_vocabulary_the_gradient_is_another(name: str) -> None:
    drawn = sample(name)
    whole = drawn.forward(drawn.batch.replace(support=None, support_sets=None), LOGP)
    errors = []
    for algorithm in ALGORITHMS.values():
        gap = -drawn.gradient(drawn.expected_loss(algorithm, whole)) - drawn.true_gradient
        errors.append(float(gap.norm() / drawn.true_gradient.norm()))
    assert errors == pytest.approx(WHOLE_VOCABULARY[name], rel=0.02)


@pytest.mark.parametrize("name", CUTS)
def test_a_later_update_still_uses_the_recorded_sets(name: str) -> None:
    """The weights have moved, and would leave other tokens: the product of ratios gives ∇E at the new weights."""
    drawn = sample(name, change=0.1)
    correction = CorrectionConfig(weight="truncate", level="sequence", high=1e6)
    algorithm = AlgorithmConfig(advantage=RLOO(), loss=LOSSES["reinforce"](reduction=SUM), correction=correction)
    exact(-drawn.gradient(drawn.expected_loss(algorithm, drawn.forward(drawn.batch, LOGP))), drawn.true_gradient)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all three"])
def test_moved_weights_would_leave_other_tokens(name: str) -> None:
    drawn = sample(name, change=0.1)
    own = CUTS[name](state_logits(drawn.model))
    assert (own != drawn.allowed).any(1).double().mean() > 0.1
    assert not own[STATES, IDS][drawn.possible].all(), "some drawn tokens would be impossible"


def expected_term(drawn: SampledAnswers, term: KLTerm | None) -> Tensor:
    """Return the expectation of a KL term, or of the entropy, summed over an answer's tokens."""
    outputs = {"entropy"} if term is None else term.forward_outputs()
    view = View(drawn.batch, Outputs(**drawn.forward(drawn.batch, LOGP | outputs)))
    values = view.output("entropy") if term is None else term.per_token_kl(view)
    return drawn.over_states(values.view(-1, LENGTH))


@pytest.mark.parametrize("name", ["top_p", "grammar"])
def test_entropy_and_kl_are_over_the_sets(name: str) -> None:
    """Their gradients are those of the policy that acted, against a reference that is bound by the same sets."""
    drawn = sample(name)
    logp = drawn.distribution(drawn.model)
    with torch.no_grad():
        reference = drawn.distribution(drawn.reference.model)
    possible = drawn.allowed_tokens
    own = torch.where(possible, logp, 0.0)
    gap = own - torch.where(possible, reference, 0.0)
    over = {
        "entropy": -(logp.exp() * own).sum(2),
        "full": (logp.exp() * gap).sum(2),
        "reverse": (logp.exp() * gap.square() / 2).sum(2),
    }
    values = {how: drawn.over_states(table) for how, table in over.items()}
    slopes = {how: values["full" if how == "reverse" else how] for how in over}
    for how in over:
        expected = expected_term(drawn, None if how == "entropy" else KLS[how]())
        torch.testing.assert_close(expected, values[how], rtol=1e-13, atol=0)
        exact(drawn.gradient(expected), drawn.gradient(slopes[how]))


OUTPUTS = [LOGP, frozenset({"logp", "entropy"}), frozenset({"logp", "entropy", "full_kl"})]


@pytest.mark.parametrize("wanted", OUTPUTS, ids=["logp", "entropy", "full_kl"])
def test_tokens_without_a_set_are_those_of_a_batch_without_sets(wanted: frozenset[str]) -> None:
    """Bit for bit: outputs and gradients."""
    drawn = sample("top_p")
    without = drawn.batch.replace(support=None, support_sets=None)
    whole = Support.whole(drawn.batch.num_tokens)
    unbound = without.replace(support=torch.tensor(whole.index), support_sets=SupportSets.from_support(whole))
    results = [drawn.forward(batch, wanted) for batch in (without, unbound)]
    for name in wanted:
        first, second = (result[name][drawn.batch.action] for result in results)
        assert torch.equal(first, second)
        assert torch.equal(drawn.gradient(first.square().sum()), drawn.gradient(second.square().sum()))


def test_a_forced_token_moves_nothing() -> None:
    drawn = sample("grammar")
    logp = drawn.forward(drawn.batch, LOGP)["logp"][drawn.batch.action].view(-1, LENGTH)
    forced = drawn.allowed_tokens.sum(2) == 1
    assert 0.05 < forced.double().mean() < 0.9
    assert (logp[forced] == 0).all()
    assert not drawn.gradient(logp[forced].sum()).any()


def test_any_micro_batches_with_sets_give_the_gradient_of_the_whole() -> None:
    drawn = sample("bans, then top_p", change=0.1)
    algorithm = AlgorithmConfig(
        loss=LOSSES["ppo"](), kl=KLS["full"](coefficient=0.3), entropy=EntropyConfig(coefficient=0.1)
    )
    estimated = algorithm.estimate(drawn.batch, AlgorithmState())
    denominators = Denominators.from_view(View(estimated.batch))
    wanted = algorithm.forward_outputs()

    def summed(tokens: int) -> tuple[Tensor, int]:
        parts = []
        for micro, _ in iterate_micro_batches(estimated.batch, tokens, "rollout", torch.device("cpu")):
            outputs = Outputs(**drawn.forward(micro, wanted))
            parts.append(drawn.gradient(algorithm.compute_loss(micro, outputs, denominators, estimated.state).loss))
        return torch.stack(parts).sum(0), len(parts)

    whole, one = summed(10_000)
    in_parts, several = summed(30)
    assert (one, several) == (1, 3)
    exact(in_parts, whole)
