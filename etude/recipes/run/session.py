"""The code around the loop of every run, of any recipe: its directory, its threads, and how it ends.

Nothing is written for a run that cannot start. An interrupted run logs the command that resumes it. A finished run logs
the commands that use it.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from etude.config.env import etude_command
from etude.config.secrets import mask_text
from etude.observe import configure_logging, format_seconds, get_logger
from etude.recipes.interrupt import Interrupt
from etude.recipes.recipe import Recipe
from etude.recipes.run import directory as run_directory
from etude.recipes.run.config import Run
from etude.recipes.run.machine.device import check_precision, describe_device
from etude.recipes.run.resume.first_step import continue_or_begin_anew
from etude.recipes.run.resume.precision import resolve_precision
from etude.recipes.run.resume.resume_command import describe_resume
from etude.recipes.run.resume.session_log import record_session
from etude.recipes.run.steps.save_resume import CheckpointSaver
from etude.train import MeshConfig

R = TypeVar("R", bound=Recipe)


class SessionComponents(Protocol):
    """The components of a loop, as far as the session uses them."""

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
    inspect_commands: Sequence[str],
    interrupted_note: str = "",
) -> Iterator[P]:
    """Yield the components of a run, open, in its locked directory; close them at the end.

    Raises `KeyboardInterrupt` if the user interrupted the run.

    interrupt: the signal listener to use, when several runs follow each other. check: refuses a run that cannot work,
    before anything is created. inspect_commands: the commands that show the results. interrupted_note: a sentence part
    about the data that an unfinished step leaves behind.
    """
    configure_logging(run.observe.level, mask=mask_text)
    with ExitStack() as final_stack, ExitStack() as stack:
        warn = get_logger("recipes").warning
        listener = interrupt or stack.enter_context(Interrupt(warn))
        listener.may_finish_step = False
        run = resolve_precision(run)
        check_precision(run.compute_device(), run.train.precision)
        check(run)
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        if run.threads is not None:
            torch.set_num_threads(run.threads)
        directory = run.directory or run_directory.new_directory(Path("runs"), run.recipe)
        run = run_directory.with_absolute_paths(run.model_copy(update={"directory": directory}))
        assert run.directory is not None
        stack.enter_context(run_directory.lock_directory(run.directory))
        began = time.perf_counter()
        continue_or_begin_anew(run.directory, run, run.describe_threads())
        parts = assemble(run, run.directory, listener, stack)
        saver, first = parts.checkpoint, parts.checkpoint.step
        listener.may_finish_step = True
        record = record_session(
            run.directory,
            lambda: saver.step,
            lambda: saver.step >= saver.steps,
            preset=run.preset,
            device=describe_device(run.compute_device(), run.ranks),
        )
        try:
            with record:
                yield parts
        except KeyboardInterrupt:
            if saver.step < saver.steps:
                saved = (
                    f"Step {saver.saved_step} is the last that was saved"
                    if saver.saved_step
                    else "No step was saved yet"
                )
                message = f"Stopped at once, in step %d. {saved}{interrupted_note}."
                final_stack.callback(warn, f"{message} %s", saver.step + 1, _how_to_resume(run))
            raise
        if listener.stop_requested and saver.step < saver.steps:
            stopped = "Stopped after step %d of %d. %s"
            final_stack.callback(warn, stopped, saver.step, saver.steps, _how_to_resume(run))
            raise KeyboardInterrupt
        if first < saver.step == saver.steps:
            _conclude(_from_here(run.directory), saver.steps, time.perf_counter() - began, inspect_commands)


def log_start(
    run: Recipe, size: int, trained: int, data_summary: str, saver: CheckpointSaver, last_written_step: int
) -> None:
    """Log the model's size, the number of trained parameters, the data, and the step that the run continues from.

    last_written_step: the last step whose metrics were already written.
    """
    log = get_logger("recipes")
    step = saver.step
    engine = run.train.choose_engine(run.ranks)
    size_text = f"{size:,} parameters" + (f", of which {trained:,} are trained" if trained < size else "")
    log.info("A model of %s; %s; %s.", size_text, _describe_engine(engine, run.mesh, run.ranks), data_summary)
    if step >= saver.steps:
        longer_remedy = f"To continue, ask for more of them: `{run.double_length_option(step)}`."
        ended = "Its learning-rate schedule is done too: to continue, start a new run with its model."
        log.info("All %d steps are done. %s", step, longer_remedy if run.length_may_change else ended)
    elif step:
        log.info("Going on after step %d.", step)
    if step < last_written_step:
        log.info(
            "The steps up to %d were measured before: they run again, and their metrics are not written again.",
            last_written_step,
        )


def _describe_engine(engine: str, mesh: MeshConfig, ranks: int) -> str:
    """Return the train engine that was chosen, and the ranks of its mesh."""
    if engine == "local":
        return "train engine: local"
    data = ranks // (mesh.replicas * mesh.ranks_per_rollout)
    sizes = {"replicas": mesh.replicas, "data": data, "context": mesh.context, "tensor": mesh.tensor}
    shape = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")
    experts = "" if mesh.expert == 1 else f", experts divided by {mesh.expert}"
    return f"train engine: fsdp ({shape}{experts})"


def _how_to_resume(run: Recipe) -> str:
    """Return the sentence that says how the run is continued."""
    agents = run.agent.names if isinstance(run, Run) else []
    has_store = isinstance(run, Run) and run.agent.store is not None
    return describe_resume(run.recipe, _from_here(run.directory), agents, has_store=has_store)


def _from_here(directory: Path | None) -> str:
    """Return a run's directory as the user would type it in the current directory."""
    assert directory is not None
    here = Path.cwd()
    inside = directory.is_relative_to(here)
    return shlex.quote(str(directory.relative_to(here) if inside else directory))


def _conclude(where: str, steps: int, seconds: float, inspect_commands: Sequence[str]) -> None:
    """Log the last line of a finished run."""
    command = etude_command()
    inspect_list = ", ".join(f"`{command} {name} {where}`" for name in inspect_commands)
    get_logger("recipes").info(
        "Done after step %d, in %s. Look: %s; write the model: `%s export %s my-model`.",
        steps,
        format_seconds(seconds),
        inspect_list,
        command,
        where,
    )
