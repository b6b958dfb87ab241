"""An agent that calls the endpoint with OpenAI's client is trained, in this process or in others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import etude
from tests.learn import games
from tests.learn.looking import looker

HELD_OUT, STEPS = 100, 10


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Write tasks: a key, its value, and the table in which it can be looked up."""
    lookups: list[Any] = games.lookups(count, seed)
    return [
        {"key": lookup["prompt"][0]["content"], "answer": lookup["answer"], "table": lookup["table"]}
        for lookup in lookups
    ]


def trained(directory: Path, strategy: Any) -> list[dict[str, Any]]:
    """Return the metrics of each step of a short run."""
    options = {
        "model.path": directory / "model",
        "steps": STEPS,
        "collect.tasks": 16,
        "collect.group_size": 8,
        "sampling.max_tokens": 8,
        "data.max_prompt_length": 16,
        "train.precision": "fp32",
        "train.learning_rate": 2e-3,
        "threads": 1,
        "observe.console": "off",
        "observe.level": "error",
    }
    algorithm = etude.RL("grpo", options, directory / strategy)
    etude.Trainer(algorithm, strategy=strategy, n_runners=2).fit(looker, rows(400, 0), rows(HELD_OUT, 1))
    lines = (directory / strategy / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that looks things up sometimes."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("agents")
    games.make_speaker(directory / "model")
    return directory


@pytest.mark.parametrize("strategy", [pytest.param("shm", marks=pytest.mark.soak), "cs"])
def test_an_agent_learns_to_look_things_up(strategy: str, speaker: Path) -> None:
    steps = trained(speaker, strategy)
    first, last = steps[0], steps[-1]
    score = "eval/mean@1"
    chance = (first[score] * (1 - first[score]) / HELD_OUT) ** 0.5
    assert last[score] > first[score] + 5 * chance, f"{first[score]:.2f} became {last[score]:.2f}"
    assert last["turns"] > 1.2 * steps[1]["turns"], "it asks more often than it did"
    started, continued = last["endpoint/turns_begun"], last["endpoint/turns_continued"]
    assert started + continued == last["endpoint/turns"] and continued > 100, "every turn but the first goes on exactly"
    assert last["agents/branches"] == 1 and last["failed_attempts"] == 0
