"""Agents: any code that calls a model and does something with the answer, and what it takes to have it played.

    @etude.agent
    def solver(task, llm):
        asked = [{"role": "user", "content": task["question"]}]
        told = llm.client.chat.completions.create(model=llm.model, messages=asked)
        return float(task["answer"] in told.choices[0].message.content)

An agent is a function (`agent`), a class with a set-up (`Agent`), or a program in any language (`command`). It says
what it earned by what it returns, or on the way by `emit`. A `Runner` claims rollouts at a desk and plays them;
`execution` has many of them at work, on threads or in processes.

What is here loads when it is asked for: a runner is at work before a client of a model's server could be imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.errors import MissingPackageError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from etude.agents.agent import LLM, Agent, RolloutInfo
    from etude.agents.command import Command
    from etude.agents.runner import Runner, RunnerTimeouts
    from etude.store.rollout_queue import RolloutQueue

__all__ = ["LLM", "Agent", "Command", "RolloutInfo", "Runner", "RunnerTimeouts"]


def __getattr__(name: str) -> Any:
    """The public names, from the files they are in."""
    if name in ("LLM", "Agent", "RolloutInfo"):
        from etude.agents import agent

        return getattr(agent, name)
    if name == "Command":
        from etude.agents.command import Command

        return Command
    if name in ("RunnerTimeouts", "Runner"):
        from etude.agents import runner

        return getattr(runner, name)
    raise AttributeError(f"module 'etude.agents' has no attribute '{name}'")


def load_openai_clients() -> tuple[type[OpenAI], type[AsyncOpenAI]]:
    """OpenAI's client and its twin for coroutines, where the package is installed."""
    try:
        from openai import AsyncOpenAI, OpenAI
    except ImportError as error:
        raise MissingPackageError(
            f"`llm.client` is a client of the package openai, which cannot be imported here ({error}). Install it with "
            "`pip install 'etude[agents]'`, or call the model by any other means: `llm.base_url`, `llm.api_key` and "
            "`llm.model` are plain text."
        ) from error
    return OpenAI, AsyncOpenAI


def connect_queue(url: str, key: str) -> RolloutQueue:
    """The desk that a server keeps at this address, for whoever holds this key."""
    from etude.store.remote_queue import RemoteRolloutQueue

    return RemoteRolloutQueue(url, key)
