"""The player of a run's multi-turn rollouts, and the checks of its environment and tools against the model."""

from __future__ import annotations

from collections.abc import Sequence

from etude.agents.hubs.pool import HubPool
from etude.chat import ChatRenderer
from etude.errors import ConfigError
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.episodes import EpisodePlayer


def refuse_uncallable_tools(tools: Sequence[str], chat: ChatRenderer) -> None:
    """Refuse tools that the model could never call."""
    if tools and chat.tool_format is None:
        raise ConfigError(
            "`env.tools` offers functions to a model whose chat template has no known format of tool calls, so none "
            "would ever be called. Known are those of Hermes, Qwen, Llama, Mistral and LFM 2. Set `chat.template`, "
            "or parse other formats in an environment: a `ToolEnv` that overrides `calls`."
        )


def build_episode_player(
    env: EnvConfig, max_total_tokens: int, chat: ChatRenderer, hub: HubPool | None = None
) -> EpisodePlayer | None:
    """Return the player of multi-turn rollouts, of at most `max_total_tokens` tokens; None without an environment or
    tools. hub: the guests that play `env.hub`."""
    refuse_uncallable_tools(env.tools, chat)
    if env.max_tokens is not None and env.max_tokens > max_total_tokens:
        raise ConfigError(
            f"`env.max_tokens={env.max_tokens}` is more than the {max_total_tokens} tokens that the model's "
            "context and the engine's memory have room for. Lower it, leave it out, or raise `rollout.kv_gib`."
        )
    return EpisodePlayer(env, chat, max_total_tokens, hub) if env.is_enabled else None
