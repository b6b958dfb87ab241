"""The comparison with TRL: its arithmetic, and Etude's side of it at a tiny size."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.grpo_vs_trl import (
    CASES,
    LIMITS,
    WARMING,
    Case,
    Timed,
    as_tree,
    learned,
    shown,
    started,
    where,
)
from bench.grpo_worker import earned
from bench.rollout import MODELS
from bench.words import write_model, write_tasks
from etude.rollout.python_environments import NAMED_ENVIRONMENTS

TINY = Case("tiny", "tiny", prompt=5, new=4, groups=2, group_size=4)


def timed() -> Timed:
    result = Timed(TINY, 1_000_000)
    result.seconds |= {"etude": [1.0, 2.0, 1.0], "trl": [2.0, 8.0, 3.0]}
    result.rewards |= {"etude": [0.5] * 6, "trl": [0.25] * 6}
    result.phases = [{"time/collect": 0.75, "time/update": 0.25}] * 3
    result.rates = [8e9, 4e9, 8e9]
    return result


def test_a_ratio_compares_within_a_round_and_a_ceiling_counts_a_prompt_once() -> None:
    assert timed().ratio() == 3.0
    assert TINY.operations(1_000_000, 4) == 8 * 1e6 * (8 * 4 + 2 * 5)
    assert timed().ceiling("etude") == pytest.approx(TINY.operations(1_000_000, 4) / 8e9)
    assert timed().spent() == {"collect": 0.75, "update": 0.25}


def test_a_missed_limit_is_marked_and_the_rewards_are_reported() -> None:
    console = Console(file=io.StringIO(), width=160)
    console.print(shown([timed()]))
    slow = timed()
    slow.seconds["trl"] = slow.seconds["etude"]
    console.print(shown([Timed(CASES[0], 1, slow.seconds, slow.rewards, slow.phases, slow.rates)]))
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert output.count("misses") == 1
    assert where(timed()) == "Where Etude's time goes in tiny: collect 75%, update 25%."
    assert "etude from 0.500 to 0.500, trl from 0.250" in learned(timed())
    assert as_tree([timed()], {"trl": {"trl": "1"}})["limits"] == LIMITS


def test_both_get_the_same_tasks_and_rewards() -> None:
    assert earned("a1 b2 a3 a5") == 0.75 and earned("") == 0
    assert set(LIMITS) <= {case.name for case in CASES} and "trl" in NAMED_ENVIRONMENTS and WARMING > 0


def test_etude_makes_a_step_for_each_request(tmp_path: Path) -> None:
    assert write_model(tmp_path / "tiny", MODELS["tiny"]) > 0
    write_tasks(tmp_path / "tiny.jsonl", 64, TINY.prompt, 6)
    assert len(json.loads((tmp_path / "tiny.jsonl").read_text().splitlines()[0])["prompt"].split()) == 5
    console = Console(file=io.StringIO(), width=160)
    with started(TINY, {"etude": Path(sys.executable)}, {}, tmp_path, console) as (workers, versions):
        assert "torch" in versions["etude"]
        for _ in range(2):
            workers["etude"].tell("step")
            result = workers["etude"].hear()
            assert result["seconds"] > 0 and 0 <= result["reward"] <= 1
            assert sum(result["phases"].values()) <= result["seconds"]
