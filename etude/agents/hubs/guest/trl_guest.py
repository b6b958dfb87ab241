"""TRL's `environment_factory`: a class with `reset`, whose other public methods are tools. TRL itself is not needed.

    reset(**row) -> str | None    gets the columns of the task; a text is added to the last message of the prompt
    get_reward() -> float         the reward of the rollout; without it the attribute `reward`, if there is one

The rollout ends with an answer that calls no tool, or with the last answer that `env.max_turns` allows. The text of an
exception in a tool goes back to the model. All options are arguments of the class.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
NO_TOOLS = frozenset({"reset", "get_reward", "close"})


class Hub:
    """One factory, as `path/to/file.py:Name` or `module:Name`."""

    version = "trl's environment_factory"

    def __init__(self, what: str, options: Mapping[str, Any], max_turns: int) -> None:
        self._factory = load(what, "env.hub=trl:my_env.py:Factory")
        self._options = dict(options)
        self._max_turns = max_turns
        self.open()

    def tasks(self, first: int, count: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Refuse: a factory has no tasks of its own."""
        raise ValueError("A factory of TRL has no tasks. Give files with prompts by `data.train`.")

    def open(self) -> Rollout:
        """Return a new environment for one rollout."""
        return Rollout(self._factory(**self._options), self._max_turns)


class Rollout:
    """One rollout of an environment."""

    def __init__(self, env: Any, max_turns: int) -> None:
        self._env = env
        self._left = max_turns
        names = [name for name, _ in inspect.getmembers(env, callable) if not name.startswith("_")]
        self._tools = {name: getattr(env, name) for name in names if name not in NO_TOOLS}
        if not callable(getattr(env, "reset", None)):
            raise ValueError(f"{type(env).__name__} has no method `reset`, with which a rollout begins.")
        self._schemas = [describe(name, tool) for name, tool in self._tools.items()]

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Begin the rollout; return the prompt with what `reset` says, and the tools."""
        parameters = inspect.signature(self._env.reset).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        text = self._env.reset(**{name: value for name, value in task.items() if takes_all or name in parameters})
        prompt = task["prompt"]
        if isinstance(prompt, str):
            raise ValueError("a factory of TRL offers tools, for which the prompt must be messages, and it is a text")
        *before, last = prompt
        if text:
            last = {**last, "content": f"{last['content']}{text}"}
        return {"content": [*before, last], "tools": self._schemas}

    def step(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Make the calls of an answer, and return their results; without a call, the end."""
        self._left -= 1
        calls = answer.get("tool_calls") or ()
        results = [{"role": "tool", "content": self._call(call), "tool_call_id": call.get("id", "")} for call in calls]
        for call, result in zip(calls, results, strict=True):
            result["name"] = call["function"]["name"]
        if calls and self._left:
            return {"content": results}
        get_reward: Callable[[], Any] = getattr(self._env, "get_reward", lambda: getattr(self._env, "reward", None))
        reward = get_reward()
        return {"reward": None if reward is None else float(reward), "done": not calls, "truncated": bool(calls)}

    def close(self) -> None:
        """Release the environment, if it has a method for that."""
        if callable(close := getattr(self._env, "close", None)):
            close()

    def _call(self, call: Mapping[str, Any]) -> str:
        """Return the result of a call as text, or the text of its error."""
        name = call["function"]["name"]
        if name not in self._tools:
            return f"Error: there is no tool `{name}`. The tools are: {', '.join(self._tools)}."
        try:
            result = self._tools[name](**json.loads(call["function"]["arguments"] or "{}"))
        except Exception as error:
            return f"Error: `{name}` raised {type(error).__name__}: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)


def load(what: str, example: str) -> Any:
    """Return the class or function that a name says. example: the option with a name, which an error shows."""
    place, _, name = what.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).expanduser().resolve()
        if not file.is_file():
            raise ValueError(f"There is no file {file}, which `{what}` names.")
        sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None, "it ends in .py"
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place or what)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{place or what} has no class or function `{name}`. Name one: `{example}`.")
    return getattr(module, name)


def describe(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a tool, from its docstring and its annotations."""
    text = inspect.getdoc(tool) or ""
    if not text:
        raise ValueError(f"The tool `{name}` has no docstring, from which the model gets its description. Write one.")
    hints = typing.get_type_hints(tool)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(tool).parameters.values():
        found = re.search(rf"^\s+{parameter.name}\s*(?:\([^)]*\))?\s*:\s*(.+)$", text, re.MULTILINE)
        properties[parameter.name] = schema_of(hints.get(parameter.name, str)) | (
            {"description": found[1].strip()} if found else {}
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    summary = re.split(r"\n\s*(?:Args|Returns|Raises):", text)[0].strip()
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": schema}}


def schema_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind is typing.Literal:
        return {"type": "string", "enum": list(inner)}
    if kind in (typing.Union, types.UnionType):
        return schema_of(next(each for each in inner if each is not type(None)))
    if kind in (list, tuple, Sequence):
        return {"type": "array", "items": schema_of(inner[0])} if inner else {"type": "array"}
    return {"type": JSON_TYPES.get(kind, "string")}
