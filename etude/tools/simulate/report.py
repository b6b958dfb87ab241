"""The printed simulation: a table of staleness bounds, the choice among them, and its distributions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from etude.errors import ConfigError
from etude.observe import format_seconds, make_console, progress
from etude.tools.simulate.options import SimulateOptions
from etude.tools.simulate.search import NEAR, Trial, choose, replay, search
from etude.tools.simulate.trace import RunTrace, read_trace

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "most": 1.0}
REPLAY_OPTIONS = frozenset({"max_staleness", "order", "window", "attempts"})
"""The options that a replay of a run has; the others describe a cluster and its rollouts."""
CLOSE = 0.15
"""The difference to the measured step time from which on the report says that the replay is off."""


def show_search(options: SimulateOptions, directory: Path | None = None, *, silent: bool = False) -> dict[str, Any]:
    """Simulate each bound on a cluster, print the trials, and return them as plain data.

    directory: a run whose rollouts are simulated, in place of those that the options describe.
    """
    console = make_console("off" if silent else "auto")
    trace = None
    if directory is not None:
        trace = _read(directory, console)
        collection = trace.run.collect
        options = options.model_copy(
            update={"group_size": collection.group_size, "refill": collection.refill, "retries": collection.retries}
        )
    options.check()
    with progress("simulating steps", None, console) as bar:
        trials = search(options, None if trace is None else trace.tokens, bar.advance)
    chosen = choose(trials)
    _show_head(options, trace, console)
    console.print(_search_table(trials), soft_wrap=True)
    console.print("bound: `max_staleness`. engines draw: of the tokens that full engines draw.", soft_wrap=True)
    _show_choice(options, trials, chosen, console)
    _show_distributions(chosen, console)
    return {"trials": [to_dict(trial) for trial in trials], "chosen": trials.index(chosen)}


def show_replay(options: SimulateOptions, directory: Path, *, silent: bool = False) -> dict[str, Any]:
    """Replay a finished run with each bound, print that, and return it as plain data."""
    _refuse_cluster_options(options)
    console = make_console("off" if silent else "auto")
    trace = _read(directory, console)
    own, tasks = trace.run.max_staleness, trace.run.collect.tasks
    bounds = [own, *sorted({*options.max_staleness} - {own})]
    with progress("replaying the run", None, console) as bar:
        trials = replay(
            trace,
            bounds,
            bar.advance,
            windows=lambda bound: options.windows(tasks, bound),
            attempts=options.attempts,
        )
    measured = float(np.mean(trace.step_s))
    same_tasks = own > 0 or all(
        frozenset(step.tasks) == admitted for step, admitted in zip(trials[0].result.steps, trace.admitted, strict=True)
    )
    notes = [*trace.notes]
    if not same_tasks:
        notes.append(
            "The simulated steps train on other tasks than the run did. Its options changed on the way, or rollouts "
            "are missing in its journal."
        )
    difference = trials[0].mean_step_s / measured - 1
    if abs(difference) > CLOSE:
        notes.append(f"The replay of the run's own bound is {abs(difference):.0%} off the measured step time.")
    _show_measured(trace, trials[0], measured, console)
    console.print(_replay_table(trials), soft_wrap=True)
    _show_distributions(trials[-1], console)
    for note in notes:
        console.print(note, soft_wrap=True)
    return {
        "measured_step_s": measured,
        "same_tasks": same_tasks,
        "notes": notes,
        "trials": [to_dict(trial) for trial in trials],
    }


def _refuse_cluster_options(options: SimulateOptions) -> None:
    defaults = SimulateOptions()
    given = [name for name in type(options).model_fields if getattr(options, name) != getattr(defaults, name)]
    if unused := [name for name in given if name not in REPLAY_OPTIONS]:
        raise ConfigError(
            f"A run is replayed on its own machine, where {', '.join(f'`{name}`' for name in unused)} would change "
            "nothing. Add --cluster to simulate its rollouts on the cluster of the options, or leave it out."
        )


def _read(directory: Path, console: Console) -> RunTrace:
    with progress("reading rollouts", None, console) as bar:
        return read_trace(directory, bar.advance)


def to_dict(trial: Trial) -> dict[str, Any]:
    """Return a trial as plain data."""
    result = trial.result
    waited = [step for step in result.steps if step.wait_s > 0]
    return {
        "max_staleness": trial.max_staleness,
        "window": trial.window,
        "attempts": trial.attempts,
        "in_turns": trial.in_turns,
        "trainer_gpus": trial.trainer_gpus,
        "tasks": trial.tasks,
        "step_s": {"mean": trial.mean_step_s} | _quantiles(trial.step_s),
        "tokens_per_s": trial.tokens_per_s,
        "trainer_waiting": trial.waiting,
        "trainer_computing": trial.training,
        "engines_busy": result.busy,
        "engines_drawing": trial.drawing,
        "staleness": {"mean": trial.mean_staleness, "counts": dict(sorted(result.staleness.items()))},
        "mean_tokens_by_staleness": _tokens_by_staleness(trial),
        "trained_tokens": _quantiles(result.trained),
        "finished_tokens": _quantiles(result.finished),
        "last_rollout_tokens": _quantiles([step.last_tokens for step in waited]),
        "last_rollout_tool_s": _quantiles([step.last_tool_s for step in waited]),
        "dropped_tasks": dict(result.dropped),
        "failed_attempts": result.failed_attempts,
        "engine_failures": result.engine_failures,
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {name: float(np.quantile(values, quantile)) for name, quantile in QUANTILES.items()}


def _tokens_by_staleness(trial: Trial) -> dict[int, float]:
    result = trial.result
    return {stale: result.tokens_by_staleness[stale] / number for stale, number in sorted(result.staleness.items())}


# -- tables -----------------------------------------------------------------------------------------------------------


def _search_table(trials: Sequence[Trial]) -> Table:
    """Return a row for each bound, compared with the run in turns of the same batch."""
    in_turns = {trial.tasks: trial for trial in trials if trial.in_turns}
    columns: dict[str, Callable[[Trial], str]] = {
        "training GPUs": lambda trial: "in turns" if trial.in_turns else f"{trial.trainer_gpus:,}",
        "step, s": lambda trial: f"{trial.mean_step_s:,.1f}",
        "tokens/s": lambda trial: f"{trial.tokens_per_s:,.0f}",
        "faster": lambda trial: f"{trial.tokens_per_s / in_turns[trial.tasks].tokens_per_s:.2f} ×",
    }
    return _table(trials, columns, "engines draw")


def _replay_table(trials: Sequence[Trial]) -> Table:
    columns: dict[str, Callable[[Trial], str]] = {
        "step, s": lambda trial: f"{trial.mean_step_s:,.3g}",
        "run": lambda trial: format_seconds(trial.result.seconds),
        "faster": lambda trial: f"{trials[0].result.seconds / trial.result.seconds:.2f} ×",
    }
    return _table(trials, columns, "slots draw")


def _table(trials: Sequence[Trial], own: dict[str, Callable[[Trial], str]], drawing: str) -> Table:
    """Return a row for each trial: what tells it from others, the table's own columns, and how it waits and draws."""
    columns: dict[str, Callable[[Trial], str]] = {"bound": lambda trial: str(trial.max_staleness)}
    if len({trial.tasks for trial in trials}) > 1:
        columns = {"tasks": lambda trial: f"{trial.tasks:,}"} | columns
    if any(trial.window for trial in trials):
        columns["window"] = lambda trial: "" if trial.window is None else f"{trial.window:,}"
    if len({trial.attempts for trial in trials}) > 1:
        columns["attempts"] = lambda trial: "" if trial.attempts is None else f"{trial.attempts:,}"
    columns |= own
    columns["trainer waits"] = lambda trial: f"{trial.waiting:.0%}"
    columns[drawing] = lambda trial: f"{trial.drawing:.0%}"
    columns["mean staleness"] = lambda trial: f"{trial.mean_staleness:.1f}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for trial in trials:
        table.add_row(*(written(trial) for written in columns.values()))
    return table


