"""What rests elsewhere while nobody works with it: moved as on a GPU, from the processor's memory to itself.

That a GPU's memory is freed by it has not been run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.algorithms import AlgorithmConfig
from etude.checkpoint import CheckpointManager, flat
from etude.data.pack import pack_prefix_tree
from etude.errors import ConfigError
from etude.models import load
from etude.recipes import auxiliary_models as models
from etude.recipes.run.build import build
from etude.recipes.run.loop import run_loop
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.train import FrozenModel, Learner
from etude.train.offload import OffloadedTensors, move_tensors
from tests.recipes.runs import Captured, refused_run, run_of
from tests.recipes.workers.test_policy_worker import batch_of
from tests.train.tasks import Improve, learner, ready, rollouts, weights
from tests.worlds import make_model, make_tasks

CPU = torch.device("cpu")


def resting(by: Learner) -> Learner:
    """The learner, as one on a GPU is made whose optimizer rests."""
    by._offloaded = OffloadedTensors(by._backend._optimizer.offloadable_tensors(), CPU, CPU)
    return by


def test_tensors_move_and_stay_who_they_are() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    places, numbers = [t.data_ptr() for t in tensors], [t.detach().clone() for t in tensors]
    assert move_tensors(tensors, CPU) == 6 * 4 + 4 * 2
    assert not set(places) & {t.data_ptr() for t in tensors}
    assert all(map(torch.equal, tensors, numbers)) and tensors[1].requires_grad and tensors[1].is_leaf


def test_they_are_home_while_anybody_works() -> None:
    tensor = torch.ones(3)
    rest = OffloadedTensors([tensor], CPU, CPU)
    away = tensor.data_ptr()
    with pytest.raises(RuntimeError, match="halfway"), rest.loaded():
        home = tensor.data_ptr()
        with rest.loaded():
            assert tensor.data_ptr() == home != away
        assert tensor.data_ptr() == home, "the outer one still works"
        raise RuntimeError("halfway")
    assert tensor.data_ptr() != home


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_are_the_same_to_the_bit(precision: str, tmp_path: Path) -> None:
    plain, rested = learner(precision), resting(learner(precision))
    held = rested._backend._optimizer.offloadable_tensors()
    elements = sum(weight.numel() for weight in plain.model.parameters())
    assert sum(t.numel() for t in held) == elements * (3 if precision == "bf16" else 2), "what computes stays"
    algorithm = AlgorithmConfig()
    batch = ready(plain, algorithm, rollouts())
    for by in (plain, rested):
        by.update(batch, Improve(algorithm))
        with by.working():
            places = [t.data_ptr() for t in held]
            by.update(batch, Improve(algorithm))
            assert places == [t.data_ptr() for t in held], "several updates bring it there once"
    assert places != [t.data_ptr() for t in held]
    found, wanted = weights(rested), weights(plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    kept = CheckpointManager(tmp_path)
    saved = kept.save(1, rested.state(), {})
    again = resting(learner(precision, seed=5))
    tensors = again.state()
    kept.load(saved, tensors)
    again.restore(tensors)
    for by in (plain, again):
        by.update(batch, Improve(algorithm))
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(again).items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_of_another_learner_is_taken_up_while_resting(precision: str) -> None:
    other, rested = learner(precision), resting(learner(precision, seed=5))
    algorithm = AlgorithmConfig()
    batch = ready(other, algorithm, rollouts())
    other.update(batch, Improve(algorithm))
    rested.restore(other.state())
    for _ in range(2):
        found, wanted = flat(rested.state()), flat(other.state())
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(rested).items())
        for by in (other, rested):
            by.update(batch, Improve(algorithm))


def test_a_reference_that_rests_says_the_same(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    model, batch = load(tmp_path / "model", dtype=torch.float32), batch_of()
    here, there = FrozenModel(model, 10_000), FrozenModel(model, 10_000, compute_device=CPU)
    assert torch.equal(here.logp(batch).nan_to_num(), there.logp(batch).nan_to_num())


def test_a_reference_whose_whole_distributions_are_compared_with_does_not_rest(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    policy, batch = load(tmp_path / "model", dtype=torch.float32), batch_of()
    pack = pack_prefix_tree(batch)
    for kl, stays in (("full", True), ("reverse", False)):
        held = models.load_reference(run_of(tmp_path, kl=kl, **{"train.offload": "true"}), policy, None)
        assert torch.isfinite(held.logp(batch)[batch.action]).all()
        if stays:
            assert held.logits(held.hidden(pack)).shape == (len(pack.ids), policy.vocab_size)
        else:
            with pytest.raises(AssertionError, match="an offloaded model computes log-probs"):
                held.hidden(pack)


def test_an_engine_sleeps_while_its_trainer_works(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    found = []
    for rests in (False, True):
        with build(run_of(tmp_path, directory=tmp_path / f"run-{rests}", steps=2)) as parts:
            worker, asleep = parts.learners.crew._worker, []  # type: ignore[attr-defined]
            assert isinstance(worker, PolicyWorker)
            if rests:
                resting(worker._learner)
                parts.learners.free_engine_memory = lambda parts=parts: parts.runner.run(parts.engine.sleep())  # type: ignore[misc]
            worker._learner._backend._optimizer._adam.register_step_pre_hook(
                lambda *_, engine=parts.engine, asleep=asleep: asleep.append(engine._cache is None)  # type: ignore[misc]
            )
            run_loop(parts)
            assert asleep == [rests] * 2 and parts.engine._cache is not None
            found.append(weights(worker._learner))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_where_it_would_change_nothing_it_is_refused(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(ConfigError, match=r"`train.offload` keeps the optimizer .* computes on the CPU"):
        learner("bf16", offload=True)
    make_model(tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    assert "`train.offload` keeps" in refused_run(capsys, tmp_path, tmp_path / "run", **{"train.offload": "true"})
    assert not (tmp_path / "run").exists()
