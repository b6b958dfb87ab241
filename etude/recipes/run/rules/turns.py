"""Refuses options about the turns of a rollout where a rollout is one answer."""

from __future__ import annotations

from collections.abc import Iterator

from etude.algorithms import AlgorithmConfig
from etude.algorithms.advantages.turns import TurnAdvantage
from etude.config.together import told_together
from etude.errors import ConfigError
from etude.recipes.collect.environment import EnvConfig


@told_together
def check_turns(algorithm: AlgorithmConfig, env: EnvConfig) -> Iterator[ConfigError]:
    """Refuse options about the turns of a rollout where a rollout is one answer: without an agent, and with this
    `env`."""
    if env.max_played_turns > 1:
        return
    limit = "`max_turns=1` in each environment" if env.sources else "`env.max_turns=1`"
    which = f"{limit} allows one answer" if env.is_enabled else "neither `env` nor `agent.path` is set"
    single = f"A rollout of this run is a single answer ({which})"
    remedy = "give an environment, tools or an agent"
    if algorithm.echo:
        yield ConfigError(
            f"`echo={algorithm.echo:g}` learns to predict what an environment shows between two answers. {single}, so "
            f"it would do nothing. Leave `echo` out, or {remedy}."
        )
    if algorithm.loss.unit == "turn":
        yield ConfigError(
            f"`loss.unit=turn` takes each turn of a rollout for a sequence. {single}, so it would do nothing. Leave it "
            f"out, or {remedy}."
        )
    if isinstance(algorithm.advantage, TurnAdvantage):
        yield ConfigError(
            f"This advantage compares the turns of rollouts. {single}, so it would be the same as an advantage of "
            f"whole rollouts. Choose one, such as `advantage=rloo`, or {remedy}."
        )
