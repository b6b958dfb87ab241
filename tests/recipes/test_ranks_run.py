"""Whole runs of several ranks by the command: their training, their files, and their ends."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from etude.cli import main
from etude.observe import configure_logging
from etude.recipes.run.rules import checks
from etude.store import open_store
from tests.families import make_family
from tests.processes import gone
from tests.recipes.rewards import planned
from tests.recipes.run.test_loop import EVERY_STEP
from tests.recipes.runs import (
    STEPS,
    Captured,
    is_straight,
    options,
    refused,
    run_of,
    same,
    step_metrics,
    train,
    weights,
)
from tests.recipes.test_interrupt import CODE
from tests.waits import blocked_until

WITHIN = 240.0
"""Seconds in which even a busy machine starts the ranks and does what is waited for."""


def drawn(run: Path, step: int) -> list[tuple[list[int], list[float], float]]:
    """Return the answers that a step trained on, with their log-probs and rewards."""
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        states = [store.rollout(rollout) for rollout in sorted(store.admitted()[step])]
        turns = [store.turns(state.id)[0].completion for state in states]
        earned = [state.last.reward for state in states if state.last is not None and state.last.reward is not None]
    return [(t.ids.tolist(), t.logp.tolist(), r) for t, r in zip(turns, earned, strict=True)]


def furthest(one: Path, other: Path) -> float:
    """Return the largest difference between the weights of two runs."""
    theirs = weights(other)
    return max(float((weight - theirs[name]).abs().max()) for name, weight in weights(one).items())


def children(of: int | None = None) -> list[int]:
    """Return the ranks that a process has started."""
    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            ours = b"etude.dispatch.rank" in (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if ours and parent == (of or os.getpid()):
            result.append(int(entry.name))
    return sorted(result)


def steps_of(run: Path) -> int:
    """Return how many steps of a run have their line."""
    return len(step_metrics(run)) if (run / "metrics.jsonl").is_file() else 0


@contextmanager
def started(words: list[str], run: Path, steps: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in another process, and wait until so many steps of its run have their line."""
    with subprocess.Popen([sys.executable, "-c", CODE, *words]) as process:
        try:
            blocked_until(lambda: process.poll() is not None or steps_of(run) >= steps, WITHIN)
            assert process.poll() is None
            yield process
        finally:
            process.kill()


@contextmanager
def upset(number: signal.Signals, after: int, run: Path) -> Iterator[list[int]]:
    """Send a signal to a run's last rank, once a step has its line, and record the ranks."""
    noted: list[int] = []

    def wait() -> None:
        blocked_until(lambda: steps_of(run) >= after, WITHIN)
        noted.extend(children())
        os.kill(noted[-1], number)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield noted
    finally:
        thread.join()


