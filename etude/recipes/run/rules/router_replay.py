"""Refuses router replay where nothing chooses before it, and a balance loss without it."""

from __future__ import annotations

from collections.abc import Iterator

from etude.config.together import problems_of, told_together
from etude.errors import ConfigError
from etude.recipes.run.config import Run
from etude.rollout import VllmConfig
from etude.train.config import refuse_unreplayed_balance


@told_together
def check_router_replay(run: Run) -> Iterator[ConfigError]:
    """Refuse replay of a pass that the run does not make, and of a server that reports none."""
    yield from problems_of(refuse_unreplayed_balance, run.train, "train")
    on_cpu = run.compute_device().type == "cpu"
    servers = run.rollout
    if run.records_routes and isinstance(servers, VllmConfig) and on_cpu and not (servers.python or servers.url):
        yield ConfigError(
            "`train.router_replay=r3` replays the experts that the sampler chose, and vLLM's build for a CPU does not "
            "report them: that takes its model runner V2, which needs a Triton with a CPU backend. Set "
            "`train.router_replay=r2`, which replays those of the trainer's first pass, choose `rollout=embedded`, or "
            "name the Python of an environment that has one with `rollout.python`."
        )
    if run.train.router_replay == "r2" and "routes" not in run.model_columns():
        yield ConfigError(
            "`train.router_replay=r2` replays the experts of the pass before the updates, and this run makes none: "
            "each step has one update, which computes π_old itself. Leave it out, raise `mini_batches` or "
            "`ppo_epochs`, or set `train.balance=loss`, which reads the pass too."
        )
