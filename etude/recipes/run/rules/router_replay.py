"""Refuses router replay where nothing chooses before it."""

from __future__ import annotations

from collections.abc import Iterator

from etude.config.together import told_together
from etude.errors import ConfigError
from etude.recipes.run.config import Run


@told_together
def check_router_replay(run: Run) -> Iterator[ConfigError]:
    """Refuse replay by a critic, of a pass that the run does not make, and of servers."""
    if run.critic.train.router_replay != "none":
        yield ConfigError(
            f"`critic.train.router_replay={run.critic.train.router_replay}` replays what the policy's routers chose, "
            "and a critic has routers of its own. Leave it out."
        )
    if run.train.router_replay == "r3" and run.embedded_engine is None:
        yield ConfigError(
            "`train.router_replay=r3` replays the experts that the sampler chose, and Etude does not read them from "
            "servers. Set `train.router_replay=r2`, which replays those of the trainer's first pass, or choose "
            "`rollout=embedded`."
        )
    if run.train.router_replay == "r2" and "routes" not in run.model_columns():
        yield ConfigError(
            "`train.router_replay=r2` replays the experts of the pass before the updates, and this run makes none: "
            "each step has one update, which computes π_old itself. Leave it out, or raise `mini_batches` or "
            "`ppo_epochs`."
        )
