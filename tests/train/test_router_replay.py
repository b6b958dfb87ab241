"""Router replay in a learner: the experts that were chosen before the updates are chosen in all of them."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms import AlgorithmConfig, AlgorithmState
from etude.batch import Batch
from etude.errors import BatchError, ConfigError
from etude.train import Learner, PolicyTrainConfig
from tests.families import family_model
from tests.train.tasks import Improve, model, rollouts, weights

COLUMNS = frozenset({"old_logp", "routes"})


def mixture(router_replay: str = "r2", **options: object) -> Learner:
    config = PolicyTrainConfig(precision="fp64", learning_rate=1e-2, router_replay=router_replay, **options)  # type: ignore[arg-type]
    return Learner(family_model("qwen3_moe", torch.float64), config, steps=10)


def trained(learner: Learner, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the weights after two updates."""
    algorithm = AlgorithmConfig()
    for _ in range(2):
        learner.update(algorithm.estimate(batch, AlgorithmState()).batch, Improve(algorithm))
    return weights(learner)


def test_updates_replay_the_routes_of_the_pass_before_them_however_tokens_are_packed() -> None:
    annotated = mixture().annotate(rollouts(), COLUMNS)
    together, apart, unaware = (
        mixture(),
        mixture(max_tokens_per_micro_batch=40, activation_checkpointing="full"),
        mixture("none"),
    )
    expected = trained(together, annotated)
    found = trained(apart, apart.annotate(rollouts(), COLUMNS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    others = annotated.replace(routes=(annotated.require("routes") + 1) % 4)
    assert not torch.equal(trained(mixture(), others)["lm_head.weight"], expected["lm_head.weight"])
    own = trained(mixture("none"), annotated.replace(routes=None))
    assert all(torch.equal(own[name], weight) for name, weight in trained(unaware, others).items())


def test_a_pass_with_given_routes_has_the_log_probs_of_these_routes() -> None:
    learner = mixture()
    first = learner.annotate(rollouts(), COLUMNS)
    trained(learner, first)
    replayed = learner.annotate(first, COLUMNS)
    chosen_anew = learner.annotate(first.replace(routes=None), COLUMNS)
    assert torch.equal(replayed.require("routes"), first.require("routes"))
    assert not torch.equal(chosen_anew.require("routes"), first.require("routes"))


def test_routes_of_another_model_are_refused() -> None:
    learner = mixture()
    batch = learner.annotate(rollouts(), COLUMNS)
    routes = batch.require("routes")
    for wrong, message in (
        (routes[:, 1:], r"`routes` has 3 experts a token, as torch.uint8. .* 4, as .*: 2 mixtures with 2 experts"),
        (routes + 4, r"token 0 has expert \d, and a mixture of this model has the experts 0 to 3. .* another model"),
    ):
        with pytest.raises(BatchError, match=message):
            trained(learner, batch.replace(routes=wrong))


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`train.router_replay=r2` .* this qwen3 model has no mixture of experts"):
        Learner(model("fp64"), PolicyTrainConfig(precision="fp64", router_replay="r2"))
