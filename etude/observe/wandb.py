"""The Weights & Biases sink: metrics are sent during the run, or stored in the run directory for later.

It never prompts on the terminal: without a key it refuses an online run, and names the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path

import wandb

from etude.errors import ConfigError
from etude.observe.config import WandbConfig
from etude.observe.log import get_logger
from etude.observe.sinks import RunInfo, SampledRollout, Sink


class WandbSink(Sink):
    """A sink with one W&B run."""

    name = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._latest = 0

    def open(self, run: RunInfo) -> None:
        config = self._config
        if config.mode == "online" and not wandb.login(prompt=False):
            raise ConfigError(
                "observe.wandb.mode=online needs a W&B key, and none was found. Set WANDB_API_KEY, run `wandb login` "
                "first, or choose observe.wandb.mode=offline."
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
        offline = f"stored for later; send it with: wandb sync {Path(self._run.dir).parent}"
        get_logger("observe").info("The W&B run is %s", offline if self._run.offline else f"at {self._run.url}")

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:
        """Add the step to the run's history. W&B takes nothing for an earlier step, so late numbers are added to the
        latest one, with their step in `late_step`."""
        if late:
            self._run.log({**values, "late_step": step}, step=self._latest)
        else:
            self._latest = step
            self._run.log(dict(values), step=step)

    def log_rollouts(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        self._latest = step
        columns = [field.name for field in fields(SampledRollout)]
        self._run.log({"rollouts": wandb.Table(columns, [list(astuple(row)) for row in rollouts])}, step=step)

    def close(self) -> None:
        """Finish the W&B run, and send the remaining metrics."""
        self._run.finish()
