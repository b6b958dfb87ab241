"""The training loop: collect, annotate, estimate, update, publish, evaluate, save.

`build` chooses the object behind each call. The details are in the packages of these objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from etude.errors import translate_memory_errors
from etude.recipes.event_loop import run_outside_event_loop
from etude.recipes.run.builders.assemble import build

if TYPE_CHECKING:
    from etude.recipes.interrupt import Interrupt
    from etude.recipes.run.config import Run
    from etude.recipes.run.steps.components import RunComponents


def train(run: Run, interrupt: Interrupt | None = None, tasks: Mapping[str, str] | None = None) -> Path:
    """Train until all steps are done, and return the run's directory.

    Ctrl-C finishes the step, saves it, and is raised again as `KeyboardInterrupt`. interrupt: the signal listener to
    use, when several runs follow each other in one process. tasks: see `build`.
    """

    def trained() -> Path:
        with build(run, interrupt, tasks=tasks) as parts:
            run_loop(parts)
            return parts.directory

    return run_outside_event_loop(trained)


def run_loop(parts: RunComponents) -> None:
    """Run the training loop over components that are ready."""
    parts.begin()
    for step in parts.checkpoint.remaining_steps():
        with translate_memory_errors(), parts.log.step(step) as at:
            with at.timer("collect"):
                groups = parts.source.next(step)  # scored and filtered; every wait in it is bounded
            with at.timer("annotate"):
                batch = parts.learners.annotate(groups.scored, step - 1)
            with at.timer("estimate"):
                batch = parts.learners.estimate(batch, step)
            with at.timer("update"):
                at.add(parts.learners.update(batch))
            with at.timer("publish"):
                at.add(parts.publish(step))
            at.add(parts.measure(groups))
            parts.record_rollouts(step, groups, batch)
            del groups, batch  # frees samples in the object store before the next step adds more
            with at.timer("evaluate"):
                at.add(parts.evaluate.maybe_run(step))
        parts.checkpoint.maybe_save(step)  # the step's metrics are written by now
        parts.evaluate.raise_failed()