# -- sentences --------------------------------------------------------------------------------------------------------


def _show_head(options: SimulateOptions, trace: RunTrace | None, console: Console) -> None:
    tasks = " or ".join(f"{number:,}" for number in sorted(set(options.tasks)))
    rollouts = (
        f"{options.tokens:,.0f} tokens a turn (median), at most {options.max_tokens:,} a rollout"
        if trace is None
        else f"those of {trace.directory}"
    )
    tools = f", {options.turns:g} turns with waits of {options.wait_s:g} s" if trace is None and options.wait_s else ""
    console.print(
        f"{options.gpus:,} GPUs, a model of {options.parameters:g} · 10⁹ parameters; {tasks} tasks of "
        f"{options.group_size} rollouts a step: {rollouts}{tools}.",
        soft_wrap=True,
    )
    most = options.update_s(1e6, 1) - options.train_s
    console.print(
        f"Estimated from rates: an engine samples {options.slots / options.token_s(options.slots):,.0f} tokens/s with "
        f"{options.slots} requests, a GPU trains {1e6 / most:,.0f}. Give your own with `decode_ms`, `request_ms` and "
        "`gpu_tflops`.",
        soft_wrap=True,
    )


def _show_choice(options: SimulateOptions, trials: Sequence[Trial], chosen: Trial, console: Console) -> None:
    """Name the choice, and the bound below which no split helps: the longest rollout."""
    split = "all GPUs in turns" if chosen.in_turns else f"{chosen.trainer_gpus:,} GPUs that train"
    engines = "" if chosen.in_turns else f" and {options.engines(chosen.trainer_gpus):,} engines"
    console.print(
        f"Least staleness and smallest batch within {1 - NEAR:.0%} of the fastest: max_staleness="
        f"{chosen.max_staleness}, tasks={chosen.tasks}, {_order(chosen)}{split}{engines}.",
        style="bold",
        soft_wrap=True,
    )
    slow = [trial for trial in trials if trial.waiting > 0.2 and trial.max_staleness < chosen.max_staleness]
    if slow:
        console.print(
            "A step with a smaller bound waits for its longest rollouts: they may take no more than max_staleness + 1 "
            "steps.",
            soft_wrap=True,
        )


