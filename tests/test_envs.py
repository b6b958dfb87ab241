"""Environments in a few lines: text games, and functions that share the state of a rollout."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from etude.envs import Env, Observation, TextEnv, ToolEnv
from etude.recipes.collect.environment import EnvConfig
from etude.records import Message, Task, ToolCall


class Dice(TextEnv):
    """Guess the number that was thrown."""

    def begin(self) -> str:
        self.thrown = self.rng.randint(1, 6)
        return "Guess."

    def play(self, answer: str) -> str | Observation:
        return Observation(done=True, reward=1.0) if answer == str(self.thrown) else "No."


def answer_of(text: str, *calls: tuple[str, str]) -> Message:
    """Return an answer with calls."""
    tool_calls = tuple(ToolCall(f"c{place}", name, arguments) for place, (name, arguments) in enumerate(calls))
    return Message("assistant", text, tool_calls=tool_calls)


def test_a_game_of_text() -> None:
    game: Env = Dice()
    assert game.reset(Task(3, {})) == Observation("Guess.")
    assert game.step(answer_of("7")) == Observation("No.")
    assert isinstance(game, Dice) and game.step(answer_of(str(game.thrown))) == Observation(done=True, reward=1.0)


def test_its_random_numbers_follow_from_the_task() -> None:
    def thrown(*tasks: Task) -> list[int]:
        games = [Dice() for _ in tasks]
        for game, task in zip(games, tasks, strict=True):
            game.reset(task)
        return [game.thrown for game in games]

    assert len(set(thrown(*[Task(3, {"a": 1, "b": [2]})] * 8))) == 1
    assert len(set(thrown(*[Task(ordinal, {}) for ordinal in range(50)]))) == 6
    assert len(set(thrown(*[Task(0, {"seed": seed}) for seed in range(50)]))) == 6
    assert len(set(thrown(*[Task(0, {}, f"source {n}") for n in range(50)]))) == 6


class Silent(TextEnv):
    """An environment without a first message."""

    def play(self, answer: str) -> Observation:
        return Observation(done=True, reward={"length": len(answer)})


def test_a_game_may_begin_with_the_tasks_own_prompt() -> None:
    assert Silent().reset(Task(0, {})) == Observation("")
    assert Silent().step(answer_of("four")).reward == {"length": 4}


class Shop(ToolEnv):
    """Methods that share a purse."""

    def __init__(self, money: int = 10) -> None:
        super().__init__([self.buy])
        self.money, self.bought = money, list[str]()

    def buy(self, thing: str, price: int) -> str:
        """Buy something."""
        if price > self.money:
            raise ValueError("not enough money")
        self.money -= price
        self.bought.append(thing)
        return f"{self.money} left"

    def final(self, answer: Message) -> Observation:
        return Observation(done=True, reward=float(len(self.bought)))


def contents(observation: Observation) -> list[str]:
    return [str(message.content) for message in observation.content if isinstance(message, Message)]


def test_methods_are_tools_and_share_their_state() -> None:
    shop = Shop()
    first = shop.reset(Task(0, {}))
    assert [tool["function"]["name"] for tool in first.tools] == ["buy"] and not first.content
    bread, house = ("buy", '{"thing": "bread", "price": 4}'), ("buy", '{"thing": "house", "price": 8}')
    observation = asyncio.run(shop.step(answer_of("", bread, house, bread)))
    assert contents(observation) == ["6 left", "Error: `buy` raised ValueError: not enough money", "2 left"], (
        "in their order"
    )
    assert asyncio.run(shop.step(answer_of("Done."))) == Observation(done=True, reward=2.0)
    assert not Shop().bought, "another rollout, another shop"


class Plain(ToolEnv):
    """An environment with its own form of calls: `add 2 3`."""

    def __init__(self) -> None:
        super().__init__([self.add])

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reset(self, task: Task) -> Observation:
        super().reset(task)
        return Observation("You may say: add 2 3")

    def calls(self, answer: Message) -> Sequence[ToolCall]:
        matches = re.findall(r"add (\d+) (\d+)", str(answer.content))
        return [ToolCall(str(place), "add", f'{{"a": {a}, "b": {b}}}') for place, (a, b) in enumerate(matches)]

    def format_results(self, results: Sequence[Message]) -> str:
        return " ".join(str(result.content) for result in results)


def test_an_environment_with_its_own_call_format_needs_no_chat_template() -> None:
    game = Plain()
    assert game.reset(Task(0, {})) == Observation("You may say: add 2 3")
    assert asyncio.run(game.step(answer_of("add 2 3 and add 4 4"))) == Observation("5 8")
    assert asyncio.run(game.step(answer_of("13"))).done


def test_a_game_must_return_an_observation() -> None:
    with pytest.raises(TypeError, match="abstract"):
        TextEnv()  # type: ignore[abstract]


def test_the_page_on_environments_names_every_field_and_option() -> None:
    page = (Path(__file__).parents[1] / "docs/guides/environments.md").read_text()
    names = set(re.findall(r"`([\w.]+)`", page))
    assert {field.name for field in fields(Observation)} <= names
    assert {f"env.{name}" for name in EnvConfig.model_fields} <= names
