"""`train.precision=auto`: chosen once by a trial on a processor, written, logged and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from etude.recipes.run.directory import read_metrics, read_run
from etude.recipes.run.resume.precision import choose_precision, resolve_precision
from etude.train import measure_bf16_speedup
from etude.train.optim import PRECISIONS
from tests.recipes.runs import faster_in_bf16, run_of, train

AUTO = {"train.precision": "auto", "device": "cpu", "steps": 1}
SLOW_IN_BF16, FAST_IN_BF16 = 0.08, 2.0


def test_the_trial_of_this_processor_takes_a_moment_and_decides() -> None:
    speedup = measure_bf16_speedup()
    assert speedup > 0
    assert choose_precision(torch.device("cpu"))[0] == ("bf16" if speedup > 1 else "fp32")


@pytest.mark.parametrize(("measured", "chosen"), [(SLOW_IN_BF16, "fp32"), (FAST_IN_BF16, "bf16")])
def test_the_faster_precision_is_chosen_and_logged_for_every_trained_model(
    measured: float, chosen: str, world: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with faster_in_bf16(measured):
        run = resolve_precision(run_of(world, **AUTO, advantage="gae"))
    assert run.train.precision == run.critic.train.precision == chosen
    assert f"`train.precision={chosen}`: auto chooses it on this processor, which computes {measured:.2f} times" in (
        caplog.text
    )


def test_a_gpu_computes_in_bf16_whatever_its_processor_does(world: Path) -> None:
    with faster_in_bf16(SLOW_IN_BF16):
        assert resolve_precision(run_of(world, **AUTO), torch.device("cuda", 0)).train.precision == "bf16"


def test_a_named_precision_stays(world: Path) -> None:
    assert resolve_precision(run_of(world, **{**AUTO, "train.precision": "fp16"})).train.precision == "fp16"


def test_a_resumed_run_keeps_the_choice_where_the_trial_would_choose_otherwise(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with faster_in_bf16(SLOW_IN_BF16):
        run = train(world, tmp_path / "run", **AUTO)
    assert read_run(run).train.precision == "fp32"
    assert "`train.precision=fp32`: auto chooses it on this processor" in capsys.readouterr().err
    with faster_in_bf16(FAST_IN_BF16):
        train(world, run, **{**AUTO, "steps": 2})
        assert resolve_precision(read_run(run, ["train.precision=auto"])).train.precision == "fp32"
    assert "auto chooses it" not in capsys.readouterr().err
    assert read_run(run).train.precision == "fp32" and len(read_metrics(run)) == 2


def test_auto_is_the_default_and_every_other_value_is_a_dtype(world: Path) -> None:
    run = run_of(world, train__precision=None)
    assert run.train.precision == run.critic.train.precision == "auto"
    assert "auto" not in PRECISIONS