def test_a_run_of_two_ranks_resumes_with_one(world: Path, whole: Path, tmp_path: Path, capsys: Captured) -> None:
    """It samples exactly the answers that one rank samples, learns the same, and measures the same."""
    run = tmp_path / "run"
    held = {"data__val": f"[{world / 'held_out.jsonl'}]", "evaluate__sampling__max_tokens": 6}
    train(world, run, ranks=2, steps=2, reward__path="tests.recipes.rewards:in_parts", **held)
    assert not children()
    steps = step_metrics(run)
    assert [step["step"] for step in steps] == [1, 2] and "eval/mean@1" in steps[1]
    for step in steps:
        assert step.keys() >= EVERY_STEP | {"imbalance"}, EVERY_STEP - step.keys()
        assert all(math.isfinite(step[name]) for name in EVERY_STEP)
        assert step["rollouts"] == 12 and step["trained_tokens"] == step["tokens"]
        assert step["mismatch/largest_gap"] < 1e-5 and 0 < step["device_utilization"] < 1.5
        assert step["publish_bytes"] > 0 and step["engine/finished"] == 12
    assert [(ids, logp) for ids, logp, _ in drawn(run, 1)] == [(ids, logp) for ids, logp, _ in drawn(whole, 1)]
    assert sorted(path.name for path in (run / "ranks").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert len(list(next((run / "checkpoints").glob("step-*")).glob("*.tensors"))) == 2

    straight = train(world, tmp_path / "straight", reward__path="tests.recipes.rewards:in_parts", **held)
    assert 0 < furthest(run, straight) < 1e-4
    assert main(["train", "--resume", str(run), "ranks=1", "steps=3"]) == 0
    assert [step["step"] for step in step_metrics(run)] == [1, 2, 3]
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert "does not read `ranks`" in refused(capsys, "eval", str(run), "ranks=2")


@pytest.mark.integration
def test_a_run_that_divides_experts_resumes_with_one_rank(world: Path, tmp_path: Path, capsys: Captured) -> None:
    """It trains what one rank trains, with an embedded engine on each rank."""
    mixture = tmp_path / "mixture"
    make_family(mixture / "model", "qwen3_moe")
    shutil.copy(world / "tasks.jsonl", mixture)
    alone = train(mixture, tmp_path / "alone", steps=3)
    run = train(mixture, tmp_path / "run", ranks=2, mesh__expert=2, steps=2)
    assert main(["train", "--resume", str(run), "ranks=1", "mesh.expert=1", "steps=3"]) == 0
    for step, expected in zip(step_metrics(run), step_metrics(alone), strict=True):
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
        assert step["engine/exact"] == expected["engine/exact"]
    assert furthest(run, alone) < 1e-3
    none = options(world, directory=tmp_path / "none", ranks=2, mesh__expert=2)
    assert "`mesh.expert=2` divides experts, and this qwen3 model has none" in refused(capsys, "train", *none)


@pytest.mark.smoke
def test_a_killed_run_of_split_layers_resumes_with_other_ranks(splittable: Path, tmp_path: Path) -> None:
    """It trains to its end what one rank trains: on ranks that split layers and tokens, on ranks that split only
    tokens, and on one."""
    run, alone = tmp_path / "run", train(splittable, tmp_path / "alone", steps=4)
    mesh = {"mesh__context": 2, "mesh__tensor": 2}
    words = ["train", *options(splittable, directory=run, ranks=4, steps=3, checkpoint__every=1, **mesh)]
    words.append("checkpoint.async_save=true")
    with started(words, run, 1) as process:
        ranks = children(process.pid)
    assert len(ranks) == 4 and all(gone(pid) for pid in ranks)
    assert main(["train", "--resume", str(run), "ranks=2", "mesh.tensor=1", "steps=3"]) == 0
    assert main(["train", "--resume", str(run), "ranks=1", "mesh.context=1", "steps=4"]) == 0
    steps = step_metrics(run)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and not children()
    for step, expected in zip(steps, step_metrics(alone), strict=True):
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
    assert furthest(run, alone) < 1e-3


def test_unsuitable_options_of_ranks_are_reported(world: Path, capsys: Captured) -> None:
    configure_logging("info")
    cores = os.cpu_count() or 1
    for changes, sentence in (
        ({"ranks": 4, "threads": cores}, f"`ranks=4` want {4 * cores} processors, {cores} each, and this machine has"),
        ({"ranks": 4, "collect__tasks": 3}, "A step has 3 groups, each of which one rank trains on, and there are 4"),
        ({"crew.heartbeat_timeout": 5}, "`crew` says how several ranks wait for each other, and there is one"),
    ):
        capsys.readouterr()
        checks.check_run(run_of(world, **changes))
        message = capsys.readouterr().err
        assert sentence in message
    capsys.readouterr()
    checks.check_run(run_of(world, ranks=1, threads=1))
    assert capsys.readouterr().err == ""


@pytest.mark.soak
def test_ctrl_c_ends_the_step_and_three_ranks_resume(
    world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = tmp_path / "run"
    with planned({30: signal.SIGINT}):
        assert main(["train", *options(world, directory=run, steps=4, ranks=2)]) == 130
    message = capsys.readouterr().err
    assert "Stopping after this step" in message and "Stopped after step 3 of 4" in message and not children()
    assert main(["train", "--resume", str(run), "ranks=3"]) == 0
    assert [step["step"] for step in step_metrics(run)] == [1, 2, 3, 4] and not children()
    assert furthest(run, whole) < 1e-3


@pytest.mark.soak
def test_a_second_ctrl_c_ends_every_rank_at_once(world: Path, tmp_path: Path, capsys: Captured) -> None:
    with planned({30: signal.SIGINT, 31: signal.SIGTERM}):
        assert main(["train", *options(world, directory=tmp_path / "run", steps=4, ranks=2)]) == 130
    assert "Stopped at once, in step 3" in capsys.readouterr().err and not children()


@pytest.mark.soak
@pytest.mark.parametrize("in_background", ["false", "true"])
def test_a_killed_run_of_two_ranks_equals_the_uninterrupted_one(
    in_background: str, world: Path, tmp_path: Path
) -> None:
    """The kill leaves no process behind."""
    straight = train(world, tmp_path / "straight", ranks=2, steps=6)
    run = tmp_path / "run"
    changes = {"checkpoint.every": 2, "checkpoint.async_save": in_background}
    words = ["train", *options(world, directory=run, ranks=2, steps=6, **changes)]
    for step in (1, 3):
        with started(words, run, step) as process:
            ranks = children(process.pid)
        assert len(ranks) == 2 and all(gone(pid) for pid in ranks)
    assert main(words) == 0
    assert [step["step"] for step in step_metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert same(weights(run), weights(straight))
    assert np.allclose(
        [s["loss"] for s in step_metrics(run)], [s["loss"] for s in step_metrics(straight)], rtol=0, atol=0
    )


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_run_with_a_sentence_and_the_run_can_be_resumed(
    number: signal.Signals, world: Path, paired: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = tmp_path / "run"
    words = [
        "train",
        *options(world, directory=run, ranks=2, steps=STEPS, checkpoint__every=1, **{"crew.heartbeat_timeout": 3}),
    ]
    with upset(number, 2, run) as ranks:
        message = refused(capsys, *words)
    assert message.startswith(f"Rank 1 (process {ranks[1]}) ") and "Start the run again" in message
    assert ("killed by SIGKILL" if number is signal.SIGKILL else "gave no sign of life") in message
    assert all(gone(pid, 0) for pid in ranks)
    assert main(["train", *options(world, directory=run, ranks=2, steps=STEPS)]) == 0
    is_straight(run, paired)


@pytest.mark.soak
def test_a_stopped_controller_continues_where_it_was(world: Path, tmp_path: Path) -> None:
    """It is stopped for longer than ranks may be silent. The ranks are not silent, but the controller does not hear
    them."""
    run, silence = tmp_path / "run", 3.0
    words = ["train", *options(world, directory=run, ranks=2, steps=STEPS, **{"crew.heartbeat_timeout": silence})]
    with started(words, run, 1) as process:
        process.send_signal(signal.SIGSTOP)
        done, began = steps_of(run), time.monotonic()
        straight = train(world, tmp_path / "straight", ranks=2, steps=STEPS)
        time.sleep(max(0.0, silence + 1 - (time.monotonic() - began)))
        assert steps_of(run) == done < STEPS
        process.send_signal(signal.SIGCONT)
        assert process.wait(WITHIN) == 0
    is_straight(run, straight)


@pytest.mark.soak
def test_a_run_whose_ranks_are_refused_leaves_no_directory(world: Path, tmp_path: Path, capsys: Captured) -> None:
    given = {"directory": tmp_path / "run", "ranks": 2, "sampling.max_tokens": 100_000}
    message = refused(capsys, "train", *options(world, **given))
    assert "do not fit into this model's context" in message and not (tmp_path / "run").exists()
