"""The command `etude replay`: reaches the step, computes it with both algorithms, and writes the comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from etude.algorithms import AlgorithmConfig
from etude.chat import Tokenizer
from etude.checkpoint import CheckpointManager, flat
from etude.config.secrets import mask_text
from etude.errors import ConfigError, RunError, translate_memory_errors
from etude.models.weight_files import WeightFiles
from etude.observe import configure_logging, get_logger, make_console, progress
from etude.observe.jsonl import METRICS_FILE
from etude.observe.step_history import MetricsFile
from etude.recipes.collect.recorded import RecordedSteps
from etude.recipes.recipe import ModelSource
from etude.recipes.run.directory import CHECKPOINTS
from etude.recipes.run.resume import inputs
from etude.recipes.run.rules import checks
from etude.tools.doctor.machine import read_memory
from etude.tools.replay import comparison
from etude.tools.replay.comparison import Side
from etude.tools.replay.continuation import new_run_directory, train_on
from etude.tools.replay.files import FOLDER, write_replay
from etude.tools.replay.observer import StepObserver
from etude.tools.replay.options import ReplayOptions
from etude.tools.replay.report import show
from etude.tools.replay.trainer import RecordedTrainer, TrainerState, open_trainer, read_steps
from etude.tools.rollout_reader import open_journal

WEIGHTS = "weights."
"""The beginning of the names of weights among the tensors of a checkpoint."""
TRAINING_BYTES = 16
"""Bytes that each trained weight needs: itself, its gradient and two moments, in float32."""


def replay(
    options: ReplayOptions, step: int, *, to: int | None = None, out: Path | None = None, silent: bool = False
) -> dict[str, Any]:
    """Compute a recorded step again, with its own and with changed options; show, write and return the comparison.

    to: the step up to which the changed algorithm trains on. out: the directory of the files; by default `replays` in
    the run's directory, and with `to` a new directory. silent: print nothing.
    """
    _check_algorithm(options)
    recorded = options.recorded
    if recorded.ranks > 1 and not (recorded.lora.is_enabled or recorded.model.freeze):
        _check_memory(recorded.model, recorded.ranks, recorded.compute_device())
    directory = options.directory
    configure_logging(options.recorded.observe.level, mask=mask_text)
    console = make_console("off" if silent else "auto")
    with ExitStack() as stack:
        stack.enter_context(translate_memory_errors())
        steps = read_steps(options.recorded, stack.enter_context(open_journal(directory)))
        inputs.RunInputs(directory, options.recorded).check_model_files()
        stack.enter_context(_threads(options.recorded.trainer_threads()))
        into = directory / FOLDER if out is None else out
        if to is not None:
            into = stack.enter_context(new_run_directory(options, out))
        result = _replay(options, steps, step, to, into, console)
    show(result, _decoder(options.recorded.model), console)
    console.print(f"data  {result['file']}", soft_wrap=True)
    return result


def _check_algorithm(options: ReplayOptions) -> None:
    """Refuse an algorithm that needs what the run has not recorded."""
    recorded, changed = options.recorded, options.changed
    needed = changed.required_columns()
    if changed.uses_critic and not recorded.uses_critic:
        raise ConfigError(
            "This advantage needs a critic, and the run has trained none: its predictions would mean nothing. Choose "
            "an advantage without a critic, such as `advantage=rloo`."
        )
    if "greedy_reward" in needed and "greedy_reward" not in recorded.required_columns():
        raise ConfigError(
            "This advantage compares with the greedy answer to each task, and the run has sampled none. Choose another "
            "advantage, such as `advantage=rloo`."
        )
    if "anchor" in needed and not recorded.env.is_enabled:
        raise ConfigError(
            "This advantage compares states that an environment names, and the run has no environment. Choose another "
            "advantage, such as `advantage=rloo`."
        )
    # Only the algorithm is checked: rollouts that are recorded need no rule about how stale they may get.
    if options.changes:
        checks.check_algorithm(changed.model_copy(update={"max_staleness": 0, "allow_unbounded_ratios": False}))


def _check_memory(model: ModelSource, ranks: int, device: torch.device) -> None:
    """Refuse a model that several ranks train, all of it, and that has no room in one process."""
    assert model.path is not None, "a run has a model"
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_memory()[1]
    needed = TRAINING_BYTES * WeightFiles(model.path).num_weights
    if needed > free:
        raise RunError(
            f"The run trained on {ranks} ranks, and a replay computes in one process: its weights, gradient and "
            f"moments need {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on {device}. Replay on a "
            "machine with more memory, or with `device=cpu`, where the processor has more."
        )


def _replay(
    options: ReplayOptions, steps: RecordedSteps, step: int, to: int | None, into: Path, console: Any
) -> dict[str, Any]:
    """Compute the step under both algorithms, write the comparison, and train on if that was asked for."""
    with open_trainer(options.recorded, steps) as trainer:
        checkpoint = _reach(trainer, options.directory, step, console)
        start = trainer.state()
        recorded = _observe(trainer, options.recorded, step, start)
        if not options.changes and to is not None:
            train_on(trainer, options, step, recorded.metrics, to, into)
    changed: Side | None = None
    if options.changes:
        carrying = steps.with_batch_columns(options.changed.data.batch_columns)
        with open_trainer(options.changed, carrying) as trainer:
            trainer.restore(start)
            changed = _observe(trainer, options.changed, step, start)
            if to is not None:
                train_on(trainer, options, step, changed.metrics, to, into)
    measured = _measured(options, step, recorded)
    result: dict[str, Any] = {
        "run": str(options.directory),
        "step": step,
        "checkpoint": checkpoint,
        "replayed": step - 1 - checkpoint,
        "changed": {name: [_plain(before), _plain(after)] for name, (before, after) in options.changes.items()},
        "measured": measured,
        "exact": all(run == replay for run, replay in measured.values()) if measured else None,
        "sides": {
            "recorded": comparison.describe_side(recorded),
            "changed": None if changed is None else comparison.describe_side(changed),
        },
        "rollouts": comparison.rollout_records(recorded, changed),
    }
    if changed is not None:
        result["difference"] = comparison.compare(recorded, changed)
    return result | write_replay(into, step, result, comparison.token_columns(recorded, changed))


def _reach(trainer: RecordedTrainer, directory: Path, step: int, console: Any) -> int:
    """Bring the trainer to the weights that the step began with: from the newest checkpoint before it, train the steps
    between again. Return the step of that checkpoint; 0 is the run's first model."""
    checkpoints, start = CheckpointManager(directory / CHECKPOINTS), 0
    before = [checkpoint for checkpoint in checkpoints.list_complete() if checkpoint.step < step]
    if before:
        newest = max(before, key=lambda checkpoint: checkpoint.step)
        trainer.resume(checkpoints, newest)
        start = newest.step
    between = range(start + 1, step)
    if between:
        get_logger("tools").info(
            "The newest weights before step %d are those of step %d: the steps up to %d are trained again on their "
            "recorded rollouts.",
            step,
            start,
            step - 1,
        )
    with progress(f"steps before step {step}", len(between), console) as bar:
        for earlier in between:
            trainer.train(earlier)
            bar.advance()
    return start


