"""Whole runs with agents: credit, metrics of lost rollouts, options, and exact resumption."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import threading
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.data.samples import build_samples
from etude.errors import CollectionError
from etude.recipes.collect import agent_runners as agents
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.store import Journal, Phase, Status, open_store
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.queue.keys import Keyring
from tests.recipes import players
from tests.recipes.players import TALKS
from tests.recipes.runs import Captured, refused_run, rows_of, run_of, same, step_metrics, train, weights


def journal(run: Path) -> Journal:
    return open_store(run / "journal.sqlite", read_only=True)


def first_moment(world: Path, talked: Path, directory: Path, **options: Any) -> Tensor:
    """Return AdamW's first moment after one step, with the rollouts of the earlier run."""
    directory.mkdir(parents=True)
    shutil.copy(talked / "journal.sqlite", directory)
    players.PLAYED.clear()
    with build(run_of(world, directory=directory, **TALKS | options)) as parts:
        run_loop(parts)
        tensors = parts.learners.crew.call(PolicyWorker.tensors)["exp_avg"]
        assert not players.PLAYED, "the rollouts are read from the journal"
        return torch.cat([value.flatten() for value in tensors.values()])


# -- credit -----------------------------------------------------------------------------------------------------------

CREDIT: dict[str, dict[str, Any]] = {
    "for the whole rollout": {},
    "the final reward to all turns": {"advantage": "step_rewards", "advantage.how": "final_to_all"},
    "what is still to come": {"advantage": "step_rewards"},
    "discounted": {"advantage": "step_rewards", "advantage.gamma": 0.5},
    "against others' turns": {"advantage": "step_rewards", "advantage.baseline": "group", "advantage.gamma": 0.5},
    "the turn baseline": {"advantage": "turn_baseline"},
    "the biased one": {"advantage": "turn_baseline_biased"},
    "by states": {"advantage": "gigpo"},
    "turns beside the outcome": {"advantage": "mt_grpo"},
    "named parts": {"advantage": "gdpo"},
    "planner alone": {"agent.tags": "[planner]"},
    "solver alone": {"agent.tags": "[solver]"},
    "turns as units": {"loss.reduction": "seq-mean-token-mean", "loss.unit": "turn"},
    "rollouts as units": {"loss.reduction": "seq-mean-token-mean"},
}


def test_every_option_of_credit_changes_the_gradient(world: Path, talked: Path, tmp_path: Path) -> None:
    result = {
        name: first_moment(world, talked, tmp_path / str(place), **options)
        for place, (name, options) in enumerate(CREDIT.items())
    }
    assert all(float(value.norm()) > 0 for value in result.values())
    for one, other in combinations(result, 2):
        distance = float((result[one] - result[other]).norm())
        assert distance > 1e-4 * float(result[one].norm()), f"{one} and {other} have the same gradient"


def test_each_action_token_is_trained_on_once_and_turns_without_a_tag_are_context(talked: Path) -> None:
    with closing(journal(talked)) as store:
        for id in (id for ids in store.admitted().values() for id in ids):
            turns = store.turns(id)
            assert [turn.tags for turn in turns] == [("planner",), ("solver",), ("solver",)]
            rows = build_samples(turns, id)
            assert len(rows) == 2, "the third turn starts a new row"
            answer_ids = [turn.completion.ids for turn in turns]
            assert np.array_equal(np.concatenate([row.ids[row.action] for row in rows]), np.concatenate(answer_ids))
            assert {turn.anchor is not None for turn in turns} == {True}
            planner_row, *others = build_samples(turns, id, ("planner",))
            assert not others and np.array_equal(planner_row.ids[planner_row.action], answer_ids[0])
            solver_rows = build_samples(turns, id, ("solver",))
            assert sum(int(row.action.sum()) for row in solver_rows) == len(answer_ids[1]) + len(answer_ids[2])
            rewards = [
                sum(0.0 if row.reward is None else row.reward.sum() for row in tensors)
                for tensors in (rows, solver_rows)
            ]
            assert rewards[0] == pytest.approx(sum(turn.reward or 0.0 for turn in turns))
            assert rewards[1] == pytest.approx(turns[1].reward or 0.0), (
                "a reward before the first action trains nothing"
            )


