"""The TensorBoard sink: event files in `tensorboard/` of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tensorboardX import SummaryWriter

from etude.observe.sinks import RunInfo, SampledRollout, Sink


class TensorboardSink(Sink):
    """A sink that writes one scalar per metric and step, and the configuration as text."""

    name = "tensorboard"

    def open(self, run: RunInfo) -> None:
        """Start a new event file; TensorBoard joins the files of one directory."""
        self._writer = SummaryWriter(logdir=str(run.directory / "tensorboard"))
        self._writer.add_text("config", _as_code(json.dumps(run.config, indent=2, default=str)))

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:  # noqa: ARG002
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_rollouts(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        """Write the rollouts as text. TensorBoard reads it as Markdown, so what they say is indented as code."""
        parts = []
        for sampled in rollouts:
            advantage = "" if sampled.advantage is None else f", advantage {sampled.advantage:.4g}"
            parts.append(f"**rollout {sampled.rollout}: reward {sampled.reward:.4g}{advantage}**")
            parts += [_as_code(sampled.prompt), "answer:", _as_code(sampled.text)]
        self._writer.add_text("rollouts", "\n\n".join(parts), step)

    def close(self) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
