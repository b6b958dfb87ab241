"""Builds the components of a training run from its options.

Heavy modules are imported when a run is built, so that starting a run need not load them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from etude.lazy import pause_gc
from etude.recipes.interrupt import Interrupt

if TYPE_CHECKING:
    from etude.agents.agent import Agent
    from etude.recipes.run.config import Run
    from etude.recipes.run.steps.components import RunComponents


@contextmanager
def build(
    run: Run, interrupt: Interrupt | None = None, agent: Agent | None = None, tasks: Mapping[str, str] | None = None
) -> Iterator[RunComponents]:
    """Yield the components of a run, checked against each other and open; close them at the end.

    Nothing is written for a run that cannot start. An interrupted run ends in a `KeyboardInterrupt`. interrupt: the
    signal listener to use, when several runs follow each other. agent: the agent that makes rollouts, instead of the
    one that `agent.path` names. tasks: see `run_directory.write_tasks`.
    """
    from etude.recipes.hub import resolve_hub_names
    from etude.recipes.run.resume.missing_inputs import check_required

    run = resolve_hub_names(run)
    check_required(run, tuple(tasks or ()))
    with ExitStack() as stack:
        with pause_gc():
            from etude.recipes.run.builders.hubs import name_task_files
            from etude.recipes.run.builders.parts import assemble_parts
            from etude.recipes.run.rules import checks
            from etude.recipes.run.session import run_session

            session = run_session(
                name_task_files(run),
                partial(assemble_parts, agent=agent, tasks=tasks or {}),
                interrupt,
                check=checks.check_run,
                inspect_commands=("plot", "answers"),
                interrupted_note="; the answers sampled since are kept",
            )
            parts = stack.enter_context(session)
        yield parts
