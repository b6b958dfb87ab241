"""Observation of a run: metrics typed by their reduction, sinks, timers, the console and the log.

run = RunInfo(name="demo", directory=Path("runs/demo"), steps=100)
with open_run_log(config.observe, run, headline=["reward", "loss"]) as log:
    with log.step(1) as at:
        at.add(Metrics({"reward": Mean.of(0.4, weight=64)}))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from etude.errors import MissingPackageError
from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from rich.console import Console

    from etude.observe.config import ConsoleStyle, MlflowConfig, ObserveConfig, WandbConfig
    from etude.observe.console import (
        ConsoleSink,
        ProgressReporter,
        StepNotes,
        format_number,
        format_seconds,
        make_console,
        progress,
    )
    from etude.observe.jsonl import JsonlSink, read_last_step, read_steps
    from etude.observe.log import LogLevel, configure_logging, get_logger
    from etude.observe.metrics import Last, Max, Mean, Metric, Metrics, Min, Sum
    from etude.observe.run_log import RunLog, Timer, null_progress
    from etude.observe.sinks import BackgroundSink, RunInfo, SafeSink, SampledRollout, Sink

__all__ = [
    "BackgroundSink",
    "ConsoleSink",
    "ConsoleStyle",
    "JsonlSink",
    "Last",
    "LogLevel",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "MlflowConfig",
    "ObserveConfig",
    "ProgressReporter",
    "RunInfo",
    "RunLog",
    "SafeSink",
    "SampledRollout",
    "Sink",
    "Sum",
    "Timer",
    "WandbConfig",
    "choose_sinks",
    "configure_logging",
    "format_number",
    "format_seconds",
    "get_logger",
    "make_console",
    "null_progress",
    "open_run_log",
    "progress",
    "read_last_step",
    "read_steps",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "config": ("ConsoleStyle", "MlflowConfig", "ObserveConfig", "WandbConfig"),
        "console": ("ProgressReporter", "ConsoleSink", "format_number", "format_seconds", "make_console", "progress"),
        "jsonl": ("JsonlSink", "read_last_step", "read_steps"),
        "log": ("LogLevel", "configure_logging", "get_logger"),
        "run_log": ("RunLog", "Timer", "null_progress"),
        "metrics": ("Last", "Max", "Mean", "Metric", "Metrics", "Min", "Sum"),
        "sinks": ("BackgroundSink", "SafeSink", "SampledRollout", "RunInfo", "Sink"),
    },
)


def open_run_log(
    config: ObserveConfig,
    run: RunInfo,
    headline: Sequence[str] = (),
    last_written_step: int = -1,
    failures: Mapping[str, str] | None = None,
    notes: StepNotes | None = None,
) -> RunLog:
    """Return the open log of a run, with the configured sinks.

    last_written_step: the last step that an earlier start of the run wrote. headline: the metrics of the console line.
    failures: for a headline metric, the metric that counts the failures it leaves out. notes: sentences under the
    console line.
    """
    from etude.observe.console import ConsoleSink
    from etude.observe.run_log import RunLog

    sinks = choose_sinks(config, headline, None, failures, notes)
    display = next((sink for sink in sinks if isinstance(sink, ConsoleSink)), None)
    return RunLog(sinks, run, config.every, last_written_step=last_written_step, display=display)


def choose_sinks(
    config: ObserveConfig,
    headline: Sequence[str] = (),
    console: Console | None = None,
    failures: Mapping[str, str] | None = None,
    notes: StepNotes | None = None,
) -> list[Sink]:
    """Return the configured sinks, not yet open. `console` replaces the one on standard output."""
    from etude.observe.console import ConsoleSink, make_console
    from etude.observe.jsonl import JsonlSink
    from etude.observe.sinks import BackgroundSink

    sinks: list[Sink] = [JsonlSink()]
    if config.console != "off":
        console = make_console(config.console) if console is None else console
        sinks.append(ConsoleSink(console, headline, failures, notes))
    if config.tensorboard:
        with _requires("tensorboardX", "observe.tensorboard=true"):
            from etude.observe.tensorboard import TensorboardSink
        sinks.append(TensorboardSink())
    if config.wandb.mode != "disabled":
        with _requires("wandb", f"observe.wandb.mode={config.wandb.mode}"):
            from etude.observe.wandb import WandbSink
        sinks.append(BackgroundSink(WandbSink(config.wandb)))
    if config.mlflow.enabled:
        with _requires("mlflow", "observe.mlflow.enabled=true"):
            from etude.observe.mlflow import MlflowSink
        sinks.append(BackgroundSink(MlflowSink(config.mlflow)))
    return sinks


@contextmanager
def _requires(package: str, option: str) -> Iterator[None]:
    """Raise a `MissingPackageError` that names the option, if an import inside fails."""
    try:
        yield
    except ImportError as error:
        raise MissingPackageError(
            f"{option} needs the package {package}, which cannot be imported here ({error}). "
            "Install it with: pip install 'etude[trackers]'"
        ) from error
