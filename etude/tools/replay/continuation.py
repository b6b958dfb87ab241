"""Training on from a replayed step, on the recorded rollouts of later steps, in a new directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etude.checkpoint import CheckpointManager
from etude.config.secrets import mask
from etude.config.tree import to_tree
from etude.errors import ConfigError
from etude.integrity import write_json
from etude.observe import Metrics, ObserveConfig, RunInfo, get_logger, open_run_log
from etude.recipes.run import directory as run_directory
from etude.recipes.run.resume import inputs
from etude.recipes.run.steps.console_metrics import headline
from etude.tools.replay.options import ReplayOptions
from etude.tools.replay.trainer import RecordedTrainer


@contextmanager
def new_run_directory(options: ReplayOptions, out: Path | None) -> Iterator[Path]:
    """Yield a new, locked directory with the changed options. It holds a model, and is no run that can be resumed."""
    directory = (out or run_directory.new_directory(Path("runs"), "replay")).absolute()
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"--out {directory} is not empty, and a replay needs its own directory. Name a new one.")
    with run_directory.lock_directory(directory):
        run = run_directory.with_absolute_paths(options.changed.model_copy(update={"directory": directory}))
        write_json(directory / run_directory.REPLAY, {"run": str(options.directory.absolute())})
        inputs.RunInputs(directory, run).record(run.describe_threads())
        run_directory.write_options(directory, run)
        yield directory


def train_on(
    trainer: RecordedTrainer, options: ReplayOptions, first: int, metrics: Metrics, last: int, directory: Path
) -> None:
    """Train on the steps after `first`, write their metrics, and save the weights of the last.

    metrics: those of the first step, which is done.
    """
    run = options.changed
    if options.changes:
        get_logger("tools").warning(
            "Steps %d to %d train on the rollouts of the recorded policy, and not of the one that is trained here: the "
            "data is off-policy%s.",
            first,
            last,
            "" if run.bounds_sampler_ratio() else ", and nothing bounds the ratio to the sampler",
        )
    observe = ObserveConfig(console=run.observe.console)
    info = RunInfo(directory.name, directory, last, mask(to_tree(run)))
    with open_run_log(
        observe, info, headline(run.evaluate.samples, single_update=run.mini_batches * run.ppo_epochs == 1)
    ) as log:
        with log.step(first) as at:
            at.add(metrics)
        for step in range(first + 1, last + 1):
            with log.step(step) as at:
                at.add(trainer.train(step))
    facts = {"score": None, "measured": "", "learner": trainer.learners.facts()}
    trainer.learners.save(CheckpointManager(directory / "checkpoints", run.checkpoint.keep), last, facts)
