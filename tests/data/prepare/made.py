"""Raw files in the formats of published data sets, a few rows each, and helpers to check their preparations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etude.commands import PREPARATIONS
from etude.config import load_plugin
from etude.config.compose import compose
from etude.data import Dataset
from etude.data.prepare import PreparedFiles, prepare_dataset
from etude.data.prepare.base import DataSplit
from etude.records import Task
from etude.rewards import REWARDS, RewardFunction, parse_score

GSM8K = [
    {"question": "Ann has 2 apples and buys 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    {"question": "A car costs $1,000 and rises by half. What now?", "answer": "It is 1,500.\n#### 1,500"},
    {"question": "It is 3 degrees and falls by 10. What now?", "answer": "3 - 10 = -7\n#### -7"},
]
MATH = [
    {"problem": "What is $1/2+1/3$?", "level": "Level 1", "type": "Algebra", "solution": "So $\\boxed{\\frac{5}{6}}$."},
    {"problem": "Solve.", "level": "Level 5", "type": "Geometry", "solution": "First \\boxed{1}, no: \\fbox{12\\pi}."},
    {"problem": "Count.", "level": "Level ?", "type": "Counting", "solution": "It is $\\boxed 2$."},
]


def lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def run(name: str, directory: Path, *options: str) -> PreparedFiles:
    """Prepare a set into a directory, as the command line asks for it."""
    return prepare_dataset(compose(load_plugin(PREPARATIONS[name], None), [f"directory='{directory}'", *options]))


def rows(done: PreparedFiles, split: DataSplit = "train") -> list[dict[str, Any]]:
    """Return the rows of a written file."""
    return list(pq.read_table(done.files[split]).to_pylist())


def tasks(done: PreparedFiles, split: DataSplit = "train") -> list[Task]:
    """Return the tasks of a written file, as a run reads them."""
    dataset = Dataset.load(done.files[split])
    return [dataset.task(row, row) for row in range(len(dataset))]


def judge(done: PreparedFiles) -> RewardFunction:
    """Return the reward that the suggested next command names."""
    return REWARDS[done.command.rpartition("reward=")[2]]()


def earned(reward: RewardFunction, task: Task, answer: str) -> float:
    """Return the reward of an answer."""
    reward.check(task)
    return parse_score(reward(task, answer))[0]
