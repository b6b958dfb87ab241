"""Gymnasium: environments whose observations can be read, and whose actions can be named.

Options: `actions` names the actions of a `Discrete` space in their order; by default they are numbers. `instructions`
is the first text that the model reads. `render=true` shows what `render_mode="ansi"` draws, and not the observation.
`text=true` plays by plain text, without messages. `unclear` is the reward of an answer that names no action, which
then ends the episode; without it, the model is asked again. All others are arguments of `gymnasium.make`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

MAX_NUMBERS = 64
"""The most numbers of an observation that is shown as text. A picture has more."""


class Hub:
    """One environment of Gymnasium, by its id."""

    def __init__(self, what: str, options: Mapping[str, Any], max_turns: int) -> None:  # noqa: ARG002
        given = dict(options)
        self.version = f"gymnasium {gymnasium.__version__}"
        self._what = what
        self._renders = bool(given.pop("render", False))
        self._is_text = bool(given.pop("text", False))
        self._unclear = given.pop("unclear", None)
        names = given.pop("actions", None)
        instructions = given.pop("instructions", None)
        self._arguments = given | ({"render_mode": "ansi"} if self._renders else {})
        env = self._make()
        self.actions = self._read_actions(env.action_space, names)
        if not self._renders:
            refuse_unreadable(what, env.observation_space)
        listed = f" Answer with one of these actions: {', '.join(self.actions)}." if self.actions else ""
        self._instructions = instructions or f"You act in {what}.{listed}"
        env.close()

    def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return tasks, each with the seed of its episode. There is no last one."""
        text = self._instructions
        prompt: Any = f"{text}\n" if self._is_text else [{"role": "user", "content": text}]
        return [{"prompt": prompt, "seed": seed} for seed in range(first, first + count)]

    def open(self) -> Episode:
        """Return a new environment for one episode."""
        return Episode(self._make(), self.actions, self._unclear, renders=self._renders)

    def _make(self) -> Any:
        try:
            return gymnasium.make(self._what, **self._arguments)
        except gymnasium.error.Error as error:
            raise ValueError(f"Gymnasium cannot make {self._what}: {error}".rstrip(".") + ".") from error

    def _read_actions(self, space: Any, names: Any) -> dict[str, int]:
        """Return the number of each action by its name; nothing where actions are text."""
        kind = type(space).__name__
        if kind == "Text" and names is None:
            return {}
        if kind != "Discrete":
            raise ValueError(f"The actions of {self._what} are {space}. Only Discrete and Text actions can be named.")
        count = int(space.n)
        start = int(space.start)
        if names is None:
            names = [str(start + number) for number in range(count)]
        if not isinstance(names, Sequence) or len({str(name).lower() for name in names}) != count:
            raise ValueError(
                f"`actions` names {names!r}, and {self._what} has {count} actions: give as many different names."
            )
        return {str(name): start + number for number, name in enumerate(names)}


class Episode:
    """One episode of an environment."""

    def __init__(self, env: Any, actions: Mapping[str, int], unclear: float | None, *, renders: bool) -> None:
        self._env = env
        self._unclear = unclear
        self._renders = renders
        self._around = ""
        """The characters around a text that is shown between answers: a line break where all is plain text."""
        self._actions = {name.lower(): number for name, number in actions.items()}
        self._help = f"No action was named. Answer with one of: {', '.join(actions)}."
        longest_first = sorted(self._actions, key=len, reverse=True)
        self._named = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the prompt of the task, and the first observation after it."""
        if not isinstance(task.get("seed"), int):
            raise ValueError("a task of Gymnasium has a column `seed`, which is a whole number")
        observation, _ = self._env.reset(seed=task["seed"])
        text = self._show(observation)
        prompt = task["prompt"]
        if isinstance(prompt, str):
            self._around = "\n"
            return {"content": f"{prompt}{text}\n"}
        *before, last = prompt
        return {"content": [*before, {**last, "content": f"{last['content']}\n\n{text}"}]}

    def step(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Take the action that the answer names last, and return what follows."""
        action: Any = answer["content"]
        if self._actions:
            named = self._named.findall(action)
            if not named and self._unclear is not None:
                return {"reward": float(self._unclear), "done": True}
            if not named:
                return {"content": self._help.join(2 * [self._around])}
            action = self._actions[named[-1].lower()]
        observation, reward, terminated, truncated, _ = self._env.step(action)
        content = self._show(observation).join(2 * [self._around])
        return {"content": content, "reward": float(reward), "done": bool(terminated), "truncated": bool(truncated)}

    def close(self) -> None:
        """Release the environment."""
        self._env.close()

    def _show(self, observation: Any) -> str:
        if self._renders:
            marked = re.sub(r"\x1b\[4\dm(.*?)\x1b\[0m", r"[\1]", str(self._env.render()))
            return re.sub(r"\x1b\[[\d;]*m", "", marked).strip()
        return observation if isinstance(observation, str) else json.dumps(_plain(observation))


def refuse_unreadable(what: str, space: Any) -> None:
    """Refuse observations that are no text, and have too many numbers to be shown as text."""
    if isinstance(space, gymnasium.spaces.Text):
        return
    try:
        size = int(gymnasium.spaces.flatdim(space))
    except (NotImplementedError, ValueError):
        size = 0
    counted = isinstance(space, gymnasium.spaces.Box) and size > MAX_NUMBERS
    if not size or counted:
        raise ValueError(
            f"The observations of {what} are {space}, which cannot be shown as text. `render=true` shows what it draws "
            "as text, if it draws any."
        )


def _plain(value: Any) -> Any:
    """Return an observation as JSON values."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value
