"""The device of a run: an existing one, or an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from etude.errors import ConfigError
from etude.integrity import read_text, write_text
from etude.models import create, save, tiny_config
from etude.recipes.run.builders.policy import load_policy
from etude.recipes.run.machine.device import check_precision
from etude.recipes.run.rules.placement import check_placement
from tests.recipes.runs import Captured, faster_in_bf16, refused, refused_run, run_of
from tests.worlds import make_tokenizer

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")


@NO_GPU
def test_without_a_gpu_the_cpu_computes(world: Path) -> None:
    assert run_of(world).compute_device() == run_of(world, device="cpu").compute_device() == torch.device("cpu")
    assert load_policy(run_of(world))[0].device == torch.device("cpu")


@NO_GPU
@pytest.mark.parametrize(("precision", "speedup", "count"), [("bf16", 0.08, 1), ("bf16", 1.5, 0), ("fp32", 0.08, 0)])
def test_a_processor_that_is_slow_in_half_precision_is_reported(
    precision: str,
    speedup: float,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with faster_in_bf16(speedup):
        check_precision(torch.device("cpu"), precision)
    assert caplog.text.count("this processor computes 0.08 times as fast as in fp32") == count
    assert caplog.text.count("Train with `train.precision=fp32`") == count


@NO_GPU
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_that_is_not_there_is_refused(ranks: int, world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", device="cuda", ranks=ranks)
    assert "torch reaches none: `etude doctor` says why" in message
    assert not (tmp_path / "run").exists()


@NO_GPU
def test_ranks_over_ray_may_have_gpus_without_one_at_the_controller(world: Path) -> None:
    """This tests the controller only; the ranks themselves have not been run on GPUs."""
    run = run_of(world, device="cuda", cluster="ray", ranks=2)
    assert run.compute_device() == torch.device("cuda")
    check_placement(run)
    judged = {"device": "cuda", "cluster": "ray", "reward": "reward_model", "reward.path": world}
    with pytest.raises(ConfigError, match=r"The reward model would compute on a GPU.*`placement\.reward=cpu`"):
        check_placement(run_of(world, **judged))
    check_placement(run_of(world, placement__reward="cpu", **judged))


@NO_GPU
def test_a_model_trained_over_ray_generates_on_this_machine(
    world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    options = run / "run.yaml"
    write_text(options, read_text(options).replace("cluster: local", "cluster: ray"))
    assert "cluster: ray" in options.read_text()
    message = refused(capsys, "eval", str(run), f"data.val=[{world / 'tasks.jsonl'}]", "device=cuda")
    assert "torch reaches none: `etude doctor` says why" in message


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that reports two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_a_process_that_computes_nothing_on_a_gpu_opens_none(
    two_gpus: None, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("this opens a context on the GPU"))
    assert run_of(world, ranks=2).compute_device() == torch.device("cuda", 0)


def test_each_rank_has_a_gpu(two_gpus: None, world: Path) -> None:
    assert (
        run_of(world, ranks=2).compute_device()
        == run_of(world, device="cuda").compute_device()
        == torch.device("cuda", 1)
    )
    assert run_of(world, device="cpu", ranks=4).compute_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match="`ranks=3` want a GPU each, and torch sees 2"):
        run_of(world, ranks=3).compute_device()


def test_an_absurd_number_of_ranks_is_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    assert "`ranks=1000` are 1000 processes" in refused_run(capsys, world, tmp_path / "run", ranks=1000, threads=1)
    assert not (tmp_path / "run").exists()


def test_a_model_that_gives_scores_is_no_policy(world: Path, tmp_path: Path, capsys: Captured) -> None:
    judge = tmp_path / "judge"
    size = make_tokenizer(judge)
    save(create(tiny_config(size, layers=1, hidden=32, heads=2, kv_heads=1), seed=3, head="score"), judge)
    message = refused_run(capsys, world, tmp_path / "run", **{"model.path": judge})
    assert "gives scores and no tokens" in message


def test_missing_reward_parts_are_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refused_run(capsys, world, tmp_path / "run", "gdpo")
    assert "Have it return {name: number}" in message
