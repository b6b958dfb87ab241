"""What stands around the parts of every run, whatever it learns from: its directory, its threads, and how it ends.

Nothing is written of a run that cannot begin. One that was asked to stop says how to go on; one that is done says what
can be done with it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from etude.agents.agent import is_importable
from etude.config.env import etude_command
from etude.config.secrets import mask_text
from etude.observe import configure_logging, format_seconds, get_logger
from etude.recipes.recipe import Recipe
from etude.recipes.run import directory as folder
from etude.recipes.run import inputs
from etude.recipes.run.config import Run
from etude.recipes.run.device import check_device
from etude.recipes.run.interrupt import Interrupt
from etude.recipes.run.save_resume import CheckpointSaver

__all__ = ["log_start", "run_session"]

R = TypeVar("R", bound=Recipe)


class SessionComponents(Protocol):
    """The parts of a loop, as far as their frame knows them."""

    checkpoint: CheckpointSaver


P = TypeVar("P", bound=SessionComponents)
Assemble = Callable[[R, Path, Interrupt, ExitStack], P]


@contextmanager
def run_session(
    run: R,
    assemble: Assemble[R, P],
    interrupt: Interrupt | None = None,
    *,
    check: Callable[[R], None],
    looks: Sequence[str],
    kept: str = "",
) -> Iterator[P]:
    """The parts of a run, open, in its directory; and closed again in the end. One that somebody asked to stop ends in
    a `KeyboardInterrupt`.

    interrupt: who listens for that already, where several runs follow each other. checked: refuses what cannot be run,
    before anything is made. looks: the commands that look at what came of it. kept: what a step leaves that is cut off.
    """
    configure_logging(run.observe.level, mask=mask_text)
    with ExitStack() as last, ExitStack() as stack:
        asked = interrupt or stack.enter_context(Interrupt(get_logger("recipes").warning))
        asked.may_finish_step = False
        check_device(run)
        check(run)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        directory = run.directory or folder.new_directory(Path("runs"), run.recipe)
        run = folder.with_absolute_paths(run.model_copy(update={"directory": directory}))
        assert run.directory is not None
        stack.enter_context(folder.lock_directory(run.directory))
        began = time.perf_counter()
        folder.check_same_options(run.directory, run)
        inputs.check_inputs(run.directory, run)
        parts = assemble(run, run.directory, asked, stack)
        saver, first = parts.checkpoint, parts.checkpoint.step
        asked.may_finish_step = True
        try:
            yield parts
        except KeyboardInterrupt:
            if saver.step < saver.steps:
                saved = (
                    f"Step {saver.saved_step} is the last that was saved"
                    if saver.saved_step
                    else "No step was saved yet"
                )
                told = f"Stopped at once, in step %d. {saved}{kept}."
                _log_how_to_resume(last, run, told, saver.step + 1)
            raise
        if asked.stop_requested and saver.step < saver.steps:
            _log_how_to_resume(last, run, "Stopped after step %d of %d.", saver.step, saver.steps)
            raise KeyboardInterrupt
        if first < saver.step == saver.steps:
            _conclude(run, saver.steps, time.perf_counter() - began, looks)


def log_start(run: Recipe, size: int, trained: int, what: str, saver: CheckpointSaver, written: int) -> None:
    """The first words of a run: its model's size and how much of it is trained, what it has, and from where it goes on;
    up to `written` its steps were measured."""
    log, step = get_logger("recipes"), saver.step
    told = f"{size:,} parameters" + (f", of which {trained:,} are trained" if trained < size else "")
    log.info("A model of %s; %s.", told, what)
    if step >= saver.steps:
        more = f"To go on, ask for more of them: `{run.double_length_option(step)}`."
        ended = "So is the schedule of its learning rate: to go on, begin a new run with its model."
        log.info("All %d steps are done. %s", step, more if folder.can_change_length(run) else ended)
    elif step:
        log.info("Going on after step %d.", step)
    if step < written:
        log.info("What follows up to step %d was measured before; it is done again, and not written again.", written)


def _log_how_to_resume(last: ExitStack, run: Recipe, told: str, *numbers: int) -> None:
    """Say so when all else is over, where it is read. last: is left last."""

    def tell(told: str, *numbers: object) -> None:
        last.callback(get_logger("recipes").warning, told, *numbers)

    agent = run.agent.path if isinstance(run, Run) else None
    if agent is not None and not is_importable(agent):
        tell(f"{told} Go on by running the program again: `fit` with the directory %s.", *numbers, run.directory)
        return
    key = "ETUDE_STORE_KEY=… " if isinstance(run, Run) and run.agent.store else ""
    again = f"{key}{etude_command()} {run.recipe} --resume {_from_here(run)}"
    tell(f"{told} Go on with: %s", *numbers, again)


def _from_here(run: Recipe) -> str:
    """The run's directory as a command that is typed here names it."""
    assert run.directory is not None
    here = Path.cwd()
    inside = run.directory.is_relative_to(here)
    return shlex.quote(str(run.directory.relative_to(here) if inside else run.directory))


def _conclude(run: Recipe, steps: int, seconds: float, looks: Sequence[str]) -> None:
    """The last word of a run that is done."""
    command, where = etude_command(), _from_here(run)
    look = ", ".join(f"`{command} {each} {where}`" for each in looks)
    get_logger("recipes").info(
        "Done after step %d, in %s. Look: %s; write the model: `%s export %s my-model`.",
        *(steps, format_seconds(seconds), look, command, where),
    )
