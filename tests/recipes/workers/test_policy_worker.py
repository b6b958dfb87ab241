"""The policy's worker: updates, epochs, and the state that is carried from one step to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from etude.batch import Batch
from etude.dispatch import LocalCrew
from etude.errors import MissingColumnError, TrainingError
from etude.observe import Metrics
from etude.recipes.run.builders.policy import load_policy
from etude.recipes.run.config import Run
from etude.recipes.workers.policy_worker import PolicyObjective, PolicyWorker
from etude.records import Completion, Rollout, Sample, SamplingParams
from etude.rollout import TorchEngine
from etude.rollout.torch_engine import TorchEngineConfig
from etude.train import Learner
from tests.recipes.runs import run_of


def worker_of(run: Run) -> LocalCrew:
    """Return a crew of one worker for a run."""
    model, _ = load_policy(run)
    learner = Learner(model, run.train, steps=100)
    return LocalCrew(PolicyWorker(run, learner, seed=run.seed, ppo_epochs=run.ppo_epochs))


def batch_of(groups: int = 2, size: int = 4) -> Batch:
    """Return rollouts of three prompt tokens and a few sampled ones, each second one with a high reward."""
    chance = np.random.default_rng(0)
    rows, rollouts = [], []
    for place in range(groups * size):
        length = 3 + int(chance.integers(2, 6))
        ids = chance.integers(2, 40, length).astype(np.int32)
        action = np.arange(length) >= 3
        zeros = np.zeros(length, np.int32)
        rows.append(Sample(ids, action, np.full(length, -3.7, np.float32), zeros, zeros, rollout=place))
        rollouts.append(Rollout(place, place // size, place // size, float(place % 2)))
    return Batch.from_records(rows, rollouts)


def stepped(crew: LocalCrew, run: Run, step: int = 1) -> Metrics:
    """Make one step of the loop."""
    batch = crew.call(PolicyWorker.annotate, batch_of(), frozenset({"old_logp"}))
    batch = crew.call(PolicyWorker.estimate, batch, step)
    assert batch.advantage is not None
    return crew.call(PolicyWorker.update, batch.split(run.mini_batches))


@pytest.mark.parametrize(("mini_batches", "ppo_epochs"), [(1, 1), (4, 1), (2, 3)])
def test_a_step_makes_as_many_updates_as_were_asked_for(mini_batches: int, ppo_epochs: int, world: Path) -> None:
    run = run_of(world, mini_batches=mini_batches, ppo_epochs=ppo_epochs)
    crew = worker_of(run)
    result = stepped(crew, run).reduce()
    learner = crew.call(PolicyWorker.tensors)["learner"]
    assert int(learner["version"]) == mini_batches * ppo_epochs == result["micro_batches"]
    assert result["trained_tokens"] == ppo_epochs * batch_of().num_tokens
    if mini_batches * ppo_epochs > 1:
        assert result["policy_kl"] > 0, "from the second update on, the policy is off its data"
    else:
        assert result["policy_kl"] == pytest.approx(0, abs=1e-6)


LATE = [{"loss": name} for name in ("ppo", "gspo", "cispo", "sapo", "reinforce")] + [
    {"advantage": "gae", "critic.train.precision": "fp64"},
    {"mask_truncated": True, "entropy.coefficient": 0.01, "train.max_tokens_per_micro_batch": 9},
]


@pytest.mark.parametrize("changes", LATE, ids=lambda each: "-".join(map(str, each.values())))
def test_a_single_update_computes_the_old_log_probs_itself(changes: dict[str, Any], world: Path) -> None:
    run = run_of(world, **{"train.precision": "fp64", "train.learning_rate": 1e-2, **changes})
    assert "old_logp" not in run.model_columns()
    result = []
    for columns in (frozenset[str](), frozenset({"old_logp"})):
        crew = worker_of(run)
        batch = batch_of()
        batch = batch.replace(
            behavior_logp=batch.require("behavior_logp").double(),  # the dtype of estimates, unless another is given
            value=torch.zeros(batch.num_tokens),
            final_value=torch.zeros(batch.num_rollouts),
            truncated=batch.group == 1,
        )
        batch = crew.call(PolicyWorker.annotate, batch, columns)
        metrics = crew.call(PolicyWorker.update, [crew.call(PolicyWorker.estimate, batch, 1)]).reduce()
        result.append((metrics, dict(crew.call(PolicyWorker.weights))))
    (late, weights), (early, others) = result
    assert all(torch.allclose(weights[name], others[name], rtol=0, atol=1e-12) for name in weights)
    assert late["mismatch/k3"] > 0.01, "the sampler's log-probs are made up here"
    timed = {
        "update_seconds",
        "trained_tokens_per_second",
        "mfu",
        "peak_memory_gb",
        "memory_share",
        "device_utilization",
    }
    assert {n: v for n, v in late.items() if n not in timed} == pytest.approx(
        {n: v for n, v in early.items() if n not in timed}, abs=1e-9
    )


def test_options_that_read_the_old_log_probs_have_them_computed_before(world: Path) -> None:
    for changes in (
        {"mini_batches": 2},
        {"ppo_epochs": 2},
        {"loss": "kl_cov"},
        {"kl": "reverse"},
        {"correction.weight": "truncate"},
        {"advantage": "distillation"},
        {"entropy.top_share": 0.2},
    ):
        assert "old_logp" in run_of(world, **changes).model_columns(), changes


def test_a_second_update_without_old_log_probs_is_refused(world: Path) -> None:
    run = run_of(world)
    crew = worker_of(run)
    estimated = crew.call(PolicyWorker.estimate, batch_of(), 1)
    with pytest.raises(MissingColumnError, match="old_logp"):
        crew.call(PolicyWorker.update, estimated.split(2))


def test_metrics_from_before_the_update_are_returned_once(world: Path) -> None:
    run = run_of(world)
    crew = worker_of(run)
    assert "advantage_std" in stepped(crew, run)
    batch = crew.call(PolicyWorker.annotate, batch_of(), frozenset({"old_logp"}))
    estimated = crew.call(PolicyWorker.estimate, batch, 2)
    assert "advantage_std" in crew.call(PolicyWorker.update, [estimated])
    assert "advantage_std" not in crew.call(PolicyWorker.update, [estimated])


def test_annotations_are_at_action_tokens(world: Path) -> None:
    batch = batch_of()
    result = worker_of(run_of(world)).call(PolicyWorker.annotate, batch, frozenset({"old_logp", "entropy"}))
    for column in (result.old_logp, result.entropy):
        assert column is not None and torch.equal(torch.isfinite(column), batch.action)


def test_a_worker_that_was_restored_goes_on_like_the_one_that_was_saved(world: Path) -> None:
    run = run_of(world, advantage="reinforce++", mini_batches=2)
    one, other = worker_of(run), worker_of(run)
    stepped(one, run)
    tensors: Any = {
        name: {inner: tensor.clone() for inner, tensor in tree.items()} if name != "step" else tree
        for name, tree in one.call(PolicyWorker.tensors).items()
    }
    other.call(PolicyWorker.restore, tensors, one.call(PolicyWorker.facts))
    stepped(one, run, 2), stepped(other, run, 2)
    theirs = dict(other.call(PolicyWorker.weights))
    for name, weight in one.call(PolicyWorker.weights):
        assert torch.equal(weight, theirs[name]), name


def test_the_objective_requires_the_columns_of_the_algorithm(world: Path) -> None:
    run = run_of(world, loss="gspo", **{"entropy.coefficient": 0.1})
    objective = PolicyObjective(run)
    assert (
        objective.required_columns() == run.required_columns()
        and objective.forward_outputs() == run.forward_outputs() >= {"entropy"}
    )
    assert objective.split_unit == run.loss.split_unit


def hosted(crew: LocalCrew) -> TorchEngine:
    """Return the engine of its worker."""
    assert isinstance(crew._worker, PolicyWorker)
    return crew._worker._sampling_engine


class Held(TorchEngine):
    """An engine that stays within a step until it is asked to stop there."""

    def __init__(self, run: Run) -> None:
        super().__init__(load_policy(run)[0], None, TorchEngineConfig(kv_gib=0.001))
        self.inside, self.goes_on = Event(), Event()

    def hold(self) -> None:
        """Begin the step, and hold it."""
        self.inside.set()
        self.goes_on.wait(10)

    async def pause(self) -> None:
        self.goes_on.set()
        await super().pause()

    async def abort(self) -> None:
        self.goes_on.set()
        await super().abort()


@contextmanager
def sampling(run: Run) -> Iterator[tuple[LocalCrew, Future[Completion]]]:
    """Return a worker whose engine is at a long answer; and the answer."""
    long = SamplingParams(max_tokens=100, min_tokens=100)
    with ThreadPoolExecutor(1) as others, closing(Held(run)) as engine:
        learner = Learner(engine.model, run.train, steps=100)
        worker = PolicyWorker(run, learner, seed=run.seed, ppo_epochs=run.ppo_epochs, engine=engine)
        future = others.submit(asyncio.run, worker.generate(np.arange(3, dtype=np.int32), long, on_start=engine.hold))
        assert engine.inside.wait(30)
        yield LocalCrew(worker), future


def test_an_engine_that_shares_the_weights_pauses_while_they_change(world: Path) -> None:
    """The engine continues its requests afterwards: no token is sampled from weights that are half written."""
    run = run_of(world)
    with sampling(run) as (crew, future):
        stepped(crew, run)
        drawn = hosted(crew)._scheduler.running[0].generated
        stepped(crew, run, 2)
        assert hosted(crew)._scheduler.running[0].generated == drawn, "it is paused yet"
        crew.call(PolicyWorker.publish, 1)
        assert [int((future.result(30).version == version).sum()) for version in (0, 1)] == [drawn, 100 - drawn]


def test_after_a_failed_update_the_engine_continues(world: Path) -> None:
    run = run_of(world)
    with sampling(run) as (crew, future):
        batch = crew.call(PolicyWorker.annotate, batch_of(), frozenset({"old_logp"}))
        batch = crew.call(PolicyWorker.estimate, batch, 1)
        broken = batch.replace(advantage=torch.where(batch.action, torch.tensor(torch.inf), 0.0))
        with pytest.raises(TrainingError, match="not finite"):
            crew.call(PolicyWorker.update, [broken])
        assert set(future.result(30).version.tolist()) == {0}


def test_an_engine_that_is_to_sleep_aborts_its_requests(world: Path) -> None:
    with sampling(run_of(world)) as (crew, future):
        crew.call(PolicyWorker.free_engine_memory)
        assert future.result(30).finish_reason == "abort"


@pytest.mark.parametrize(("mini_batches", "ppo_epochs"), [(1, 1), (2, 2)])
def test_two_policies_are_compared_by_the_first_pass_of_an_update(
    mini_batches: int, ppo_epochs: int, world: Path
) -> None:
    """No pass is made for π_old, and the mismatch is still known: of the weights as each token was first trained on."""
    common = {"train.precision": "fp64", "mini_batches": mini_batches, "ppo_epochs": ppo_epochs}
    two, three = (run_of(world, **common, **{"correction.policies": kind}) for kind in ("two", "three"))
    two_policies, three_policies = stepped(worker_of(two), two).reduce(), stepped(worker_of(three), three).reduce()
    names = {name for name in three_policies if name.startswith("mismatch/")}
    assert {name for name in two_policies if name.startswith("mismatch/")} == names and len(names) > 5
    assert two_policies["mismatch/k1"] == pytest.approx(
        three_policies["mismatch/k1"], rel=1e-5 if mini_batches == 1 else 0.2
    )
    if mini_batches == 1:
        assert {name: two_policies[name] for name in names} == pytest.approx(
            {name: three_policies[name] for name in names}, rel=1e-5
        )


def test_a_step_is_scaled_by_the_effective_sample_size(world: Path) -> None:
    """The first step of AdamW has the size of the learning rate, so it shrinks by exactly the factor that is logged."""
    moved, factors = [], []
    for scaling in ("none", "sqrt_ess"):
        run = run_of(world, **{"train.precision": "fp64", "correction.step_scaling": scaling, "train.weight_decay": 0})
        crew = worker_of(run)
        before = {name: weight.clone() for name, weight in crew.call(PolicyWorker.weights)}
        result = stepped(crew, run).reduce()
        factors.append(result.get("correction/step_scale", 1.0))
        assert result["learning_rate"] == pytest.approx(factors[-1] * run.train.learning_rate)
        if scaling == "sqrt_ess":
            assert factors[-1] == pytest.approx(result["mismatch/rollout_effective_sample_size"] ** 0.5)
        moved.append({name: weight - before[name] for name, weight in crew.call(PolicyWorker.weights)})
    assert 0 < factors[1] < 0.99
    for name, change in moved[0].items():
        torch.testing.assert_close(moved[1][name], factors[1] * change, rtol=1e-6, atol=1e-12)
