"""Sweeps: every combination is one job in its own directory, and nothing is left behind."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

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
    KL,
    KLS,
    LOSSES,
    PLUG_IN,
    PPO,
    Adaptive,
    Controller,
    Fixed,
    Loss,
    MyLoss,
    Reward,
    Run,
    written,
)


class Small(Config):
    """A small root for most sweeps here: Hydra loads every group of a root again for each job."""

    seed: int = Field(1, ge=0, description="What every random number derives from.")
    api_key: str | None = Field(None, description="What the endpoint asks for.")
    loss: Annotated[Loss, Choice(LOSSES)] = Field(PPO(), description="What the policy minimizes.")


class Penalised(Config):
    """A choice with a nested choice."""

    kl: Annotated[KL | None, Choice(KLS)] = Field(None, description="What keeps the policy near its reference.")


def test_a_sweep_runs_every_combination_in_its_own_directory(tmp_path: Path) -> None:
    logger, top = logging.getLogger("etude.test_sweep"), logging.getLogger()
    here, environment, logs = Path.cwd(), dict(os.environ), (list(top.handlers), top.level, logger.disabled)
    folder = tmp_path / "it's, a folder"

    def task(run: Small) -> tuple[Loss, int, list[Path]]:
        return run.loss, run.seed, list(tmp_path.rglob("*.yaml"))

    swept = ["api_key=hunter2", f"loss=choice(gspo,{PLUG_IN})", "seed=range(1,3)"]
    jobs = multirun(Small, swept, task, directory=folder)
    combinations = [(loss, seed) for loss in (GSPO(), MyLoss()) for seed in (1, 2)]
    assert [job.result for job in jobs] == [(loss, seed, []) for loss, seed in combinations]
    named = [(loss, seed) for loss in ("gspo", PLUG_IN) for seed in (1, 2)]
    assert [job.overrides for job in jobs] == [("api_key=***", f"loss={loss}", f"seed={seed}") for loss, seed in named]
    assert [job.directory for job in jobs] == [folder / str(number) for number in range(4)]
    assert all(job.directory.is_dir() for job in jobs) and {path.name for path in folder.iterdir()} == set("0123")
    assert list(tmp_path.rglob("*.yaml")) == [], "Hydra's records would hold the secret"
    assert (Path.cwd(), dict(os.environ)) == (here, environment)
    assert (list(top.handlers), top.level, logger.disabled) == logs
    assert not (here / "outputs").exists() and not (here / "multirun").exists()


def test_a_sweep_over_nested_choices_keeps_each_parents_default(tmp_path: Path) -> None:
    jobs = multirun(Penalised, ["kl=none,k1,k3"], lambda run: run.kl, directory=tmp_path)
    assert [job.result for job in jobs] == [None, K1(controller=Adaptive(target=3.0)), K3(controller=Fixed())]


@pytest.mark.parametrize("parents", ["k1", pytest.param("k1,k3", marks=pytest.mark.integration)])
def test_choices_are_swept_over_within_each_of_their_parents(parents: str, tmp_path: Path) -> None:
    swept = [f"kl={parents}", "kl.controller=fixed,adaptive"]
    jobs = multirun(Penalised, swept, lambda run: run.kl, directory=tmp_path)
    kinds = [KLS[name] for name in parents.split(",")]
    assert [job.result for job in jobs] == [
        kind(controller=controller) for kind in kinds for controller in (Fixed(), Adaptive())
    ]


def test_a_sweep_reads_a_file_and_hydras_own_settings(tmp_path: Path) -> None:
    file = written(tmp_path, "loss: {name: gspo, clip_high: 0.5}")
    overrides = ["loss=ppo,gspo", "hydra.sweeper.max_batch_size=1"]
    jobs = multirun(Small, overrides, lambda run: run.loss, file=file, directory=tmp_path / "jobs")
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
            r"kl\.controller is not an option of every job: it is missing under another choice",
        ),
        (["seed=interval(0,1)"], r"Hydra could not compose this: BasicSweeper does not support sweep type"),
        (["hydra.nothing=3"], r"Hydra could not compose this: .*nothing"),
    ],
)
def test_a_sweep_that_is_wrong_starts_no_job(tmp_path: Path, overrides: list[str], sentence: str) -> None:
    root, started = Penalised if "kl.controller=fixed" in overrides else Small, list[Config]()
    with pytest.raises(ConfigError, match=sentence):
        multirun(root, overrides, started.append, directory=tmp_path)
    assert started == []


@pytest.mark.parametrize(
    "path", ["hydra.sweep.dir", "hydra.sweep.subdir", "hydra.sweep", "hydra.run.dir", "hydra.output_subdir"]
)
def test_hydra_writes_nowhere_but_in_the_directory(tmp_path: Path, path: str) -> None:
    value = "{dir: elsewhere}" if path == "hydra.sweep" else f"'{tmp_path / 'elsewhere'}'"
    with pytest.raises(ConfigError, match=rf"^{path} would make Hydra write .* give that directory: `directory=…`"):
        multirun(Run, ["api_key=hunter2", f"{path}={value}"], lambda run: run, directory=tmp_path / "jobs")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    "overrides", [["title='x ${'"], ["stop=['x ${seed']"], ["title='a','${'"], ["limits={a: '${'}"]]
)
def test_an_invalid_reference_is_reported_by_its_key(tmp_path: Path, overrides: list[str]) -> None:
    key = overrides[0].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key} holds a \$\{{ that begins no reference\. Write \$\{{other\.key\}}"):
        multirun(Run, overrides, lambda run: run, directory=tmp_path)


def test_a_failing_job_does_not_stop_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    done: list[Loss] = []

    def task(run: Small) -> None:
        if run.seed or run.loss == PPO():
            raise RuntimeError(f"seed {run.seed}")
        done.append(run.loss)

    with pytest.raises(RuntimeError, match="seed 0") as caught:
        multirun(Small, ["loss.name=ppo,gspo", "seed=0"], task, directory=tmp_path)
    assert done == [GSPO()] and caught.value.__notes__ == ["Job 0 (loss=ppo seed=0)"]
    with pytest.raises(ExceptionGroup, match=r"2 of 2 jobs failed\."):
        multirun(Small, ["seed=1,3"], task, directory=tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_job_may_compose_and_sweep_itself(tmp_path: Path) -> None:
    def task(run: Small) -> list[int]:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(compose, Small, ["seed=9"]).result(timeout=30)
        inner = multirun(Small, ["seed=5"], lambda run: run.seed, directory=tmp_path / f"inner{run.seed}")
        return [run.seed, compose(Small, ["seed=7"]).seed, other.seed, *(job.result for job in inner)]

    jobs = multirun(Small, ["seed=1,2"], task, directory=tmp_path)
    assert [job.result for job in jobs] == [[1, 7, 9, 5], [2, 7, 9, 5]]


class Left(Config):
    """One side of the choice."""

    part: Annotated[Controller, Choice(CONTROLLERS)] = Field(Fixed(), description="A part.")


class Right(Config):
    """The other side, where the same name means another class."""

    part: Annotated[Config, Choice({"fixed": Reward})] = Field(Reward(), description="A part.")


class Sides(Config):
    """A root with a choice between the two sides."""

    side: Annotated[Config, Choice({"left": Left, "right": Right})] = Field(Left(), description="The side.")


def test_a_name_with_two_meanings_is_not_swept_over(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"side\.part: 'fixed' has different meanings under the swept choices above it"
    ):
        multirun(Sides, ["side=left,right", "side.part=fixed"], lambda run: run, directory=tmp_path)
    assert compose(Sides, ["side=right", "side.part=fixed"]) == Sides(side=Right())


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["loss=gspo", "seed=3"], marks=pytest.mark.kept),
        ["loss.name=gspo", "seed=${oc.env:HOME_OF_NOBODY,4}"],
        pytest.param([f"loss={PLUG_IN}", "loss.name=gspo"], marks=pytest.mark.integration),
        pytest.param([], marks=pytest.mark.integration),
    ],
)
def test_a_single_run_is_composed_like_a_job_of_a_sweep(overrides: list[str], tmp_path: Path) -> None:
    """A single run is composed without Hydra, and a job by Hydra, from the same nodes. Both give the same run."""
    (job,) = multirun(Run, overrides, lambda run: run, directory=tmp_path)
    assert job.run == compose(Run, overrides)
