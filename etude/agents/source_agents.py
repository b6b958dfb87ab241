"""The agents of a mix: an attempt is played by the agent of its task's data source.

    etude train … agent.sources.shop=my_agent.py:solve agent.sources.game=my_game.py:Game
    etude runner shop=my_agent.py:solve game=my_game.py:Game --url http://…

A runner has all of them. It calls the hooks and the set-up of each, and bounds an attempt by its own agent's limits.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from etude.agents.agent import Agent, CallSignature, as_agent, load_agent
from etude.errors import AgentError
from etude.protocols import Observation
from etude.records import Message, Task

AGENTS_RESOURCE = "etude/agents"
"""The resource by which a run of a mix tells runners which data sources have agents."""


class SingleAnswer:
    """An environment that ends with the first answer: it plays the tasks that have no agent."""

    async def reset(self, task: Task) -> Observation:
        """Show the prompt of the task."""
        if task.fields.get("prompt") is None:
            raise AgentError(
                f"A task of the data source `{task.source}` is answered once, and has no prompt. Give it one, or an "
                f"agent: `agent.sources.{task.source}=my_agent.py:solve`."
            )
        return Observation()

    async def step(self, answer: Message) -> Observation:  # noqa: ARG002
        """End the rollout."""
        return Observation(done=True)


class SourceAgents(Agent):
    """An agent for each data source, and one for all others, whose tasks are answered once without it."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        return object.__new__(cls)  # its members have signatures, and it has none

    def __init__(self, sources: Mapping[str, Agent], others: Agent | None = None) -> None:
        self.sources = dict(sources)
        self.others = others
        """The agent of tasks of other data sources, if they have one."""
        self._others = others or as_agent(SingleAnswer, "A single answer")
        members = self.members()
        limits = [member.max_concurrency for member in members if member.max_concurrency is not None]
        self.max_concurrency = min(limits, default=None)  # type: ignore[misc]
        self.grace_s = max(member.grace_s for member in members)  # type: ignore[misc]

    def __copy__(self) -> Self:
        copies = {id(member): copy.copy(member) for member in self.members()}
        sources = {source: copies[id(member)] for source, member in self.sources.items()}
        return type(self)(sources, None if self.others is None else copies[id(self.others)])

    @property
    def title(self) -> str:
        return ", ".join(f"{source}={member.title}" for source, member in self.sources.items())

    def call_signature(self) -> CallSignature:
        return CallSignature((), any(member.call_signature().is_async for member in self.members()))

    def members(self) -> Sequence[Agent]:
        return list({id(member): member for member in [*self.sources.values(), self._others]}.values())

    def of_task(self, task: Task) -> Agent:
        return self.sources.get(task.source, self._others)

    def run(self) -> Any:
        raise AssertionError("a runner calls the agent of a task's data source")


def load_agents(path: str | None, sources: Mapping[str, str]) -> Agent | None:
    """Load the agents of these names, each once; None if there is no name. path: for all other data sources."""
    names = dict.fromkeys([*sources.values(), *([] if path is None else [path])])
    agents = {name: load_agent(name) for name in names}
    others = None if path is None else agents[path]
    return SourceAgents({source: agents[name] for source, name in sources.items()}, others) if sources else others


def add_agents(agent: Agent | None, sources: Mapping[str, Agent], others: Agent | None) -> Agent | None:
    """Return an agent that plays these data sources too. others: plays all other data sources, which then had no agent
    before."""
    before = agent.sources if isinstance(agent, SourceAgents) else {}
    if agent is not None and not isinstance(agent, SourceAgents):
        others = agent
    elif isinstance(agent, SourceAgents):
        others = others or agent.others
    return SourceAgents({**before, **sources}, others) if before or sources else others


def describe_agents(sources: Collection[str], *, others: bool, only_here: bool = False) -> dict[str, Any]:
    """Return the value of the resource that says which data sources have agents. others: true if all others have one.
    only_here: true if no other process can have all these agents."""
    described = {"sources": list(sources), "others": others}
    return {**described, "only_here": True} if only_here else described


def refuse_other_agents(agent: Agent, resources: Mapping[str, Any]) -> None:
    """Refuse an agent that lacks a data source for which the run of a claim has an agent: its tasks would be played by
    another one, or answered once. resources: those of the claim."""
    wanted = resources.get(AGENTS_RESOURCE)
    if wanted is None:
        return
    named = agent.sources if isinstance(agent, SourceAgents) else {}
    missing = [source for source in wanted["sources"] if source not in named]
    lacks_others = wanted["others"] and isinstance(agent, SourceAgents) and agent.others is None
    if (missing or lacks_others) and "only_here" in wanted:
        raise AgentError(
            "A hub's program plays tasks of the run's mix, which its own runners alone can call. So no runner can join "
            "from elsewhere. Stop this one, and raise `agent.runners` or `agent.max_concurrency` in the run."
        )
    if missing:
        raise AgentError(
            f"The run has an agent for the data source `{missing[0]}`, and this runner has none. Give all of them: "
            f"`etude runner {' '.join(f'{source}=…' for source in wanted['sources'])}`."
        )
    if lacks_others:
        raise AgentError(
            "The run has `agent.path`, an agent for all other data sources, and this runner has none. Name it too, "
            "without a data source: `etude runner my_agent.py:solve shop=…`."
        )


def split_names(words: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return the agent's name, if one stands alone, and those of `source=name`."""
    alone = [word for word in words if "=" not in word or Path(word.rpartition(":")[0]).is_file()]
    if len(alone) > 1:
        raise AgentError(
            f"Two agents are given, {alone[0]} and {alone[1]}, and no data source. Give one, or write the data source "
            "of each before it: `shop=my_agent.py:solve`."
        )
    named = (word.partition("=") for word in words if word not in alone)
    return next(iter(alone), None), {source: name for source, _, name in named}


def join_names(path: str | None, sources: Mapping[str, str]) -> list[str]:
    """Return the words from which `split_names` reads these."""
    return [*([] if path is None else [path]), *(f"{source}={name}" for source, name in sources.items())]
