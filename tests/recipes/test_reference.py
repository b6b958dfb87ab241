"""A run with a KL term to a reference: by default the model that it began with, at every later step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from etude.algorithms import KLS
from etude.models import create, load, save, tiny_config
from etude.recipes.run import directory as run_directory
from etude.recipes.run.builders.assemble import build
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.train import FrozenModel
from tests.recipes.runs import Captured, refused, refused_run, run_of, same, step_metrics, train, weights
from tests.recipes.workers.test_policy_worker import batch_of
from tests.worlds import make_tokenizer

HELD = {"kl": "reverse", "kl.coefficient": 0.5}
IN_TEST = ("reverse", "in_reward", "full")
"""The terms in `make test`: one for each way into a run, by the loss, by the reward, and by whole distributions. The
value of each other term is tested in `algorithms/test_kl.py`."""


@pytest.fixture(scope="module")
def other(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world's model with its weights moved."""
    place = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(world / "model", place)
    model = load(world / "model", dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)), alpha=0.05)
    save(model, place)
    return place


@pytest.fixture(scope="module")
def free(world: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Path]:
    """Return a first step without a KL term, with a reduction of the loss; None is the default."""
    of: dict[str | None, Path] = {None: whole}

    def run(reduction: str | None) -> Path:
        if reduction not in of:
            directory = tmp_path_factory.mktemp("free") / "run"
            of[reduction] = train(world, directory, steps=1, **{"loss.reduction": reduction})
        return of[reduction]

    return run


def test_the_policy_equals_its_reference_only_at_first(world: Path, tmp_path: Path) -> None:
    first, second = step_metrics(train(world, tmp_path / "run", steps=2, **HELD))
    assert first["kl"] == pytest.approx(0, abs=1e-6) and abs(second["kl"]) > 1e-5


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_TEST else pytest.mark.integration) for name in sorted(KLS)],
)
def test_every_term_changes_the_training(
    name: str, world: Path, other: Path, free: Callable[[str | None], Path], tmp_path: Path
) -> None:
    """They do in the first step already, as the reference is another model."""
    reduction = "seq-mean-token-sum" if name == "sequence" else None
    options = {"kl": name, "loss.reduction": reduction, "reference.path": other, "kl.coefficient": 0.5}
    held = weights(train(world, tmp_path / "run", steps=1, **options))
    assert not same(held, weights(free(reduction), 1))
    if name in ("reverse", "in_reward"):  # the others share the weight of the first: it is one field of their base
        less = weights(train(world, tmp_path / "less", steps=1, **options | {"kl.coefficient": 0.05}))
        assert not same(less, held) and not same(less, weights(free(reduction), 1))


def test_a_reference_has_the_weights_of_its_file(world: Path) -> None:
    batch = batch_of()
    result = FrozenModel(load(world / "model", dtype=torch.float32), 10_000).logp(batch)
    cut = FrozenModel(load(world / "model", dtype=torch.float32), 10).logp(batch)
    assert torch.equal(torch.isfinite(result), batch.action)
    assert torch.allclose(result, cut, atol=1e-6, equal_nan=True)


def test_a_resumed_run_keeps_its_first_reference(world: Path, tmp_path: Path) -> None:
    """The reference differs from the policy from the second step of a run on."""
    whole = train(world, tmp_path / "whole", steps=2, **HELD)
    half = train(world, tmp_path / "half", steps=1, **HELD)
    train(world, half, steps=2, **HELD)
    assert same(weights(whole), weights(half))


def test_another_reference_may_be_named(world: Path, other: Path, tmp_path: Path, capsys: Captured) -> None:
    mine = Path(shutil.copytree(other, tmp_path / "mine"))
    run = train(world, tmp_path / "run", steps=1, **HELD | {"reference.path": mine})
    assert abs(step_metrics(run)[0]["kl"]) > 1e-4, "the policy begins elsewhere"
    moved = mine.rename(tmp_path / "moved")
    train(world, run, steps=2, **HELD | {"reference.path": moved})
    capsys.readouterr()
    save(load(world / "model", dtype=torch.float32), moved)
    assert "was started on other files: reference" in refused(
        capsys, "train", "--resume", str(run), "steps=3", f"reference.path={moved}"
    )


def test_a_reference_of_another_vocabulary_is_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    size = make_tokenizer(tmp_path / "large", "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    save(create(tiny_config(size, layers=1, hidden=16, heads=2, kv_heads=1), seed=0), tmp_path / "large")
    message = refused_run(capsys, world, tmp_path / "run", **HELD | {"reference.path": tmp_path / "large"})
    assert f"knows {size} tokens" in message and "`reference.path` of the same tokenizer" in message
    message = refused_run(capsys, world, tmp_path / "run", **HELD | {"reference.path": tmp_path / "nowhere"})
    assert "`reference.path=" in message and "is no directory" in message


def test_no_reference_is_loaded_where_none_is_needed(world: Path, tmp_path: Path) -> None:
    with build(run_of(world, directory=tmp_path / "run")) as parts:
        worker = parts.learners.crew._worker  # type: ignore[attr-defined]
        assert isinstance(worker, PolicyWorker) and not worker._auxiliary.frozen
    assert run_directory.OPTIONS in {path.name for path in (tmp_path / "run").iterdir()}
