"""TextArena: its games for one player.

Options: `instructions` is a text before the rules of the game. `text=true` plays by plain text, without messages. All
others are arguments of `textarena.make`. An action without brackets gets them, as the game's own wrapper does.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import textarena

_random_lock = threading.Lock()
"""Held while a game computes: games draw from the random numbers of the whole process."""


class Hub:
    """One game of TextArena, by its id."""

    def __init__(self, what: str, options: Mapping[str, Any], max_turns: int) -> None:  # noqa: ARG002
        self.version = f"textarena {version('textarena')}"
        given = dict(options)
        self._is_text = bool(given.pop("text", False))
        self._instructions = str(given.pop("instructions", "Play this game."))
        self._what = what
        self._arguments = given
        try:
            self._make().reset(num_players=1, seed=0)
        except AssertionError as error:
            raise ValueError(f"{what} is no game for one player: {error}.") from error
        except (ValueError, ImportError, LookupError) as error:
            raise ValueError(f"TextArena cannot make {what}: {' '.join(str(error).split())[:500]}") from error

    def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return tasks, each with the seed of its game. There is no last one."""
        text = self._instructions
        prompt: Any = f"{text}\n" if self._is_text else [{"role": "user", "content": text}]
        return [{"prompt": prompt, "seed": seed} for seed in range(first, first + count)]

    def open(self) -> Game:
        """Return a new game."""
        return Game(self._make())

    def _make(self) -> Any:
        """Return a game without its wrappers, which would show all that was said so far in each turn."""
        game = textarena.make(self._what, **self._arguments)
        while isinstance(game, textarena.Wrapper):
            game = game.env
        return game


class Game:
    """One game."""

    def __init__(self, game: Any) -> None:
        self._game = game
        self._numbers: Any = None
        """The state of this game's random numbers, between its turns."""
        self._around = ""
        """The characters around a text that is shown between answers: a line break where all is plain text."""

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt of the task, and the rules of the game after it."""
        if not isinstance(task.get("seed"), int):
            raise ValueError("a task of TextArena has a column `seed`, which is a whole number")
        with _random_lock:
            random.seed(task["seed"])
            self._game.reset(num_players=1, seed=task["seed"])
            text = self._observe()
            self._numbers = random.getstate()
        prompt = task["prompt"]
        if isinstance(prompt, str):
            self._around = "\n"
            return {"content": f"{prompt}{text}\n"}
        *before, last = prompt
        return {"content": [*before, {**last, "content": f"{last['content']}\n\n{text}"}]}

    def step(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Make the move of the answer, and return what the game says."""
        action = answer["content"].strip()
        with _random_lock:
            random.setstate(self._numbers)
            done, _ = self._game.step(action if "[" in action else f"[{action}]")
            text = "" if done else self._observe()
            self._numbers = random.getstate()
        if done:
            rewards, _ = self._game.close()
            return {"reward": float((rewards or {}).get(0, 0.0)), "done": True}
        return {"content": text.join(2 * [self._around])}

    def _observe(self) -> str:
        """Return what the game has said since the last turn, without the player's own moves."""
        _, said = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text) for _, text, kind in said if kind is not own).strip()