def test_states_with_the_same_name_are_the_same(talked: Path) -> None:
    with closing(journal(talked)) as store:
        result = [store.turns(id) for id in store.admitted()[1]]
    assert len({turns[0].anchor for turns in result}) == len({turns[1].anchor for turns in result}) == 1
    assert len({turns[2].anchor for turns in result}) > 1


def test_branches_are_separate_rows(world: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", **TALKS | {"agent.path": f"{players.__name__}:forker"})
    (step,) = step_metrics(run)
    assert step["agents/branches"] == 3 and step["turns"] == 3 and step["agents/tokens_reused"] == 0
    with closing(journal(run)) as store:
        answer_ids = sum(len(turn.completion.ids) for id in store.admitted()[1] for turn in store.turns(id))
    assert step["action_tokens"] == answer_ids, "each token once"


def test_agents_play_while_the_policy_trains(world: Path, tmp_path: Path) -> None:
    """Evaluations come between the queued rollouts of later steps, and no rollout is too old."""
    changes = {"max_staleness": 1, "placement.layout": "split", "correction.weight": "truncate", "steps": 4}
    changes |= {"data.val": f"[{world / 'held_out.jsonl'}]", "evaluate.every": 2}
    run = train(world, tmp_path / "run", **TALKS | changes)
    steps = step_metrics(run)
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and "eval/mean@1" in steps[1]
    assert max(step["staleness/max"] for step in steps) == 1
    with closing(journal(run)) as store:
        admitted = [id for ids in store.admitted().values() for id in ids]
        assert len(set(admitted)) == len(admitted) == 4 * 16
        assert all(state.phase in (Phase.ADMITTED, Phase.DROPPED) for state in store.rollouts())


# -- lost rollouts ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lost(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step with one group, whose rollouts are lost in every possible way."""
    directory, port = tmp_path_factory.mktemp("lost") / "run", free_port()

    async def cancel(rollout: int) -> None:
        queue = RemoteRolloutQueue(f"http://127.0.0.1:{port}", Keyring.load_or_create(directory).admin)
        await queue.cancel([rollout], "enough")
        await queue.close()

    players.cancel[:] = [cancel]
    options = {"agent.path": f"{players.__name__}:loser", "collect.tasks": 1, "collect.group_size": 8}
    return train(world, directory, **TALKS | options | {"agent.timeout": 2, "agent.listen": f"127.0.0.1:{port}"})


LOST = {
    "agents/succeeded": 5,  # 2, 3, 4, 5, 7
    "agents/failed": 3,  # 0 twice, 5 once
    "agents/timed_out": 2,  # 1 twice
    "agents/unresponsive": 0,
    "agents/cancelled": 1,  # 6
    "agents/infra_error": 1,  # 5 once
    "agents/retried": 4,  # 0, 1, 5 twice
    "agents/empty": 3,  # 0, 1, 2
    "agents/no_reward": 1,  # 3
    "agents/over_long": 1,  # 4
    "failed_attempts": 4,  # 0, 1, 3, 6
    "failed_attempts/failed": 2,
    "failed_attempts/timed_out": 1,
    "failed_attempts/cancelled": 1,
    "rollouts": 4,  # 2, 4, 5, 7
}


def test_every_kind_of_lost_rollout_is_counted(lost: Path) -> None:
    (step,) = step_metrics(lost)
    assert {name: step[name] for name in LOST} == LOST
    assert step["agents/turns"] == pytest.approx(5 / 8) and step["agents/branches"] == pytest.approx(5 / 8)
    assert step["endpoint/context_length"] == 1 and step["endpoint/latency_p99"] > 0


def test_every_metric_of_agents_is_explained(lost: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference/metrics.md").read_text(encoding="utf-8")
    metrics = {name for name in step_metrics(lost)[0] if name.startswith("agents/")}
    assert set(re.findall(r"`(agents/\w+)`", page)) == metrics


# -- options ----------------------------------------------------------------------------------------------------------


def test_every_option_of_agents_is_tested() -> None:
    assert AgentConfig.model_fields.keys() == {
        *("path", "strategy", "runners", "max_concurrency", "timeout", "heartbeat_timeout", "runner_timeout"),
        *("failed_reward", "tags", "parameters", "max_calls", "listen"),
        *("external", "store"),  # in test_external.py and test_remote_store.py
        "strict",  # in tests/agents/proxy/test_ignored.py
        "image_hosts",  # in tests/agents/proxy/test_images.py
        "sources",  # in tests/agents/test_source_agents.py and tests/recipes/test_mixes.py
    }


def test_a_reward_beside_an_agent_that_gives_its_own_is_warned_about(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    chosen = {"reward": "function", "reward.path": "tests.recipes.rewards:digits", "steps": 2}
    for name, change, count in (
        ("own", chosen, 1),
        ("none", chosen | {"agent.path": f"{players.__name__}:quiet"}, 0),
        ("default", {"reward": "exact_match"}, 0),
    ):
        train(world, tmp_path / name, **TALKS | change)
        log = " ".join(capsys.readouterr().err.split())
        warned = log.count("rewards:digits) has no effect so far: the agent itself gave a reward to each of the 16")
        assert warned == log.count("has no effect") == count, name


def test_the_agents_sampling_parameters_are_used_if_allowed(world: Path, tmp_path: Path) -> None:
    """The agent sets a seed, so that all answers to a prompt are the same. The run allows this only by an option."""
    for parameters in ("force", "default"):
        options = {"agent.path": f"{players.__name__}:seeded", "agent.parameters": parameters}
        run = train(world, tmp_path / parameters, **TALKS | options)
        answers = {text for (text,) in answers_of(run).values()}
        assert (len(answers) <= 4) == (parameters == "default"), "one answer for each of the 4 tasks"


@pytest.mark.slow
def test_an_agent_learns_with_answers_of_a_form(world: Path, tmp_path: Path) -> None:
    """The trainer knows the tokens that could be drawn, so its ratios are 1; it has no grammar itself."""
    options = {"agent.path": f"{players.__name__}:chooser", "steps": 12, "train.learning_rate": 0.02}
    run = train(world, tmp_path / "run", **TALKS | options)
    steps = step_metrics(run)
    assert {answer for answers in answers_of(run).values() for answer in answers} <= {"red", "blue", "black"}
    assert max(step["mismatch/k3"] for step in steps) < 1e-9
    assert all(step["support/bound_share"] == 1 for step in steps)
    assert steps[0]["reward"] < 0.7 and steps[-1]["reward"] == 1

    half = train(world, tmp_path / "half", **TALKS | options | {"steps": 1})
    train(world, half, **TALKS | options | {"steps": 2})
    assert step_metrics(half)[1]["grad_norm"] == steps[1]["grad_norm"], "a resumed run has the same bits"
    assert answers_of(half).items() <= answers_of(run).items()
    with closing(journal(half)) as store:
        grammars = {turn.grammar for state in store.rollouts() for turn in store.turns(state.id)}
    assert len(grammars) == 1 and None not in grammars


def test_failures_have_the_configured_reward_also_after_a_resume(world: Path, tmp_path: Path) -> None:
    """A failed attempt counts with `agent.failed_reward`, not with the reward that it had before it failed."""
    fails = {"agent.path": f"{players.__name__}:late_failure", "collect.retries": 0, "steps": 1}
    dropped = step_metrics(train(world, tmp_path / "dropped", **TALKS | fails))[0]
    assert dropped["rollouts"] == 8 and dropped["failed_attempts"] == 8
    scored = TALKS | fails | {"agent.failed_reward": -1.0}
    run = run_of(world, directory=tmp_path / "scored", **scored)
    with build(run) as parts:
        parts.begin()
        before = parts.source.next(1)
    with build(run) as parts:
        after = parts.source.next(1)
    assert after.replayed and before.rollouts == after.rollouts and len(before.rollouts) == 16
    assert {rollout.reward for rollout in before.rollouts if rollout.id % 2} == {-1.0}
    assert all(row.reward is None for row in rows_of(before) if row.rollout % 2)
    assert [row.ids.tolist() for row in rows_of(before)] == [row.ids.tolist() for row in rows_of(after)]


def test_runners_and_their_concurrency(world: Path, tmp_path: Path) -> None:
    counts = {}
    for runners, concurrency in ((1, 1), (2, 3)):
        players.most[0] = 0
        run = train(
            world, tmp_path / str(runners), **TALKS | {"agent.runners": runners, "agent.max_concurrency": concurrency}
        )
        with closing(journal(run)) as store:
            names = {state.last.runner for state in store.rollouts() if state.last is not None}
        counts[runners] = len(names), players.most[0]
    assert counts[1] == (1, 1) and counts[2][0] == 2 and 1 < counts[2][1] <= 6


def test_the_number_of_concurrent_calls_is_limited(world: Path, talked: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", **TALKS | {"agent.max_calls": 1})
    alone, concurrency = step_metrics(run)[0], step_metrics(talked)[0]
    assert alone["engine/new_tokens"] == pytest.approx(concurrency["engine/new_tokens"], rel=0.5)
    assert alone["engine/new_tokens_per_step"] < 0.75 * concurrency["engine/new_tokens_per_step"]
    assert answers_of(run) == {id: texts for id, texts in answers_of(talked).items() if id in answers_of(run)}, (
        "the answers are the same"
    )


def test_the_wait_for_a_missing_runner_is_bounded(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "POLL_INTERVAL_S", 0.2)
    run = run_of(world, directory=tmp_path / "run", **TALKS | {"agent.runners": 0, "agent.runner_timeout": 1})
    with build(run) as parts, pytest.raises(CollectionError, match="16 rollouts wait for one"):
        run_loop(parts)


def test_a_silent_runner_loses_its_rollouts(world: Path, tmp_path: Path) -> None:
    """The runner joined from another process, with the run's address and key, and then sent nothing."""
    directory, port = tmp_path / "run", free_port()

    async def claim() -> None:
        queue = RemoteRolloutQueue(f"http://127.0.0.1:{port}", (directory / "runner.key").read_text(), patience_s=10)
        while not over.is_set():
            await queue.claim("ghost", 16, 0.2)
        await queue.close()

    over = threading.Event()
    ghost = threading.Thread(target=lambda: asyncio.run(claim()), daemon=True)
    options = {
        "agent.runners": 0,
        "agent.heartbeat_timeout": 1,
        "agent.listen": f"127.0.0.1:{port}",
        "collect.retries": 0,
    }
    with build(run_of(world, directory=directory, **TALKS | options | {"collect.tasks": 1})) as parts:
        ghost.start()
        with pytest.raises(CollectionError, match="Its runner 'ghost' sent nothing for 1 s"):
            run_loop(parts)
        over.set()
        ghost.join()


def test_options_without_an_agent_and_unsupported_options_are_refused(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    message = refused_run(capsys, world, tmp_path / "run", **{"agent.tags": "[a]"})
    assert "`agent` has options, and names no agent" in message
    for option in ({"collect.timeout": 5.0}, {"data.overlong": "truncate"}):
        message = refused_run(capsys, world, tmp_path / "run", **TALKS | option)
        assert "does nothing where an agent plays" in message
    message = refused_run(capsys, world, tmp_path / "run", **TALKS | {"advantage": "remax"})
    assert "greedy answer" in message


def test_a_step_without_a_model_call_trains_nothing_and_is_reported(
    world: Path, tmp_path: Path, capsys: Captured
) -> None:
    run = train(world, tmp_path / "run", **TALKS | {"agent.path": f"{players.__name__}:silent"})
    assert "None of the 16 rollouts of this step called the model" in capsys.readouterr().err
    (step,) = step_metrics(run)
    assert step["agents/empty"] == step["rollouts"] == 16 and step["action_tokens"] == 0 and step["grad_norm"] == 0


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_resumed_run_equals_an_uninterrupted_one(world: Path, talked: Path, tmp_path: Path) -> None:
    half = train(world, tmp_path / "half", **TALKS)
    train(world, half, **TALKS | {"steps": 2, "agent.timeout": 500})
    assert same(weights(half), weights(talked)) and answers_of(half) == answers_of(talked)


def test_rollouts_that_a_stop_interrupted_wait_for_their_weights(world: Path, talked: Path, tmp_path: Path) -> None:
    """The second step is cut off while some of its rollouts are queued, one runs, and some have ended.

    There is no checkpoint after the first step.
    """
    directory = tmp_path / "run"
    shutil.copytree(talked, directory)
    shutil.rmtree(directory / "checkpoints")
    (directory / "metrics.jsonl").unlink()
    (directory / "journal.sqlite").unlink()
    with closing(journal(talked)) as full_journal, closing(open_store(directory / "journal.sqlite")) as store:
        second = full_journal.admitted()[2]
        num_ended = 0
        for _, event in full_journal.read():
            if getattr(event, "kind", "") == "rollouts_admitted" and getattr(event, "step", 0) == 2:
                break
            rollout = getattr(event, "rollout", None)
            if rollout in second and event.kind != "rollout_queued":
                place = second.index(rollout)
                if place > 6 or (place == 6 and event.kind in ("attempt_rewarded", "attempt_ended", "rollout_sealed")):
                    continue
                num_ended += event.kind == "attempt_ended"
            store.append([event])
        assert num_ended == 6 and store.rollout(second[6]).status is Status.RUNNING
        assert store.rollout(second[7]).status is Status.QUEUED
    players.PLAYED.clear()
    train(world, directory, **TALKS | {"steps": 2, "agent.heartbeat_timeout": 30})
    assert sorted(players.PLAYED) == [(second[6], 1), *((id, 0) for id in second[7:])]
    assert answers_of(directory) == answers_of(talked) and same(weights(directory), weights(talked))
    with closing(journal(directory)) as store:
        versions = {int(v) for id in second for turn in store.turns(id) for v in turn.completion.version}
    assert versions == {1}


def test_an_interrupted_evaluation_is_resumed(world: Path, tmp_path: Path) -> None:
    """It resumes with the same answers, and does not sample them again. With other options it starts again."""
    scored = TALKS | {"data.val": f"[{world / 'held_out.jsonl'}]", "evaluate.samples": 2, "steps": 0}
    run = run_of(world, directory=tmp_path / "run", **scored | {"steps": 1})
    with build(run) as parts:
        parts.publish(0)
        evaluator = parts.evaluate.evaluator
        assert evaluator is not None
        first = evaluator.answer_all(step=0)
        players.PLAYED.clear()
        assert evaluator.answer_all(step=0) == first and not players.PLAYED, (
            "as after a kill before the scores are saved"
        )
        later = evaluator.answer_all(step=1)
        assert [answer.text for answer in later] == [answer.text for answer in first], (
            "the same weights give the same answers"
        )
    other = run_of(world, directory=tmp_path / "run", **scored | {"steps": 1, "evaluate.samples": 3})
    with build(other) as parts:
        parts.publish(0)
        assert parts.evaluate.evaluator is not None
        assert len(parts.evaluate.evaluator.answer_all(step=0)) == 15


# -- helpers ----------------------------------------------------------------------------------------------------------


def answers_of(run: Path) -> dict[int, list[str]]:
    """Return the answers of each rollout that was trained on."""
    with closing(journal(run)) as store:
        ids = [id for admitted in store.admitted().values() for id in admitted]
        return {id: [turn.completion.text for turn in store.turns(id)] for id in ids}


def free_port() -> int:
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return int(result.getsockname()[1])
