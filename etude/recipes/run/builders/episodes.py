"""The players of a run's multi-turn rollouts, and the checks of its environments and tools against the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from etude.agents.hubs.pool import HubPool
from etude.chat import ChatRenderer
from etude.errors import ConfigError
from etude.recipes.collect.environment import EnvConfig, Environment
from etude.recipes.collect.episodes import EpisodePlayer


class EpisodePlayers(NamedTuple):
    """The players of a run's multi-turn rollouts."""

    default: EpisodePlayer | None
    """The player of `env` itself, if it names an environment or tools."""
    of_sources: Mapping[str, EpisodePlayer]
    """The players of the data sources of `env.sources`."""


def refuse_uncallable_tools(env: EnvConfig, chat: ChatRenderer) -> None:
    """Refuse tools that the model could never call."""
    for environment in env.environments():
        if environment.options.tools and chat.tool_format is None:
            raise ConfigError(
                f"`{environment.section}.tools` offers functions to a model whose chat template has no known format of "
                "tool calls, so none would ever be called. Known are those of Hermes, Qwen, Llama, Mistral and LFM 2. "
                "Set `chat.template`, or parse other formats in an environment: a `ToolEnv` that overrides `calls`."
            )


def build_episode_players(
    env: EnvConfig, max_total_tokens: int, chat: ChatRenderer, hubs: Mapping[str, HubPool]
) -> EpisodePlayers:
    """Return the players of multi-turn rollouts, of at most `max_total_tokens` tokens. hubs: the guests of each
    section that names a hub."""
    refuse_uncallable_tools(env, chat)

    def build(environment: Environment) -> EpisodePlayer:
        options = environment.options
        section = environment.section
        if options.max_tokens is not None and options.max_tokens > max_total_tokens:
            raise ConfigError(
                f"`{section}.max_tokens={options.max_tokens}` is more than the {max_total_tokens} tokens that the "
                "model's context and the engine's memory have room for. Lower it, leave it out, or raise "
                "`rollout.kv_gib`."
            )
        return EpisodePlayer(environment, chat, max_total_tokens, hubs.get(section))

    own = env.own()
    return EpisodePlayers(
        None if own is None else build(own),
        {name: build(each) for name, each in env.of_sources().items()},
    )
