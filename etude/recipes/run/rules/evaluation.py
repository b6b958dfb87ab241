"""Refuses an evaluation beside the trainer where the scored weights do not stay."""

from __future__ import annotations

from collections.abc import Iterator

from etude.config.together import told_together
from etude.errors import ConfigError
from etude.recipes.run.config import Run
from etude.rollout import ServerConfig


@told_together
def check_evaluation(run: Run) -> Iterator[ConfigError]:
    """Refuse an evaluation beside the trainer where the scored weights do not stay."""
    if run.evaluate.when == "between":
        return
    beside = "`evaluate.when=beside` lets the trainer go on while the policy is scored"
    adapters = "`rollout=vllm`, `rollout.adapters=only` and a `lora.rank`"
    if run.agent.path is not None:
        yield ConfigError(f"{beside}, and an agent's calls are drawn by the newest weights. Leave it out.")
        return
    if not isinstance(run.rollout, ServerConfig):
        yield ConfigError(
            f"{beside}, and the embedded engine has one version of the weights, which the next publish replaces. Leave "
            f"it out, or have servers keep an adapter for each version: {adapters}."
        )
    elif run.rollout.adapters != "only":
        yield ConfigError(
            f"{beside}, and each publish replaces the weights of all servers. Leave it out, or have them keep an "
            f"adapter for each version: {adapters}."
        )
    if run.max_staleness == 0:
        yield ConfigError(
            f"{beside}, and with `max_staleness=0` servers keep one adapter, and the trainer waits for the answers of "
            "each step. Leave it out, or set `max_staleness=1` or more."
        )