def _observe(trainer: RecordedTrainer, algorithm: AlgorithmConfig, step: int, start: TrainerState) -> Side:
    """Train on a step by the trainer's algorithm, and return what was seen of it."""
    observer = StepObserver(algorithm)
    metrics = trainer.train(step, observer)
    before, after = flat(start[0]), flat(trainer.state()[0])
    return Side(observer, metrics, {name: after[name] - before[name] for name in after if name.startswith(WEIGHTS)})


def _measured(options: ReplayOptions, step: int, side: Side) -> dict[str, tuple[float, float]]:
    """Return the loss and the gradient norm that the run measured of the step, each with the replay's own."""
    if options.recorded.observe.every > 1:  # the metrics of several steps are merged
        return {}
    metrics, values = MetricsFile(options.directory / METRICS_FILE), side.metrics.reduce()
    metrics.refresh()
    known = {name: metrics.curve(name) for name in ("loss", "grad_norm") if name in values}
    return {
        name: (float(curve.values[curve.steps == step][0]), values[name])
        for name, curve in known.items()
        if step in curve.steps
    }


def _decoder(source: ModelSource) -> Any:
    assert source.path is not None, "a run has a model"
    tokenizer = Tokenizer.load(source.tokenizer or source.path)
    return lambda id: tokenizer.decode([id])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool | None) else str(value)