def _order(trial: Trial) -> str:
    return "" if trial.window is None else f"order=windowed with window={trial.window}, "


def _show_distributions(trial: Trial, console: Console) -> None:
    result = trial.result
    console.print(f"\nWith {_order(trial)}max_staleness={trial.max_staleness}:")
    console.print(f"  step            {_listed(trial.step_s, format_seconds)}", soft_wrap=True)
    total = result.staleness.total()
    shares = ", ".join(f"{value}: {number / total:.0%}" for value, number in sorted(result.staleness.items()))
    console.print(f"  staleness       {shares}", soft_wrap=True)
    if trial.window is not None:
        means = ", ".join(f"{stale}: {mean:,.0f}" for stale, mean in _tokens_by_staleness(trial).items())
        console.print(f"  mean tokens     by staleness, {means}", soft_wrap=True)
    console.print(f"  trained tokens  {_listed(result.trained, '{:,.0f}'.format)}", soft_wrap=True)
    console.print(f"  finished tokens {_listed(result.finished, '{:,.0f}'.format)}", soft_wrap=True)
    steps = result.steps
    waited = [step for step in steps if step.wait_s > 0.01 * step.seconds]
    if waited:
        tools = float(np.median([step.last_tool_s for step in waited]))
        behind = f" and {format_seconds(tools)} of tools" if tools else ""
        tokens = float(np.median([step.last_tokens for step in waited]))
        console.print(
            f"  waited for      {len(waited)} of {len(steps)} steps; the last rollout had {tokens:,.0f} tokens{behind} "
            "(median)",
            soft_wrap=True,
        )


def _listed(values: Sequence[float], written: Callable[[float], str]) -> str:
    return ", ".join(f"{name} {written(value)}" for name, value in _quantiles(values).items())


def _show_measured(trace: RunTrace, own: Trial, measured: float, console: Console) -> None:
    collection = trace.run.collect
    at_once = trace.slots if trace.attempts is None else trace.attempts
    console.print(
        f"{trace.directory}: {trace.steps} steps of {collection.tasks} tasks with {collection.group_size} rollouts, at "
        f"most {at_once} at a time. A step took {format_seconds(measured)}; replayed with its own bound of "
        f"{own.max_staleness} it takes {format_seconds(own.mean_step_s)}.",
        soft_wrap=True,
    )
