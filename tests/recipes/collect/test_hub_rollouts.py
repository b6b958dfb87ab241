"""Rollouts in the environments of hubs: what a failure of an environment or of its process is as an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.agents.hubs.pool import HubPool
from etude.chat import ChatRenderer
from etude.errors import EnvError
from etude.recipes.collect.environment import EnvConfig, Environment
from etude.recipes.collect.episodes import EpisodePlayer
from etude.recipes.collect.player import EnginePlayer
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Outcome, SamplingParams, Task
from etude.rewards import EnvironmentReward, Judge
from tests.agents.hubs.test_pool import ODD
from tests.learn.games import make_tokenizer
from tests.recipes.collect.test_episodes import MORE, Speaker

ENV = EnvConfig(hub=f"trl:{ODD}", timeout=0.5, max_turns=3)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer(make_tokenizer(tmp_path_factory.mktemp("spoken"), MORE))


@pytest.fixture(scope="module")
def pool() -> Iterator[HubPool]:
    spec = Environment(ENV).hub_spec()
    assert spec is not None
    with HubPool(spec, 1) as pool:
        yield pool


def play(chat: ChatRenderer, pool: HubPool, *answers: str, **fields: Any) -> PlayedRollout:
    """Play one attempt, with these answers."""
    engine = Speaker(chat, lambda prompt, number: answers[number - 1])
    task = Task(3, {"prompt": [{"role": "user", "content": "ab"}], "row": 0, **fields})

    async def run_play() -> PlayedRollout:
        with Judge(EnvironmentReward()) as judge:
            episodes = EpisodePlayer(Environment(ENV), chat, 400, pool)
            player = EnginePlayer(
                render=chat.render_prompt,
                engine=engine,
                judge=judge,
                timeout=5.0,
                max_concurrency=8,
                episodes=episodes,
            )
            return await player.play(task, SamplingParams(max_tokens=90), lambda turn: 100 + turn)

    return asyncio.run(run_play())


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_rollout_has_exact_turns_and_the_environments_reward(chat: ChatRenderer, pool: HubPool) -> None:
    played = play(chat, pool, call("add", '{"number": 4}'), "g", seed=3)
    first, second = played.turns
    assert chat.tokenizer.decode(first.prompt, keep_special_tokens=True).endswith("ab=3<end><model>")
    assert second.prompt[: len(first.prompt) + len(first.completion.ids)].tolist() == [
        *first.prompt.tolist(),
        *first.completion.ids.tolist(),
    ]
    assert second.reward == pytest.approx(0.7) and played.calls == 1 and not played.truncated


@pytest.mark.parametrize(
    ("name", "outcome", "sentence"),
    [
        ("hang", Outcome.TIMED_OUT, "took longer than `env.timeout` = 0.5 seconds for `step` on task 3."),
        ("die", Outcome.INFRA_ERROR, "ended (exit code 7)"),
    ],
)
def test_what_a_failure_is(chat: ChatRenderer, pool: HubPool, name: str, outcome: Outcome, sentence: str) -> None:
    played = play(chat, pool, call(name), seed=3)
    assert played.verdict.outcome is outcome and sentence in played.verdict.error
    assert play(chat, pool, "g").succeeded, "another guest plays on"


def test_an_environment_that_raises_fails_its_rollout(chat: ChatRenderer, pool: HubPool) -> None:
    played = play(chat, pool, "g", seed="x")
    assert played.verdict.outcome is Outcome.FAILED
    assert f"The environment trl:{ODD} failed on" in played.verdict.error
    assert "`reset` failed: TypeError: unsupported operand" in played.verdict.error
    assert "(odd_env.py, line " in played.verdict.error


def test_a_task_that_is_no_json_fails_its_rollout(chat: ChatRenderer, pool: HubPool) -> None:
    played = play(chat, pool, "g", seed=Path("x"))
    assert played.verdict.outcome is Outcome.FAILED and "a value that is no JSON" in played.verdict.error


@pytest.mark.slow
def test_guests_that_all_end_unused_end_the_run(chat: ChatRenderer, tmp_path: Path) -> None:
    """The first one is ready, and ends. No later one begins."""
    (tmp_path / "own.py").write_text(
        "import os, pathlib, threading\nmark = pathlib.Path(__file__).with_name('mark')\n"
        "class Own:\n    def __init__(self):\n        if mark.exists(): os._exit(4)\n"
        "    def reset(self, **row):\n        mark.touch(); os._exit(4)\n"
    )
    spec = Environment(EnvConfig(hub=f"trl:{tmp_path / 'own.py'}:Own")).hub_spec()
    assert spec is not None
    with HubPool(spec, 1) as pool:
        assert play(chat, pool, "g").verdict.outcome is Outcome.INFRA_ERROR
        with pytest.raises(EnvError, match="3 guests ended one after the other without an answer"):
            play(chat, pool, "g")
