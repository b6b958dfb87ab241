"""The comparison of engines at a tiny size: Etude beside transformers, each in its own process, and the arithmetic."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.common import matrix_rate
from bench.rollout import CASES, LIMITS, PEERS, Case, Timed, as_tree, main, run, shown
from bench.workers import Worker
from etude.rollout.python_environments import NAMED_ENVIRONMENTS

TINY = Case("tiny", "tiny", prompt=12, new=5, share=4, requests=8)


def timed() -> Timed:
    """Four rounds of a million parameters: 40 new tokens, 24 distinct prompt tokens."""
    seconds = {"etude": [1.0, 2.0, 1.0, 4.0], "vllm": [1.5, 4.0, 2.0, 5.0]}
    return Timed(TINY, 1_000_000, seconds, [128e6, 64e6, 256e6, 64e6])


def test_a_ratio_compares_within_a_round() -> None:
    assert timed().ratios() == {"tiny_vs_vllm": (1.5 + 2.0) / 2}


def test_speed_counts_new_tokens_only() -> None:
    assert TINY.new_tokens == 40
    assert timed().speed("etude") == (20 + 40) / 2
    assert timed().speed("vllm") == pytest.approx((10 + 20) / 2)


def test_the_ceiling_counts_a_shared_prompt_once() -> None:
    assert TINY.least_tokens == 40 + 2 * 12
    assert timed().ceiling("etude") == (0.5 + 1.0) / 2  # 128 million operations; 1, 1, 0.5, 0.5 of what was possible


def test_each_round_asks_something_new_and_shares_as_it_says() -> None:
    first, second = TINY.prompts(0), TINY.prompts(1)
    assert first == TINY.prompts(0) and first != second
    assert [len(prompt) for prompt in first] == [12] * 8
    assert first[0] == first[3] != first[4] == first[7]
    assert all(0 <= token < 64 for prompt in first for token in prompt)


def test_limits_and_peers_are_of_what_is_timed() -> None:
    names = {f"{case.name}_vs_{peer}" for case in CASES for peer in PEERS}
    assert set(LIMITS) <= names and set(PEERS.values()) <= set(NAMED_ENVIRONMENTS)


def test_a_matrix_product_has_a_rate() -> None:
    assert matrix_rate() > 0


def test_engines_run_side_by_side() -> None:
    """transformers is in the environment of the tests too, so no environment is built."""
    console = Console(file=io.StringIO(), width=120)
    pythons = {"etude": Path(sys.executable), "generate": Path(sys.executable)}
    (times,), versions = run([TINY], pythons, 2, console)
    assert {engine: len(seconds) for engine, seconds in times.seconds.items()} == {"etude": 2, "generate": 2}
    assert len(times.rates) == 2 and times.ratio("generate") > 0
    assert versions["generate"]["transformers"] and versions["etude"]["torch"]

    tree = as_tree([times], versions)
    assert tree["ratios"] == {"tiny_vs_generate": times.ratio("generate")}
    assert list(tree["versions"]["peers"]) == ["generate"] and tree["machine"]["threads"] >= 1
    (case,) = tree["cases"]
    assert case["case"]["share"] == 4 and case["tokens_per_second"]["etude"] == times.speed("etude")

    console.print(shown([times]))
    assert isinstance(console.file, io.StringIO)
    assert "generate" in console.file.getvalue() and "misses" not in console.file.getvalue()


def test_a_ratio_under_its_limit_is_marked() -> None:
    slow = Timed(CASES[0], 1, {"etude": [1.0], "vllm": [1.2]}, [1.0])
    fast = Timed(CASES[0], 1, {"etude": [1.0], "vllm": [1.3]}, [1.0])
    for result, word in ((slow, True), (fast, False)):
        console = Console(file=io.StringIO(), width=120)
        console.print(shown([result]))
        assert isinstance(console.file, io.StringIO)
        assert ("misses" in console.file.getvalue()) == word


def test_an_engine_that_fails_is_quoted_and_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.rollout_worker", "generate", str(tmp_path / "absent"), "float32"]
    worker = Worker("generate", command, tmp_path / "log")
    try:
        with pytest.raises(RuntimeError, match="generate ended") as caught:
            worker.hear()
    finally:
        worker.close()
    assert "absent" in str(caught.value)
    with pytest.raises(ProcessLookupError):
        os.killpg(worker.process.pid, 0)


def test_a_case_or_peer_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--peers", "no-peer"])
    assert "invalid choice: 'no-peer'" in capsys.readouterr().err
