"""verifiers, version 1: the program of an environment plays, and calls the model at an address with a key.

The name is that of a taskset, such as `textarena`. The options are those of its environment (`EnvConfig`): `taskset`,
the seats of agents, `timeout`. A seat plays on this machine by the harness `null`, a chat with tools, unless the
options or the taskset say otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.env import Env
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment

GENERIC_HARNESS = "bash"
"""The harness of verifiers for a taskset that has none. It lets the model run commands on the machine."""
LOCAL_RUNTIMES = ("subprocess", "docker", "apptainer")


class Hub:
    """One environment of verifiers."""

    def __init__(self, what: str, options: Mapping[str, Any], max_turns: int) -> None:  # noqa: ARG002
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it has uv
        self.version = f"verifiers {version('verifiers')}"
        self._env: Env[Any] = load_environment(read_config(what, options))
        self._tasks: Iterator[Any] = iter(self._env.taskset)
        self._drawn: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        is_serving: Future[None] = Future()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(is_serving),), daemon=True).start()
        is_serving.result()

    def tasks(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return tasks; fewer at the end of the taskset."""
        missing = max(0, first + count - len(self._drawn))
        self._drawn += [task.data.model_dump(mode="json") for task in itertools.islice(self._tasks, missing)]
        return self._drawn[first : first + count]

    def open(self) -> Episode:
        """Return a new episode."""
        return Episode(self._env, self._loop)

    async def _serve(self, is_serving: Future[None]) -> None:
        try:
            async with self._env.serving():
                is_serving.set_result(None)
                await asyncio.Event().wait()
        except BaseException as error:
            if is_serving.done():
                raise
            is_serving.set_exception(error)


class Episode:
    """One episode, which the environment's program plays."""

    def __init__(self, env: Env[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._env = env
        self._loop = loop
        self._playing: Future[dict[str, Any]] | None = None

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Play to the end, and return the rewards and the errors."""
        self._playing = asyncio.run_coroutine_threadsafe(self._play(request), self._loop)
        return self._playing.result()

    def cancel(self) -> None:
        """End the episode, if it still plays."""
        if self._playing is not None:
            self._playing.cancel()

    async def _play(self, request: Mapping[str, Any]) -> dict[str, Any]:
        key = f"ETUDE_MODEL_KEY_{request['session']}"  # verifiers reads a key from a variable
        os.environ[key] = request["api_key"]
        try:
            client = EvalClientConfig(base_url=request["base_url"], api_key_var=key)
            context = ModelContext(client=client, model=request["model"], sampling=SamplingConfig())
            task_type = type(self._env.taskset).task_type()
            fields = task_type.data_type().model_fields
            data = {name: value for name, value in request["task"].items() if name in fields}
            task = task_type(task_type.data_type().model_validate(data), self._env.config.taskset.task)
            (slot,) = self._env.slots(task)
            return report(await self._env.run_slot(slot, context))
        finally:
            del os.environ[key]


def report(episode: Any) -> dict[str, Any]:
    """Return the end of an episode as a message."""
    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, given in trace.rewards.items():
            if name in rewards:
                raise ValueError(f"two agents of the environment give the reward `{name}`; one policy is trained")
            if given is not None:
                rewards[name] = given.value
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {
        "rewards": rewards,
        "errors": [f"{error.type}: {error.message}" for error in errors] if not episode.ok else [],
        "timed_out": bool(episode.is_timeout),
        "truncated": any(trace.is_truncated for trace in episode.traces),
    }


def read_config(what: str, options: Mapping[str, Any]) -> Any:
    """Return the environment's config. Refuse agents that would play on machines of others."""
    taskset = {"id": what, **options.get("taskset", {})}
    kind = env_config_type(what, str(options.get("id", "")))
    seats = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
    values: dict[str, Any] = {**options, "taskset": taskset}
    generic = default_harness_id(what) == GENERIC_HARNESS
    for seat in seats:
        given = dict(options.get(seat, {}))
        given.setdefault("runtime", {"type": "subprocess"})
        if generic:
            given.setdefault("harness", {"id": "null"})
        if given["runtime"].get("type") not in LOCAL_RUNTIMES:
            raise ValueError(
                f"`{seat}.runtime.type` is {given['runtime'].get('type')!r}, whose machines need an account and a "
                f"tunnel to this one. Choose one of {', '.join(LOCAL_RUNTIMES)}."
            )
        values[seat] = given
    return kind.model_validate(values)
