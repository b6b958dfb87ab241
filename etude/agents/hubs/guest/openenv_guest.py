"""OpenEnv: environments that a server plays, at the address of the server, over its WebSocket.

Options: `show` names the field of an observation that the model reads; by default it reads all of them as JSON.
`instructions` is the first text; by default it describes the action. `text=true` plays by plain text. `reset` has
arguments for the environment's `reset`.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

CONNECT_S = 30.0
CAPACITY_S = 600.0
"""Seconds to wait for a server that has as many sessions as it allows."""
RETRY_S = 0.5
MAX_BYTES = 64 << 20


class Hub:
    """One server of OpenEnv."""

    def __init__(self, what: str, options: Mapping[str, Any], max_turns: int) -> None:  # noqa: ARG002
        self.version = f"openenv by websockets {version('websockets')}"
        self._url = what.rstrip("/")
        given = dict(options)
        self._is_text = bool(given.pop("text", False))
        self._show = given.pop("show", None)
        self._reset = dict(given.pop("reset", {}))
        instructions = given.pop("instructions", None)
        if given:
            raise ValueError(f"OpenEnv has no options {', '.join(given)}. They are instructions, reset, show and text.")
        try:
            with urllib.request.urlopen(f"{self._url}/schema", timeout=CONNECT_S) as reply:
                self._action: Mapping[str, Any] = json.load(reply)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"No server of OpenEnv answers at {self._url} ({error}). Start it first.") from error
        self._instructions = str(instructions or self._describe_action())

    def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return tasks, each with a seed. There is no last one."""
        text = self._instructions
        prompt: Any = f"{text}\n" if self._is_text else [{"role": "user", "content": text}]
        return [{"prompt": prompt, "seed": seed} for seed in range(first, first + count)]

    def open(self) -> Session:
        """Return a session, which connects when its rollout begins."""
        required = self._action.get("required", [])
        return Session(self._url, required[0] if len(required) == 1 else "", self._show, self._reset)

    def _describe_action(self) -> str:
        required = self._action.get("required", [])
        fields = {name: field.get("description", name) for name, field in self._action.get("properties", {}).items()}
        if len(required) == 1:
            return f"Answer with this alone: {fields.get(required[0], required[0])}."
        described = json.dumps({name: fields.get(name, name) for name in required})
        return f"Answer with a JSON object: {described}."


class Session:
    """One rollout, by one connection."""

    def __init__(self, url: str, field: str, show: str | None, reset: Mapping[str, Any]) -> None:
        """field: the one field of an action, which an answer without JSON is; empty if there are several."""
        self._url = url
        self._field = field
        self._show = show
        self._reset = reset
        self._around = ""
        """The characters around a text that is shown between answers: a line break where all is plain text."""
        self._socket: Any = None

    def reset(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Connect, and return the prompt of the task with the first observation after it."""
        own = {name: task[name] for name in ("seed", "episode_id") if name in task}
        text = self._shown(self._begin({**own, **self._reset}))
        prompt = task["prompt"]
        if isinstance(prompt, str):
            self._around = "\n"
            return {"content": f"{prompt}{text}\n"}
        *before, last = prompt
        return {"content": [*before, {**last, "content": f"{last['content']}\n\n{text}"}]}

    def step(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Take the action of an answer. One that the environment does not understand is shown to the model."""
        reply = self._ask("step", self._parse(answer["content"]))
        if reply["type"] == "error":
            return {"content": str(reply["data"].get("message", "")).join(2 * [self._around])}
        data = reply["data"]
        content = self._shown(data).join(2 * [self._around])
        return {"content": content, "reward": data.get("reward"), "done": bool(data.get("done"))}

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            with suppress(ConnectionClosed):
                self._socket.send(json.dumps({"type": "close"}))
            self._socket.close()

    def _begin(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the first observation, once the server has room for a session."""
        deadline = time.monotonic() + CAPACITY_S
        address = f"{self._url.replace('http', 'ws', 1)}/ws"
        while True:
            self._socket = connect(address, open_timeout=CONNECT_S, max_size=MAX_BYTES)
            reply = self._ask("reset", arguments)
            if reply["type"] != "error":
                return reply["data"]  # type: ignore[no-any-return]
            self._socket.close()
            if reply["data"].get("code") != "CAPACITY_REACHED" or time.monotonic() > deadline:
                raise RuntimeError(f"{self._url} refused to reset: {reply['data'].get('message')}")
            time.sleep(RETRY_S)

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Return the server's reply. Of errors it may be one that another try or another answer mends."""
        with suppress(ConnectionClosed):  # by a server without room, whose reply can still be read
            self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(self._socket.recv())
        code = reply["data"].get("code") if reply["type"] == "error" else None
        if code not in (None, "CAPACITY_REACHED", "VALIDATION_ERROR"):
            raise RuntimeError(f"{self._url} failed at `{kind}`: {reply['data'].get('message')}")
        return reply

    def _parse(self, answer: str) -> dict[str, Any]:
        """Return the action: a JSON object, or the text as the only field."""
        try:
            action = json.loads(answer)
        except ValueError:
            action = None
        return action if isinstance(action, dict) else {self._field: answer}

    def _shown(self, data: Mapping[str, Any]) -> str:
        """Return what the model reads of an observation."""
        observation = data["observation"]
        shown = observation if self._show is None else observation[self._show]
        return shown if isinstance(shown, str) else json.dumps(shown)
