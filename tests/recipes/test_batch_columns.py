"""A number of the data reaches the loss of a plug-in: each token has the one of its own rollout's task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from etude.algorithms import (
    Advantage,
    AdvantageEstimate,
    AlgorithmConfig,
    AlgorithmState,
    Denominators,
    Outputs,
    PolicyLoss,
    View,
)
from etude.batch import Batch
from etude.data import Dataset
from etude.data.batch_columns import check_numbers
from etude.data.pack import pack_prefix_tree
from etude.dispatch import LocalCrew
from etude.errors import ConfigError, DataError
from etude.observe import Metrics
from etude.recipes.collect.rollouts import StepGroups
from etude.recipes.run.rules.checks import check_run
from etude.recipes.run.steps.components import Learners
from etude.store import Journal, open_store
from etude.tools.plan.dry_run import worst_case_batch
from etude.tools.replay.command import replay
from etude.tools.replay.options import read_options
from etude.train.micro_batches import iterate_micro_batches
from tests.dispatch.workers import Reader
from tests.recipes.collect.commits import record_commits
from tests.recipes.collect.test_sources import TASKS, Scripted, sourced
from tests.recipes.players import TALKS
from tests.recipes.runs import refused_run, run_of, step_metrics, train
from tests.recipes.test_replays import admitted, killed

COLUMNS = {"difficulty": "answer"}
"""The answers of the tasks are numbers, written as text, each another one."""


class Weighted(PolicyLoss):
    """−A·d·log π, with the difficulty d of the task."""

    uses_old_logp = False

    def required_columns(self) -> frozenset[str]:
        """Return the columns that it reads, with its own."""
        return super().required_columns() | {"difficulty"}

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        """Return the loss of each action token."""
        return -view.column("advantage") * view.column("difficulty") * view.logp, Metrics()


class Graded(Advantage):
    """The difficulty of the task, as if it were the advantage."""

    def required_columns(self) -> frozenset[str]:
        """Return the columns that it reads, with its own."""
        return frozenset({"difficulty"})

    def __call__(self, view: View, state: AlgorithmState) -> AdvantageEstimate:
        """Return one number for each action token."""
        return AdvantageEstimate(view.column("difficulty"))


def batch_of(groups: StepGroups) -> Batch:
    """Return the batch that a step trains on."""
    return Learners(LocalCrew(Reader()), frozenset(), 1, "rollout").annotate(groups.scored, 0)


def answers(store: Journal) -> dict[int, float]:
    """Return the answer of each task that was issued, by its ordinal."""
    return {task.id: float(task.fields["answer"]) for task in store.tasks()}


def assert_of_own_task(batch: Batch, answer_of: Mapping[int, float]) -> None:
    """Check that each action token of each rollout has the number of the rollout's task."""
    assert batch.rollout_id is not None
    view = View(batch)
    rollouts = batch.rollout_id[view.rollouts.segment_ids]
    tasks = (rollouts // 3).tolist()  # a group has three rollouts
    assert tasks and view.column("difficulty").tolist() == [answer_of[task] for task in tasks]


def test_each_token_has_the_number_of_its_task_after_packing_and_a_replay() -> None:
    with closing(open_store()) as store:
        with sourced(Scripted(), store, batch_columns=COLUMNS) as source:
            first = batch_of(source.next(1))
            second = batch_of(source.next(2))
        answer_of = answers(store)
        assert len(set(answer_of.values())) == 4
        with sourced(Scripted(), store, batch_columns=COLUMNS) as source:
            replayed = source.next(1)
            assert replayed.replayed
            again = batch_of(replayed)
    for batch in (first, second, again):
        assert_of_own_task(batch, answer_of)
        for part in batch.split(2):
            micros = [micro for micro, _ in iterate_micro_batches(part, 12, "rollout", torch.device("cpu"))]
            assert len(micros) > 1 and sum(micro.num_rollouts for micro in micros) == part.num_rollouts
            for micro in micros:
                pack_prefix_tree(micro)
                assert_of_own_task(micro, answer_of)
    assert again.require("difficulty").tolist() == first.require("difficulty").tolist()


def test_a_rollout_that_a_stop_left_open_brings_its_number() -> None:
    """It was scored before the stop, and no step had admitted it: its task is read from the journal."""
    with closing(open_store()) as store:
        writes = record_commits(store)
        with sourced(Scripted(), store, batch_columns=COLUMNS) as source:
            source.next(1)
        answer_of = answers(store)
    resumed = Scripted()
    with (
        closing(killed(writes[: admitted(writes, 1) - 1])) as store,
        sourced(resumed, store, batch_columns=COLUMNS) as source,
    ):
        batch = batch_of(source.next(1))
    assert not resumed.asked, "all rollouts are of the first process"
    assert_of_own_task(batch, answer_of)


def test_the_gradient_is_weighted_by_the_column() -> None:
    algorithm = AlgorithmConfig(loss=Weighted(), advantage=Graded())
    with closing(open_store()) as store, sourced(Scripted(), store, batch_columns=COLUMNS) as source:
        batch = batch_of(source.next(1))
    state = AlgorithmState()
    batch = algorithm.estimate(batch, state).batch
    logp = batch.require("behavior_logp").clone().requires_grad_()
    whole = Denominators.from_view(View(batch))
    for part in batch.split(2):
        tokens = torch.isin(batch.rollout_id.repeat_interleave(batch.rollout_token_offsets.diff()), part.rollout_id)
        algorithm.compute_loss(part, Outputs(logp=logp[tokens]), whole, state).loss.backward()
    difficulty = View(batch).column("difficulty")
    assert logp.grad is not None and difficulty.unique().numel() == 2
    torch.testing.assert_close(logp.grad[batch.action], -difficulty.square() / len(difficulty))
    assert not logp.grad[~batch.action].any()


# -- whole runs -------------------------------------------------------------------------------------------------------


def leveled(path: Path, *levels: Any) -> str:
    """Write tasks with these levels in turn, within another column, and return the option that reads them."""
    rows = [task | {"extra_info": {"level": levels[row % len(levels)]}} for row, task in enumerate(TASKS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"[{path}]"


OWN = {"loss": f"{__name__}:Weighted", "data.batch_columns.difficulty": "extra_info.level"}
"""The options that a run trains with the loss above with."""


@pytest.mark.slow
@pytest.mark.parametrize("by_agent", [False, True])
def test_a_run_trains_by_the_column(by_agent: bool, world: Path, tmp_path: Path) -> None:
    base = {**(TALKS if by_agent else {}), **OWN, "steps": 1, "train.max_grad_norm": 1e9}
    norms = [0.0] if by_agent else []
    for level in (1, 2.0) if by_agent else (0, 1, 2.0):
        options = base | {"data.train": leveled(tmp_path / f"{level}.jsonl", level)}
        directory = train(world, tmp_path / f"run-{level}", **options)
        norms.append(step_metrics(directory)[0]["grad_norm"])
    assert norms[0] == 0 and norms[1] > 0
    assert norms[2] == pytest.approx(2 * norms[1], rel=1e-5)


@pytest.mark.slow
def test_a_step_is_replayed_with_its_column_and_with_another(world: Path, tmp_path: Path) -> None:
    tasks = leveled(tmp_path / "tasks.jsonl", 1, 2, 5)
    own = train(world, tmp_path / "own", **OWN, **{"data.train": tasks, "mini_batches": 2})
    assert replay(read_options(own, []), 2, silent=True)["exact"] is True
    plain = train(world, tmp_path / "plain", **{"data.train": tasks})
    weighted = [f"{name}={value}" for name, value in OWN.items()]
    changed = replay(read_options(plain, weighted), 2, silent=True)
    assert changed["exact"] is True and changed["difference"]
    missing = [*weighted[:-1], "data.batch_columns.difficulty=hardness"]
    with pytest.raises(DataError, match=r"Task \d+ has no column `hardness`"):
        replay(read_options(plain, missing), 2, silent=True)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": OWN["loss"]}, r"needs the column `difficulty`.*`data\.batch_columns\.difficulty=COLUMN`"),
        ({"advantage": f"{__name__}:Graded"}, r"needs the column `difficulty`.*`data\.batch_columns\.difficulty"),
        ({"data.batch_columns.difficulty": "level"}, "neither the loss nor the advantage reads"),
        (OWN | {"data.batch_columns.reward": "level"}, "a column of the batch `reward`, and the batch has its own"),
        (OWN | {"data.batch_columns.unit": "level"}, "a column of the batch `unit`, and the batch has its own"),
        (OWN | {"data.batch_columns._level": "level"}, "begins with a letter"),
        (OWN | {"data.batch_columns.difficulty": "row"}, "reads the field `row`, which Etude gives each task itself"),
    ],
)
def test_columns_that_do_not_fit_are_refused(options: dict[str, Any], message: str, world: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(run_of(world, **options))


def test_columns_that_fit_are_accepted(world: Path) -> None:
    check_run(run_of(world, **OWN))
    check_run(run_of(world, **OWN | {"loss": "ppo", "advantage": f"{__name__}:Graded"}))


def test_a_plan_has_the_column_too(world: Path) -> None:
    """Its dry run makes an update by the same loss."""
    batch = worst_case_batch(run_of(world, **OWN), (2, 3))
    assert len(View(batch).column("difficulty")) == 3 * batch.num_rollouts


@pytest.mark.parametrize("value", [None, True, "hard", "nan", [1], {"a": 1}, float("inf"), 10**400])
def test_data_without_a_finite_number_is_refused(value: Any) -> None:
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "level": "2.5"}, {"prompt": "c", "level": value}]
    with pytest.raises(DataError, match=r"row 2 has .* in the column `level`.*needs a finite number"):
        check_numbers(Dataset.load(rows), {"difficulty": "level"})
    check_numbers(Dataset.load(rows[:2]), {"difficulty": "level"})


def test_data_without_the_column_is_refused_before_a_run_begins(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **OWN)
    assert "row 0 has no column `extra_info.level`" in message and "`data.batch_columns.difficulty=" in message
