"""Refuses what does not fit to a hub's own program, which makes rollouts as an agent does."""

from __future__ import annotations

from collections.abc import Iterator

from etude.config.together import told_together
from etude.errors import ConfigError
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.environment import EnvConfig


@told_together
def check_programs(env: EnvConfig, agent: AgentConfig) -> Iterator[ConfigError]:
    """Refuse two players of the same tasks, and runners that cannot play what the run plays, where a program of a hub
    plays."""
    if not env.has_programs:
        return
    environments = env.environments()
    program = next(each for each in environments if each.options.is_agent)
    named = f"{program.section}.hub={program.options.hub}"
    if env.names_one and agent.path is not None:
        yield ConfigError(
            "`env` names an environment for all tasks without one of their own, and `agent.path` another agent. Leave "
            "one out."
        )
    both = [source for source in env.sources if source in agent.sources]
    if both:
        yield ConfigError(
            f"`env.sources.{both[0]}` names an environment for the data source `{both[0]}`, and "
            f"`agent.sources.{both[0]}` an agent. Leave one out."
        )
    mixed = [each.section for each in environments if each.options.path is not None and each.options.tools]
    if mixed:
        yield ConfigError(
            f"`{named}` is a program that calls the model, so that agents make all rollouts of the run. There, "
            f"`{mixed[0]}.path` offers its tools itself (`ToolEnv`), and `{mixed[0]}.tools` would do nothing. "
            "Leave the tools out."
        )
    if agent.strategy != "shm":
        yield ConfigError(
            f"`{named}` plays in processes of its own, which `{program.section}.workers` counts, and a runner of this "
            "process calls them. Leave `agent.strategy` out."
        )
    if not agent.runners and (env.sources or agent.is_enabled):
        yield ConfigError(
            f"`agent.runners=0` waits for runners from elsewhere. They can play `{named}` if it plays all tasks of a "
            "run, and not in a mix. Leave it out, so that this run's own runners play all of them."
        )
