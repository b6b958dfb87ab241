"""Offload: tensors move as on a GPU, but from CPU memory to CPU memory.

These tests do not show that a GPU's memory is freed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from etude.algorithms import AlgorithmConfig
from etude.checkpoint import CheckpointManager, flat
from etude.data.pack import pack_prefix_tree
from etude.errors import ConfigError
from etude.models import load
from etude.recipes.run.builders import auxiliary_models as models
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.rollout import TorchEngine
from etude.train import FrozenModel, Learner
from etude.train.memory import OffloadedTensors, move_tensors
from tests.recipes.runs import Captured, refused_run, run_of
from tests.recipes.workers.test_policy_worker import batch_of
from tests.train.tasks import Improve, learner, ready, rollouts, weights
from tests.worlds import make_model, make_tasks

CPU = torch.device("cpu")


def with_offload(trainer: Learner) -> Learner:
    """Return the learner with its optimizer offloaded, as a learner on a GPU is built."""
    trainer._offloaded = OffloadedTensors(trainer._backend.optimizer.offloadable_tensors(), CPU, CPU)
    return trainer


def test_moved_tensors_stay_the_same_objects() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    addresses, values = [t.data_ptr() for t in tensors], [t.detach().clone() for t in tensors]
    move_tensors(tensors, CPU)
    assert not set(addresses) & {t.data_ptr() for t in tensors}
    assert all(map(torch.equal, tensors, values)) and tensors[1].requires_grad and tensors[1].is_leaf


def test_tensors_are_loaded_within_nested_contexts() -> None:
    tensor = torch.ones(3)
    offloaded = OffloadedTensors([tensor], CPU, CPU)
    offload_address = tensor.data_ptr()
    with pytest.raises(RuntimeError, match="halfway"), offloaded.loaded():
        compute_address = tensor.data_ptr()
        with offloaded.loaded():
            assert tensor.data_ptr() == compute_address != offload_address
        assert tensor.data_ptr() == compute_address, "the outer context is still open"
        raise RuntimeError("halfway")
    assert tensor.data_ptr() != compute_address


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_updates_with_offload_are_the_same_bit_for_bit(precision: str, tmp_path: Path) -> None:
    plain, offloaded = learner(precision), with_offload(learner(precision))
    tensors = offloaded._backend.optimizer.offloadable_tensors()
    elements = sum(weight.numel() for weight in plain.model.parameters())
    assert sum(t.numel() for t in tensors) == elements * (3 if precision == "bf16" else 2), (
        "the weights of forward passes stay"
    )
    algorithm = AlgorithmConfig()
    batch = ready(plain, algorithm, rollouts())
    for trainer in (plain, offloaded):
        trainer.update(batch, Improve(algorithm))
        with trainer.working():
            addresses = [t.data_ptr() for t in tensors]
            trainer.update(batch, Improve(algorithm))
            assert addresses == [t.data_ptr() for t in tensors], "several updates load it once"
    assert addresses != [t.data_ptr() for t in tensors]
    weights_offloaded, weights_plain = weights(offloaded), weights(plain)
    assert all(torch.equal(weights_offloaded[name], weights_plain[name]) for name in weights_plain)
    checkpoints = CheckpointManager(tmp_path)
    saved = checkpoints.save(1, offloaded.state(), {})
    resumed = with_offload(learner(precision, seed=5))
    state = resumed.state()
    checkpoints.load(saved, state)
    resumed.restore(state)
    for trainer in (plain, resumed):
        trainer.update(batch, Improve(algorithm))
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(resumed).items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_offloaded_learner_restores_the_state_of_another(precision: str) -> None:
    other, offloaded = learner(precision), with_offload(learner(precision, seed=5))
    algorithm = AlgorithmConfig()
    batch = ready(other, algorithm, rollouts())
    other.update(batch, Improve(algorithm))
    offloaded.restore(other.state())
    for _ in range(2):
        state, expected = flat(offloaded.state()), flat(other.state())
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert all(torch.equal(weight, weights(other)[name]) for name, weight in weights(offloaded).items())
        for trainer in (other, offloaded):
            trainer.update(batch, Improve(algorithm))


def test_an_offloaded_reference_computes_the_same(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    model, batch = load(tmp_path / "model", dtype=torch.float32), batch_of()
    loaded, offloaded = FrozenModel(model, 10_000), FrozenModel(model, 10_000, compute_device=CPU)
    assert torch.equal(loaded.logp(batch).nan_to_num(), offloaded.logp(batch).nan_to_num())


def test_a_reference_for_whole_distributions_is_not_offloaded(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    policy, batch = load(tmp_path / "model", dtype=torch.float32), batch_of()
    pack = pack_prefix_tree(batch)
    for kl, is_loaded in (("full", True), ("reverse", False)):
        reference = models.AuxiliaryLoader(run_of(tmp_path, kl=kl, **{"train.offload": "true"}), policy).load_reference(
            None
        )
        assert torch.isfinite(reference.logp(batch)[batch.action]).all()
        if is_loaded:
            assert reference.logits(reference.hidden(pack)).shape == (len(pack.ids), policy.vocab_size)
        else:
            with pytest.raises(AssertionError, match="an offloaded model computes log-probs"):
                reference.hidden(pack)


def test_an_engine_sleeps_during_updates(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    results = []
    for offloads in (False, True):
        with build(run_of(tmp_path, directory=tmp_path / f"run-{offloads}", steps=2)) as run:
            worker = run.learners.crew._worker  # type: ignore[attr-defined]
            asleep = list[bool]()
            assert isinstance(worker, PolicyWorker)
            if offloads:
                with_offload(worker._learner)
                run.learners.free_engine_memory = lambda run=run: run.loop.run(run.engine.sleep())  # type: ignore[misc]
            worker._learner._backend.optimizer._adam.register_step_pre_hook(
                lambda *_, engine=run.engine, asleep=asleep: asleep.append(engine._steps.cache is None)  # type: ignore[misc]
            )
            run_loop(run)
            assert isinstance(run.engine, TorchEngine)
            assert asleep == [offloads] * 2 and run.engine._steps.cache is not None
            results.append(weights(worker._learner))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_offload_on_a_cpu_is_refused(tmp_path: Path, capsys: Captured) -> None:
    with pytest.raises(ConfigError, match=r"`train.offload` keeps the optimizer .* computes on the CPU"):
        learner("bf16", offload=True)
    with pytest.raises(ConfigError, match=r"`train.activation_checkpointing=offload` keeps .* computes on the CPU"):
        learner("bf16", activation_checkpointing="offload")
    make_model(tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    assert "`train.offload` keeps" in refused_run(capsys, tmp_path, tmp_path / "run", **{"train.offload": "true"})
    assert not (tmp_path / "run").exists()


def test_memory_that_left_a_gpu_is_returned_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[str] = []
    module = sys.modules[OffloadedTensors.__module__]
    monkeypatch.setattr(module, "move_tensors", lambda _, to: moves.append(str(to)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: moves.append("returned"))
    offloaded = OffloadedTensors([], torch.device("cuda"), CPU)
    with offloaded.loaded(), offloaded.loaded():
        pass
    assert moves == ["cpu", "cuda", "cpu", "returned"]
