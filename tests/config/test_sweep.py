"""Sweeps: every combination is one job in its own directory, and nothing is left behind."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from etude.config import Choice, Config
from etude.config.compose import compose, multirun
from etude.errors import ConfigError
from tests.config.sample_run import (
    CONTROLLERS,
    GSPO,
    K1,
    K3,
    LOSSES,
    PLUG_IN,
    PPO,
    Adaptive,
    Controller,
    Fixed,
    MyLoss,
    Reward,
    Run,
    written,
)


def test_a_sweep_runs_every_combination_in_its_own_directory(tmp_path: Path) -> None:
    here = Path.cwd()
    folder = tmp_path / "it's, a folder"
    jobs = multirun(Run, ["loss=ppo,gspo", "seed=1,2"], lambda run: (run.loss, run.seed), directory=folder)
    assert [job.result for job in jobs] == [(PPO(), 1), (PPO(), 2), (GSPO(), 1), (GSPO(), 2)]
    assert [job.overrides for job in jobs] == [(f"loss={loss}", f"seed={seed}") for loss in LOSSES for seed in (1, 2)]
    assert [job.directory for job in jobs] == [folder / str(number) for number in range(4)]
    assert all(job.directory.is_dir() for job in jobs) and {path.name for path in folder.iterdir()} == {
        "0",
        "1",
        "2",
        "3",
    }
    assert Path.cwd() == here


@pytest.mark.parametrize(
    ("overrides", "results"),
    [
        (["seed=range(1,4)"], [("ppo", 1), ("ppo", 2), ("ppo", 3)]),
        (["loss=choice(gspo,ppo)"], [("gspo", 1), ("ppo", 1)]),
        ([f"loss=gspo,{PLUG_IN}"], [("gspo", 1), ("MyLoss", 1)]),
        (["seed=3"], [("ppo", 3)]),
        (["loss.name=ppo,gspo", "seed=2"], [("ppo", 2), ("gspo", 2)]),
    ],
)
def test_the_syntax_of_sweeps(tmp_path: Path, overrides: list[str], results: list[tuple[str, int]]) -> None:
    jobs = multirun(Run, overrides, lambda run: (type(run.loss), run.seed), directory=tmp_path)
    kinds: dict[str, Any] = {**LOSSES, "MyLoss": MyLoss}
    assert [job.result for job in jobs] == [(kinds[name], seed) for name, seed in results]


def test_a_sweep_over_nested_choices_keeps_each_parents_default(tmp_path: Path) -> None:
    jobs = multirun(Run, ["kl=none,k1,k3"], lambda run: run.kl, directory=tmp_path)
    assert [job.result for job in jobs] == [None, K1(controller=Adaptive(target=3.0)), K3(controller=Fixed())]
    jobs = multirun(Run, ["kl=k1,k3", "kl.controller=fixed,adaptive"], lambda run: run.kl, directory=tmp_path)
    assert [job.result for job in jobs] == [
        *(K1(controller=Fixed()), K1(controller=Adaptive()), K3(controller=Fixed()), K3(controller=Adaptive()))
    ]


def test_a_sweep_reads_a_file_and_hydras_own_settings(tmp_path: Path) -> None:
    file = written(tmp_path, "loss: {name: gspo, clip_high: 0.5}")
    overrides = ["loss=ppo,gspo", "hydra.sweeper.max_batch_size=1"]
    jobs = multirun(Run, overrides, lambda run: run.loss, file=file, directory=tmp_path / "jobs")
    assert [job.result for job in jobs] == [PPO(), GSPO(clip_high=0.5)]
    assert [job.directory.name for job in jobs] == ["0", "1"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["seed=1,x"], r"^Job 1 \(seed=x\): seed expects a whole number; 'x' was given"),
        (["seed=x,y"], r"(?s)There are 2 problems\.\n- Job 0 \(seed=x\): .*\n- Job 1 \(seed=y\): "),
        (["loss=ppo,gsppo"], r"loss: there is no 'gsppo'"),
        (["loss=glob(*)"], r"loss: glob\(\*\) does not name the choices one by one\. The choices are ppo, gspo"),
        (
            ["kl=none,k3", "kl.controller=fixed"],
            r"kl\.controller is not an option of every job: another choice takes it away",
        ),
        (["seed=interval(0,1)"], r"Hydra could not compose this: BasicSweeper does not support sweep type"),
        (["hydra.nothing=3"], r"Hydra could not compose this: .*nothing"),
    ],
)
def test_a_sweep_that_is_wrong_starts_no_job(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    started: list[int] = []
    with pytest.raises(ConfigError, match=sentence):
        multirun(Run, overrides, lambda run: started.append(run.seed), directory=tmp_path)
    assert started == []


@pytest.mark.parametrize(
    "path", ["hydra.sweep.dir", "hydra.sweep.subdir", "hydra.sweep", "hydra.run.dir", "hydra.output_subdir"]
)
def test_hydra_writes_nowhere_but_in_the_directory(tmp_path: Path, path: str) -> None:
    value = "{dir: elsewhere}" if path == "hydra.sweep" else f"'{tmp_path / 'elsewhere'}'"
    with pytest.raises(ConfigError, match=rf"^{path} would have Hydra write .* give that directory: `directory=…`"):
        multirun(Run, ["api_key=hunter2", f"{path}={value}"], lambda run: run, directory=tmp_path / "jobs")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    "overrides", [["title='x ${'"], ["stop=['x ${seed']"], ["title='a','${'"], ["limits={a: '${'}"]]
)
def test_a_reference_that_is_not_one_is_told_by_its_key(tmp_path: Path, overrides: list[str]) -> None:
    key = overrides[0].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key} holds a \$\{{ that begins no reference\. Write \$\{{other\.key\}}"):
        multirun(Run, overrides, lambda run: run, directory=tmp_path)


def test_a_failing_job_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done: list[int] = []

    def task(run: Run) -> None:
        if run.seed % 2:
            raise RuntimeError(f"seed {run.seed}")
        done.append(run.seed)

    with pytest.raises(RuntimeError, match="seed 1") as caught:
        multirun(Run, ["seed=1,2,4"], task, directory=tmp_path)
    assert done == [2, 4] and caught.value.__notes__ == ["Job 0 (seed=1)"]
    with pytest.raises(ExceptionGroup, match=r"2 of 3 jobs failed\."):
        multirun(Run, ["seed=1,2,3"], task, directory=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_sweep_writes_no_secret_and_leaves_logging_alone(tmp_path: Path) -> None:
    logger = logging.getLogger("etude.test_sweep")
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    jobs = multirun(
        Run, ["api_key=hunter2", "seed=1,2"], lambda run: list(tmp_path.rglob("*.yaml")), directory=tmp_path
    )
    assert [job.result for job in jobs] == [[], []] and jobs[0].overrides == ("api_key=***", "seed=1")
    assert list(tmp_path.rglob("*.yaml")) == []
    assert (logging.getLogger().handlers, logging.getLogger().level, logger.disabled) == (handlers, level, False)
    assert not (Path.cwd() / "outputs").exists() and not (Path.cwd() / "multirun").exists()


def test_a_job_may_compose_and_sweep_itself(tmp_path: Path) -> None:
    def task(run: Run) -> list[int]:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(compose, Run, ["seed=9"]).result(timeout=30)
        inner = multirun(Run, ["seed=5,6"], lambda run: run.seed, directory=tmp_path / f"inner{run.seed}")
        return [run.seed, compose(Run, ["seed=7"]).seed, other.seed, *(job.result for job in inner)]

    jobs = multirun(Run, ["seed=1,2"], task, directory=tmp_path)
    assert [job.result for job in jobs] == [[1, 7, 9, 5, 6], [2, 7, 9, 5, 6]]


class Left(Config):
    """One side."""

    part: Annotated[Controller, Choice(CONTROLLERS)] = Field(Fixed(), description="A part.")


class Right(Config):
    """The other side, where the same name means another class."""

    part: Annotated[Config, Choice({"fixed": Reward})] = Field(Reward(), description="A part.")


class Sides(Config):
    """Chooses a side."""

    side: Annotated[Config, Choice({"left": Left, "right": Right})] = Field(Left(), description="The side.")


def test_one_name_with_two_meanings_is_not_swept_over_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"side\.part: 'fixed' means different things under the choices above it"):
        multirun(Sides, ["side=left,right", "side.part=fixed"], lambda run: run, directory=tmp_path)
    assert compose(Sides, ["side=right", "side.part=fixed"]) == Sides(side=Right())


def test_the_environment_of_the_process_is_untouched(tmp_path: Path) -> None:
    before = dict(os.environ)
    multirun(Run, ["seed=1,2"], lambda run: run.seed, directory=tmp_path)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss=gspo", "seed=3"],
        [f"loss={PLUG_IN}", "loss.name=gspo"],
        ["loss.name=gspo"],
        ["seed=${oc.env:HOME_OF_NOBODY,4}"],
        [],
    ],
)
def test_one_run_is_composed_as_a_job_of_a_sweep_is(overrides: list[str], tmp_path: Path) -> None:
    """A single run is put together without Hydra, and a job by Hydra: of the same nodes, to the same run."""
    (job,) = multirun(Run, overrides, lambda run: run, directory=tmp_path)
    assert job.run == compose(Run, overrides)
