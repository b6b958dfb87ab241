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

from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from etude.agents.agent import LLM, Agent, RolloutInfo
    from etude.agents.command import Command
    from etude.agents.runner import Runner, RunnerTimeouts

__all__ = ["LLM", "Agent", "Command", "RolloutInfo", "Runner", "RunnerTimeouts"]
__getattr__ = lazy_getattr(
    __name__,
    {
        "agent": ("LLM", "Agent", "RolloutInfo"),
        "command": ("Command",),
        "runner": ("Runner", "RunnerTimeouts"),
    },
)
