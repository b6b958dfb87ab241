"""The TensorBoard sink: event files in `tensorboard/` of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tensorboardX import SummaryWriter

from etude.observe.sinks import RunInfo

__all__ = ["TensorboardSink"]


class TensorboardSink:
    """A sink that writes one scalar per metric and step, and the configuration as text."""

    name = "tensorboard"

    def open(self, run: RunInfo) -> None:
        """Start a new event file; TensorBoard joins the files of one directory."""
        self._writer = SummaryWriter(logdir=str(run.directory / "tensorboard"))
        config = json.dumps(run.config, indent=2, default=str)
        self._writer.add_text("config", "\n".join("    " + line for line in config.splitlines()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the step, and flush it to the operating system."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_late(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers to an earlier step."""
        self.log(step, values)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
