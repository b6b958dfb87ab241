"""Weights & Biases, sent as the run goes or kept in the run directory for later.

Nothing is ever asked on the terminal: without a key, an online run is refused by this sink, which says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import wandb

from etude.errors import ConfigError
from etude.observe.config import WandbConfig
from etude.observe.log import get_logger
from etude.observe.sinks import RunInfo

__all__ = ["WandbSink"]


class WandbSink:
    """One W&B run."""

    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        self._config = config

    def open(self, run: RunInfo) -> None:
        """Start the W&B run."""
        config = self._config
        if config.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError(
                "observe.wandb.mode=online was asked for and no W&B key was found. Set WANDB_API_KEY or run "
                "`wandb login` first, or choose observe.wandb.mode=offline."
            )
        run.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            mode=config.mode,
            project=config.project,
            entity=config.entity,
            name=config.name or run.name,
            config=dict(run.config),
            dir=str(run.directory),
            settings=wandb.Settings(silent=True, console="off"),
        )
        offline = f"kept for later; send it with: wandb sync {Path(self._run.dir).parent}"
        get_logger("observe").info("The W&B run is %s", offline if self._run.offline else f"at {self._run.url}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the step to the run's history."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the W&B run, sending what is left."""
        self._run.finish()
