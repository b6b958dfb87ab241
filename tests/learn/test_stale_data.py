"""Training on rollouts of older policies ends where training in turns does, for one answer and for an agent that waits.

With a large learning rate it does not: the policy moves far within a few versions, and the accuracy swings. So these
runs have a third of the learning rate of the other tests.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

import etude
from etude.agents import LLM
from etude.checkpoint import export
from etude.demo.sorting_model import warm_up
from etude.models import load
from etude.records import Task
from tests.learn import games
from tests.learn.looking import looker
from tests.learn.practice import HELD_OUT
from tests.learn.test_agents import rows
from tests.learn.test_presets import accuracy
from tests.served import joined, started

STALENESS, SEEDS = (0, 1, 4), (0, 1, 2)
STALE = {"correction.weight": "truncate"}
EMBEDDED = STALE | {"placement.layout": "split"}
WAIT = 0.1
"""The mean wait of the agent's tool in seconds: about twice the time of an answer."""

pytestmark = pytest.mark.soak


@etude.agent
async def waiting_looker(task: Task, llm: LLM) -> float:
    """Look things up with a tool that is slow."""
    await asyncio.sleep(random.expovariate(1 / WAIT))
    return float(await looker(task, llm))


def of_one_answer(directory: Path, model: Path, staleness: int, seed: int, **engine: Any) -> float:
    return mean(accuracy(directory, model, "grpo", 1e-4, steps=40, max_staleness=staleness, seed=seed, **engine))


def of_an_agent(directory: Path, model: Path, staleness: int, seed: int, **engine: Any) -> float:
    options: dict[str, Any] = {
        "model.path": model,
        "steps": 30,
        "collect.tasks": 16,
        "collect.group_size": 8,
        "sampling.max_tokens": 8,
        "data.max_prompt_length": 16,
        "train.precision": "fp32",
        "train.learning_rate": 7e-4,
        "max_staleness": staleness,
        "seed": seed,
        "threads": 1,
        "observe.console": "off",
        "observe.level": "error",
        **engine,
    }
    trainer = etude.Trainer(etude.RL("grpo", options, directory), strategy="shm", n_runners=8)
    trainer.fit(waiting_looker, rows(400, 0), rows(HELD_OUT, 1))
    last = json.loads((directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return float(last["eval/mean@1"])


def assert_equal_within_seeds(scores: dict[int, list[float]], held_out: int) -> None:
    """Assert that no bound is worse than none by more than seeds and held-out tasks explain."""
    base = scores[0]
    for staleness in STALENESS[1:]:
        spread = (stdev(base) ** 2 + stdev(scores[staleness]) ** 2) / len(base)
        of_tasks = 2 * mean(base) * (1 - mean(base)) / held_out / len(base)
        assert mean(scores[staleness]) > mean(base) - 3 * math.sqrt(spread + of_tasks), scores


def test_stale_answers_teach_as_much(warmed: Path, tmp_path: Path) -> None:
    scores = {
        eta: [of_one_answer(tmp_path / f"{eta}-{seed}", warmed, eta, seed, **EMBEDDED) for seed in SEEDS]
        for eta in STALENESS
    }
    assert_equal_within_seeds(scores, HELD_OUT)


def test_an_agent_that_waits_learns_as_much(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = games.make_speaker(tmp_path / "model")
    scores = {
        eta: [of_an_agent(tmp_path / f"{eta}-{seed}", model, eta, seed, **EMBEDDED) for seed in SEEDS]
        for eta in STALENESS
    }
    assert_equal_within_seeds(scores, HELD_OUT)


@pytest.mark.xdist_group("vllm")
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("kind", ["answer", "agent"])
def test_stale_rollouts_of_a_server_teach_as_much(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One server samples for all runs. Two seeds: on two cores a run takes some minutes.

    The head is a separate weight: a joined vLLM on a CPU does not update a tied head (tests/served.py).
    """
    tied, model, head_dim = tmp_path / "tied", tmp_path / "model", 32  # vLLM has no kernel for smaller heads
    if kind == "answer":
        warm_up(tied, 0, lambda: None, head_dim=head_dim)
        learning: dict[str, Any] = STALE
    else:  # this model is larger than that of the embedded engine, and swings with truncated ratios
        games.make_speaker(tied, head_dim=head_dim)
        learning = {"loss": "ipo", "train.learning_rate": 4e-4, "steps": 40}
    made = load(tied, dtype=torch.float32)
    export(made.untied_weights(), made.config_dict() | {"tie_word_embeddings": False}, model, tokenizer=tied)
    score = {"answer": of_one_answer, "agent": of_an_agent}[kind]
    with started("vllm", model, tmp_path, with_plugin=True) as server:
        engine = learning | {"rollout": "vllm", "rollout.weight_transport": "shm"} | joined(server, monkeypatch)
        scores = {
            eta: [score(tmp_path / f"{eta}-{seed}", model, eta, seed, **engine) for seed in SEEDS[:2]]
            for eta in STALENESS
        }
    assert_equal_within_seeds(scores, HELD_OUT)
