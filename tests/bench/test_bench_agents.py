"""The comparison with Agent Lightning: its arithmetic, and Etude's side of it at a small size."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench import agents_cases
from bench.agents import AIMS, ROLLOUTS, Compared, Figure, as_tree, beside, of_compared, rate, shown, start_worker
from etude.rollout.python_environments import NAMED_ENVIRONMENTS, load_pins
from etude.store.queue.records import AttemptId


def nothing() -> None:
    """Do nothing, in place of a progress display."""


def of(strategy: str, ours: float) -> Compared:
    return Compared(strategy, [ours, 2 * ours, ours], [50.0, 50.0, 100.0], [ours] * 3)


def test_a_ratio_compares_within_a_round_and_what_misses_is_marked() -> None:
    good, bad = of("cs", 1000.0), of("shm", 200.0)
    assert good.ratio() == 20.0 and bad.ratio() == 4.0
    console = Console(file=io.StringIO(), width=160)
    console.print(beside([good, bad]))
    console.print(
        shown([*of_compared([good, bad]), Figure("calls", 25.0, "ms", 25, True), Figure("lost", 1, "", 0, True)])
    )
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().count("misses") == 3  # shm, beside and alone, and the lost count
    tree = as_tree([good, bad], [Figure("lost", 0, "", 0, True)], {"agentlightning": "0.3.0"})
    assert tree["ratios"] == {"cs_vs_agl": 20.0, "shm_vs_agl": 4.0} and set(tree["ratios"]) == set(AIMS)
    assert tree["versions"]["peers"] == {"agentlightning": "0.3.0"} and tree["cases"][-1]["met"]


def test_the_peer_is_the_one_that_is_named() -> None:
    assert "agentlightning" in NAMED_ENVIRONMENTS and "agentlightning==0.3.0" in load_pins("agentlightning").pins


@pytest.mark.parametrize("strategy", list(ROLLOUTS))
def test_etude_plays_the_requested_number_of_rollouts(strategy: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.agents_etude", strategy, str(tmp_path), "8"]
    with start_worker("etude", command, tmp_path / "worker.log") as (worker, versions):
        assert "etude" in versions and rate(worker, 40) > 0


def test_the_endpoint_answers_conversations_and_an_attempt_is_claimed_soon_after_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_cases, "ATTEMPTS", 1000)
    monkeypatch.setattr(agents_cases, "OPENED_S", 0.5)
    figures = agents_cases.endpoint(tmp_path / "endpoint", 1, nothing)
    assert figures["rate"] > 0 and figures["p99"] >= figures["p50"] > 0
    assert 0 < agents_cases.started(tmp_path / "start", 1, nothing) < 30


def test_kills_lose_nothing_and_what_is_lost_would_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = agents_cases.killed(tmp_path / "kills", 1, nothing)
    assert counts["lost"] == 0 and counts["acknowledged"] > 0
    forgetful = agents_cases.Acknowledged()
    forgetful.queued |= {1}
    forgetful.finished[AttemptId(1, 0)] = 1.0
    assert forgetful.lost({}) == 2


def test_the_cost_of_a_rollout_is_compared_over_stores_of_two_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_cases, "SMALL", 10)
    monkeypatch.setattr(agents_cases, "LARGE", 50)
    figures = agents_cases.grown(tmp_path, 1, nothing)
    assert figures["ratio"] == pytest.approx(figures["large"] / figures["small"])
