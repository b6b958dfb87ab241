"""Self-play: the policy answers for every player of a game, each in a conversation of its own, and one is trained."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.agents.agent import LLM, RolloutInfo
from etude.agents.environment_agent import EnvironmentAgent
from etude.chat import ChatRenderer, Tokenizer
from etude.envs import Observation
from etude.errors import AgentError
from etude.records import Message, Outcome, Task
from etude.store import open_store
from tests.learn.games import make_tokenizer as make_speaking
from tests.recipes.collect.test_episodes import CALL, MORE, PARTNERS, Speaker, make_task, play
from tests.recipes.runs import same, step_metrics, train, weights
from tests.worlds import make_tokenizer


class Rounds:
    """A game of two: player 0 begins, and each sees the last character of the other's answer."""

    def __init__(self, moves: int = 4, pays: str = "at the end") -> None:
        self.moves = moves
        self.pays = pays

    def reset(self, task: Task) -> Observation:
        """Begin; the model is player 0 in every second task."""
        self.seat = task["row"] % 2
        self.moved = 0
        self.digits = 0
        return Observation(f"{self.seat}:", role=self.seat, opponent=None if self.seat == 0 else 0)

    def step(self, answer: Message) -> Observation:
        """Let the other player move. The model earns its digits, less those of the other."""
        text = str(answer.content)
        own = self.moved % 2 == self.seat
        self.digits += sum(letter.isdigit() for letter in text) * (1 if own else -1)
        self.moved += 1
        player = self.moved % 2
        ended = self.moved == self.moves
        return Observation(
            f"{text[-1:]}+" if self.moved > 1 else f"{self.seat}-",
            reward=self.digits if self.pays == "always" or (ended and self.pays == "at the end") else None,
            done=ended,
            opponent=None if player == self.seat else player,
        )


class Talks(Rounds):
    """The same game as a conversation."""

    def reset(self, task: Task) -> Observation:
        """Begin with a message."""
        first = super().reset(task)
        return replace(first, content=[{"role": "user", "content": first.content}])


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    directory = tmp_path_factory.mktemp("plain")
    make_tokenizer(directory)
    return ChatRenderer(Tokenizer.load(directory))


GAME = f"{__name__}:Rounds"


def count(prompt: str, number: int) -> str:
    """Answer with the number of this answer."""
    return str(number)


@pytest.mark.parametrize(
    ("row", "prompts"),
    [(0, ["0:", "0-", "0:1<end>2+", "0-2<end>3+"]), (1, ["1:", "1-", "1:1<end>2+", "1-2<end>3+"])],
)
def test_one_player_is_trained_and_the_other_is_answered_for(chat: ChatRenderer, row: int, prompts: list[str]) -> None:
    """Each has its own conversation, of exact tokens, and each answer a seed of its own. prompts: of both in turn."""
    seen: list[str] = []

    def answer(prompt: str, number: int) -> str:
        seen.append(prompt)
        return count(prompt, number)

    engine = Speaker(chat, answer)
    played = play(chat, engine, make_task(row=row), path=GAME)
    trained = [chat.tokenizer.decode(turn.prompt, keep_special_tokens=True) for turn in played.turns]
    assert played.succeeded and not played.truncated and played.role == row
    assert seen == prompts and trained == prompts[row::2]
    assert [turn.index for turn in played.turns] == [0, 1] and len(played.times) == 2
    assert [turn.reward for turn in played.turns] == [None, 0.0]
    assert [params.seed for params in engine.asked] == [100, 101, 102, 103]


def test_a_limit_of_answers_is_that_of_each_player(chat: ChatRenderer) -> None:
    played = play(chat, count, make_task(row=1), path=GAME, max_turns=1)
    assert played.truncated and len(played.turns) == 1 and played.finish == "max_turns"


def test_a_reward_after_another_players_answer_is_added_to_that_of_the_turn(chat: ChatRenderer) -> None:
    played = play(chat, count, make_task(row=0), path=GAME, kwargs={"pays": "always"})  # 1, 0, 1, 0 after each answer
    assert [turn.reward for turn in played.turns] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"pays": "always"}, "gave a reward in the turn of player 0, and the trained player had not answered yet"),
        ({"pays": "never", "moves": 1}, "ended in a turn of another player, and the trained player had not answered"),
    ],
)
def test_a_game_that_ends_before_the_trained_player_answers_has_failed(
    chat: ChatRenderer, given: dict[str, Any], sentence: str
) -> None:
    played = play(chat, count, make_task(row=1), path=GAME, kwargs=given)
    assert played.verdict.outcome is Outcome.FAILED and sentence in played.verdict.error


def test_the_result_of_a_call_goes_to_the_player_that_made_it(tmp_path: Path) -> None:
    chat = ChatRenderer(make_speaking(tmp_path, MORE))
    seen: list[str] = []

    def answer(prompt: str, number: int) -> str:
        seen.append(prompt)
        return CALL if number == 1 else count(prompt, number)

    task = make_task(row=1, prompt="?")
    tools = [f"{PARTNERS}:add"]
    played = play(chat, answer, task, path=f"{__name__}:Talks", tools=tools, longest=900, tokens=90)
    assert played.succeeded and played.calls == 1
    assert seen[1].startswith(seen[0]) and "<tool>5<end>" in seen[1], "the other player reads what its call gave"
    assert not any("<tool>" in prompt for prompt in seen[2::2]), seen


def test_an_agent_refuses_the_turn_of_another_player() -> None:
    agent = EnvironmentAgent(Rounds)
    with pytest.raises(AgentError, match="Rounds leaves a turn of another player to the policy"):
        asyncio.run(
            agent.run(make_task(row=1), LLM("http://127.0.0.1:1/v1", "key", "policy"), RolloutInfo(0, 0, "train"))
        )


@pytest.mark.slow
def test_a_policy_learns_every_seat_and_a_run_is_the_same_again(world: Path, tmp_path: Path) -> None:
    options = {"env.path": GAME, "reward": "environment", "reward.path": None, "advantage": "rae", "collect.tasks": 4}
    once, again = (train(world, tmp_path / name, **options) for name in ("once", "again"))
    assert same(weights(once), weights(again))
    with closing(open_store(once / "journal.sqlite", read_only=True)) as store:
        rollouts = [store.rollout(id) for ids in store.admitted().values() for id in ids]
        roles = {rollout.last.role for rollout in rollouts if rollout.last is not None}
        assert roles == {0, 1} and all(len(store.turns(rollout.id)) == 2 for rollout in rollouts)
    assert not any(step["failed_attempts"] for step in step_metrics(once))
