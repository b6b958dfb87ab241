"""The environments of a run in which a hub's own program plays: agents play them all, by calls of the model endpoint.

    env.sources.digits.hub=verifiers:my_taskset       its program is an agent
    env.sources.cards.hub=gymnasium:Blackjack-v1      the others are played by `EnvironmentAgent`
    env.sources.game.path=my_game.py:Game
    env.sources.facts.tools=[my_tools.py:search]

A rollout is made by the run's own engine or by agents, and all rollouts of a run by the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from etude.agents.agent import Agent
from etude.agents.environment_agent import EnvironmentAgent
from etude.agents.hubs.agent import HubAgent
from etude.agents.hubs.pool import HubPool
from etude.agents.source_agents import add_agents, load_agents
from etude.protocols import Observation
from etude.recipes.collect.environment import Environment
from etude.recipes.run.config import Run
from etude.records import Message, Task


def add_environments(agent: Agent | None, run: Run, hubs: Mapping[str, HubPool]) -> Agent | None:
    """Return an agent that also plays the environments of a run. agent: the one to run, instead of those that the
    options name. hubs: the guests of each section that names a hub."""
    agent = agent or load_agents(run.agent.path, run.agent.sources)
    sources = {source: _agent_of(each, hubs) for source, each in run.env.of_sources().items()}
    own = run.env.own()
    return add_agents(agent, sources, None if own is None else _agent_of(own, hubs))


def _agent_of(environment: Environment, hubs: Mapping[str, HubPool]) -> Agent:
    """Return the agent that plays an environment."""
    options = environment.options
    if options.is_agent:
        return HubAgent(hubs[environment.section])
    most = options.max_turns
    if options.hub is not None:
        return EnvironmentAgent(hubs[environment.section].new_env, name=options.title, max_turns=most)
    if options.path is not None:
        return EnvironmentAgent(environment.load_factory(), options.kwargs, name=options.title, max_turns=most)
    return EnvironmentAgent(_Tools, {"environment": environment}, name=environment.section, max_turns=most)


class _Tools:
    """The tools of a section that names no environment. An answer without a call ends the rollout."""

    def __init__(self, environment: Environment) -> None:
        toolbox = environment.load_toolbox()
        assert toolbox is not None, "a section names an environment or tools"
        self._toolbox = toolbox

    def reset(self, task: Task) -> Observation:
        """Return the tools. The empty content stands for the task's prompt."""
        self._task = task
        return Observation(tools=self._toolbox.schemas)

    async def step(self, answer: Message) -> Observation:
        """Return the results of the calls in an answer."""
        if not answer.tool_calls:
            return Observation(done=True)
        return Observation(await self._toolbox.run_calls(answer.tool_calls, self._task))
