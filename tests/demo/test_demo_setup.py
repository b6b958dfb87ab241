"""The setup that the training demonstrations share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from etude.cli import main
from etude.demo.demo_setup import warm_up


def test_a_run_that_cannot_work_is_refused_before_the_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "max_staleness=1", f"directory={tmp_path / 'run'}"]) == 2
    assert "`placement.layout=split`" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_finished_model_is_reused_and_an_unfinished_one_is_created_again(tmp_path: Path) -> None:
    made: list[int] = []

    def make(place: Path, seed: int, _: Callable[[], None], *, head_dim: int) -> None:
        if seed == 13:
            raise KeyboardInterrupt
        made.append(seed * head_dim)
        (tmp_path / "model").write_text(str(seed))
        assert place == tmp_path / "model"

    def warmed(seed: int, steps: int = 1, head_dim: int = 1) -> None:
        warm_up(tmp_path, "warming up", steps, seed, make, Console(quiet=True), head_dim=head_dim)

    warmed(0)
    warmed(0)
    assert made == [0]
    warmed(1)
    warmed(1, steps=2)
    assert made == [0, 1, 1], "another seed, and other steps, are another model"
    with pytest.raises(KeyboardInterrupt):
        warmed(13)
    warmed(1, steps=2)
    warmed(1, steps=2, head_dim=2)
    assert made == [0, 1, 1, 1, 2], "what was made was given up for one that never was done"
