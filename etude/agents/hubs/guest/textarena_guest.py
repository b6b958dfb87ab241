"""TextArena: its games, of which the model plays one seat.

Options: `opponent` plays the other seats. `random` makes random moves. With `policy`, the run answers for them as for
the model's own seat. `path/to/file.py:name` is a function, or an agent of TextArena, that returns a move for all that
its seat has seen. `players` is the number of seats, by default two with an opponent, and one without. `seat` is the
model's; by default the tasks take turns. `instructions` is a text before the rules of the game. `text=true` plays by
plain text, without messages. All others are arguments of `textarena.make`. A move without brackets gets them, as the
game's own wrapper does.
"""

from __future__ import annotations

import copy
import importlib
import platform
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import textarena

load = importlib.import_module("trl_guest").load  # that file stands beside this one
RANDOM = "random"
POLICY = "policy"
EXAMPLE = "env.kwargs.opponent=my_opponent.py:move"
CHECKED_GAMES = 3
"""Games that are played at random before the run begins."""
CHECKED_MOVES = 200
"""The most moves of the model's seat in each of them."""
_random_lock = threading.Lock()
"""Held while a game computes: games draw from the random numbers of the whole process."""


class Hub:
    """One game of TextArena, by its id."""

    def __init__(self, what: str, options: Mapping[str, Any], max_turns: int) -> None:  # noqa: ARG002
        self.version = f"textarena {version('textarena')}"
        given = dict(options)
        self._is_text = bool(given.pop("text", False))
        self._instructions = str(given.pop("instructions", "Play this game."))
        opponent = given.pop("opponent", None)
        self._players = int(given.pop("players", 1 if opponent is None else 2))
        self._seat = given.pop("seat", None)
        self._what = what
        self._arguments = given
        if self._players > 1 and opponent is None:
            raise ValueError(f"`players={self._players}` needs an opponent: `env.kwargs.opponent={RANDOM}`.")
        if self._seat is not None and self._seat not in range(self._players):
            raise ValueError(f"`seat={self._seat}` is none of the seats 0 to {self._players - 1} of {what}.")
        if opponent not in (None, RANDOM, POLICY) and ":" not in str(opponent):
            raise ValueError(
                f"`opponent={opponent}` names no opponent. Write `{RANDOM}`, `{POLICY}`, or a function: `{EXAMPLE}`."
            )
        self._is_self_play = opponent == POLICY
        self._opponent = None if opponent in (None, RANDOM, POLICY) else load(str(opponent), EXAMPLE)
        self._check(has_opponent=opponent is not None)

    def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return tasks, each with the seed of its game. There is no last one."""
        text = self._instructions
        prompt: Any = f"{text}\n" if self._is_text else [{"role": "user", "content": text}]
        return [{"prompt": prompt, "seed": seed} for seed in range(first, first + count)]

    def open(self) -> Game:
        """Return a new game."""
        return self._game(self._seat)

    def _game(self, seat: int | None) -> Game:
        return Game(self._make(), self._players, seat, self._opponent, is_self_play=self._is_self_play)

    def _check(self, *, has_opponent: bool) -> None:
        """Begin a game in the last seat, for which the others move first. Refuse what cannot be played.

        Where the opponent plays at random, games of such moves must come to their end.
        """
        at_random = has_opponent and self._opponent is None and not self._is_self_play
        try:
            for seed in range(CHECKED_GAMES if at_random else 1):
                game = self._game(self._players - 1)
                game.reset({"prompt": "", "seed": seed})
                if at_random:
                    game.play_at_random(CHECKED_MOVES)
        except AssertionError as error:
            remedy = "" if has_opponent else f" Give the others an opponent: `env.kwargs.opponent={RANDOM}`."
            players = "one player" if self._players == 1 else f"{self._players} players"
            raise ValueError(f"{self._what} is no game for {players}: {error}.{remedy}") from error
        except SyntaxError as error:
            raise ValueError(
                f"The code of {self._what} needs a later Python than {platform.python_version()} ({error}). Name one "
                "that has textarena by `env.python`."
            ) from error
        except (ValueError, ImportError, LookupError, OSError) as error:
            raise ValueError(f"TextArena cannot play {self._what}: {' '.join(str(error).split())[:500]}") from error

    def _make(self) -> Any:
        """Return a game without its wrappers, which would show all that was said so far in each turn."""
        game = textarena.make(self._what, **self._arguments)
        while isinstance(game, textarena.Wrapper):
            game = game.env
        return game


class Game:
    """One game."""

    def __init__(
        self,
        game: Any,
        players: int,
        seat: int | None,
        opponent: Callable[[str], str] | None,
        *,
        is_self_play: bool = False,
    ) -> None:
        """seat: the model's; None is the rest of the seed by the players. opponent: None plays at random. is_self_play:
        the run answers for all seats."""
        self._game = game
        self._is_self_play = is_self_play
        self._prompt: Any = ""
        self._players = players
        self._seat = seat
        self._opponent = opponent
        self._numbers: Any = None
        """The state of this game's random numbers, between its turns."""
        self._seen: dict[int, list[str]] = {player: [] for player in range(players)}
        """All that each seat was shown."""
        self._done = False
        self._around = ""
        """The characters around a text that is shown between answers: a line break where all is plain text."""

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt of the task, and the rules of the game after it."""
        if not isinstance(task.get("seed"), int):
            raise ValueError("a task of TextArena has a column `seed`, which is a whole number")
        self._seat = task["seed"] % self._players if self._seat is None else self._seat
        self._numbers = random.Random(task["seed"]).getstate()
        with self._own_numbers():
            self._game.reset(num_players=self._players, seed=task["seed"])
        self._play_others()
        if self._done:
            raise ValueError("the game ended before the model's first turn")
        self._prompt = task["prompt"]
        self._around = "\n" if isinstance(self._prompt, str) else ""
        return {**self._show(), "role": self._seat}

    def step(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Make the move of the answer and those of the others, and return what the game says."""
        self._move(answer["content"])
        self._play_others()
        if self._done:
            rewards, _ = self._game.close()
            return {"reward": float((rewards or {}).get(self._seat, 0.0)), "done": True}
        return self._show()

    def play_at_random(self, moves: int) -> None:
        """Play the model's seat at random too, for at most as many moves."""
        for _ in range(moves):
            if self._done:
                return
            self._move(self._draw_move())
            self._play_others()
            if not self._done:
                self._observe()
        if not self._done:
            raise ValueError(f"a game of random moves did not end after {moves} of them. Write a function: `{EXAMPLE}`")

    def _show(self) -> dict[str, Any]:
        """Return what the current seat has not seen yet, at first after the prompt of the task."""
        player = self._game.state.current_player_id
        is_first = not self._seen[player]
        text = self._observe()
        turn = {} if player == self._seat else {"opponent": player}
        if not is_first:
            return {"content": text.join(2 * [self._around]), **turn}
        if isinstance(self._prompt, str):
            return {"content": f"{self._prompt}{text}\n", **turn}
        *before, last = self._prompt
        return {"content": [*before, {**last, "content": f"{last['content']}\n\n{text}"}], **turn}

    def _play_others(self) -> None:
        """Make the moves of the other seats, until it is the model's turn. In self-play, the run makes them."""
        while not self._is_self_play and not self._done and self._game.state.current_player_id != self._seat:
            self._observe()
            self._move(self._draw_move() if self._opponent is None else self._ask_opponent(self._opponent))

    def _move(self, action: str) -> None:
        """Make a move of the current seat."""
        action = action.strip()
        with self._own_numbers():
            self._done, _ = self._game.step(action if "[" in action else f"[{action}]")

    def _observe(self) -> str:
        """Return what the current seat has not seen yet, without its own moves. Others' moves begin with their name."""
        player, said = self._game.get_observation()
        shown = []
        for sender, text, kind in said:
            if kind is not textarena.ObservationType.PLAYER_ACTION:
                shown.append(str(text))
            elif sender != player:
                shown.append(f"[{self._game.state.role_mapping.get(sender, f'Player {sender}')}] {text}")
        text = "\n".join(shown).strip()
        self._seen[player].append(text)
        return text

    def _ask_opponent(self, opponent: Callable[[str], str]) -> str:
        """Return the opponent's move. It may take long, so other games compute meanwhile."""
        move = opponent("\n".join(self._seen[self._game.state.current_player_id]))
        if not isinstance(move, str):
            raise TypeError(f"the opponent gave {str(move)[:200]!r} for a move, which is no text")
        return move

    def _draw_move(self) -> str:
        """Return a random move that the game allows, of those in brackets in the newest text that has any."""
        player = self._game.state.current_player_id
        with self._own_numbers():
            for text in reversed(self._seen[player]):
                moves: list[str] = list(dict.fromkeys(re.findall(r"\[[^\[\]]+\]", text)))
                random.shuffle(moves)
                for move in moves:
                    if self._is_allowed(player, move):
                        return move
        raise ValueError(
            f"the texts of the game name no move in brackets that seat {player} may make, so that it cannot be played "
            f"at random. Write an opponent: `{EXAMPLE}`."
        )

    def _is_allowed(self, player: int, move: str) -> bool:
        """Return whether a copy of the game takes a move."""
        tried = copy.deepcopy(self._game)
        tried.step(move)
        return not tried.state.error_count and not tried.state.game_info[player]["invalid_move"]

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Have the block draw from this game's random numbers."""
        with _random_lock:
            random.setstate(self._numbers)
            try:
                yield
            finally:
                self._numbers = random.getstate()
