"""Agents: code that calls a model and acts on the answer, and the runners that execute it.

    @etude.agent
    def solver(task, llm):
        messages = [{"role": "user", "content": task["question"]}]
        completion = llm.client.chat.completions.create(model=llm.model, messages=messages)
        return float(task["answer"] in completion.choices[0].message.content)

An agent is a function (`agent`), a class with a set-up (`Agent`), or a program in any language (`command`). It gives
its reward by its return value, or on the way by `emit`. A `Runner` claims rollouts from a rollout queue and runs the
agent on them. `execution` runs many runners, on threads or in processes.

The public names are loaded lazily, so that a runner starts without importing a model client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.errors import MissingPackageError
from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from etude.agents.agent import LLM, Agent, RolloutInfo
    from etude.agents.command import Command
    from etude.agents.runner import Runner, RunnerTimeouts
    from etude.store.queue.rollout_queue import RolloutQueue

__all__ = ["LLM", "Agent", "Command", "RolloutInfo", "Runner", "RunnerTimeouts"]
__getattr__ = lazy_getattr(
    __name__,
    {"agent": ("LLM", "Agent", "RolloutInfo"), "command": ("Command",), "runner": ("Runner", "RunnerTimeouts")},
)


def load_openai_clients() -> tuple[type[OpenAI], type[AsyncOpenAI]]:
    """Return OpenAI's synchronous and asynchronous client classes, if the package is installed."""
    try:
        from openai import AsyncOpenAI, OpenAI
    except ImportError as error:
        raise MissingPackageError(
            f"`llm.client` needs the package openai, which cannot be imported here ({error}). Install it with "
            "`pip install 'etude[agents]'`, or call the model with another client: `llm.base_url`, `llm.api_key` and "
            "`llm.model` are strings."
        ) from error
    return OpenAI, AsyncOpenAI


def connect_queue(url: str, key: str) -> RolloutQueue:
    """Return a client of the rollout queue that a store's server has at this URL."""
    from etude.store.http.remote_queue import RemoteRolloutQueue

    return RemoteRolloutQueue(url, key)
