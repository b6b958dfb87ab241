"""`etude demo algorithms`: train with each loss, print live curves, and name the files and the next commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from etude.config.secrets import mask_text
from etude.demo.tabular.compare import ComparedRun, build_report, new_directory, select_runs, train_run
from etude.demo.tabular.curves import LiveTable, draw_curves
from etude.demo.tabular.run import DemoRun
from etude.errors import ConfigError
from etude.observe import configure_logging, make_console
from etude.recipes.interrupt import Interrupt

NEXT = (
    ("etude demo algorithms loss=gspo loss.clip_high=0.01", "one loss, with one of its options"),
    ("etude demo algorithms advantage=rloo", "every loss with another advantage"),
    ("etude demo algorithms kl=reverse kl.coefficient=0.1", "every loss with a KL term to the first policy"),
    ("etude demo algorithms --multirun loss=ppo seed=0,1,2", "one run for each seed"),
    ("etude config show", "every option, with its meaning"),
)
"""The commands to try next, with comments."""


def run_demo(overrides: Sequence[str], file: Path | None = None, *, sweep: bool = False) -> dict[str, Any]:
    """Train the selected runs, print and plot them, and return the report."""
    compared = select_runs(overrides, file, sweep=sweep)
    run = next(entry.run for entry in compared if entry.run is not None)
    configure_logging(run.observe.level, mask=mask_text)
    console = make_console(run.observe.console)
    directory = new_directory(run.directory)
    figure = directory / "curves.png"
    _introduce(console, run, compared)
    with _one_thread(), _checking_interrupt() as check, LiveTable(console, compared) as screen:

        def stepped() -> None:
            check()
            screen.on_step()

        for entry in compared:
            if not entry.refused:
                train_run(entry, directory / entry.folder, stepped)
            screen.on_finish(entry)
    trained = [entry for entry in compared if not entry.refused]
    if not trained:
        raise ConfigError(compared[0].refused)
    draw_curves(trained, figure)
    _conclude(console, compared, directory)
    return build_report(compared, directory, figure)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread inside the block: a table of logits is too small for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _checking_interrupt() -> Iterator[Callable[[], None]]:
    """Yield a function that raises `KeyboardInterrupt` if a library has swallowed a Ctrl-C.

    The first optimizer imports sympy, which catches every exception of its own imports.
    """
    with Interrupt(lambda _: None) as interrupt:
        interrupt.may_finish_step = False  # nothing is saved, so the first Ctrl-C stops at once

        def check() -> None:
            if interrupt.stop_requested:
                raise KeyboardInterrupt

        yield check


def _introduce(console: Console, run: DemoRun, compared: Sequence[ComparedRun]) -> None:
    what = f"{len(compared)} runs, one after another" if len(compared) > 1 else "one run"
    lines = [
        "Two prompts, three tokens, thirty answers: a problem with an exactly known expected reward J.",
        f"A table of logits is trained on sampled answers, {what}: {run.steps} steps of "
        f"{run.groups} groups of {run.group_size}, {run.mini_batches} updates a step.",
        "`gained` is the gain of J as a share of the way to the optimum.",
    ]
    console.print(Text("\n".join([*lines, *run.warnings()]) + "\n"), soft_wrap=True)


def _conclude(console: Console, compared: Sequence[ComparedRun], directory: Path) -> None:
    for entry in compared:
        if entry.refused:
            console.print(Text.assemble((entry.name, "bold yellow"), f" was refused: {entry.refused}"), soft_wrap=True)
    console.print()
    for name, path in (("curves", "curves.png"), ("metrics", "*/metrics.jsonl"), ("options", "*/run.yaml")):
        console.print(Text.assemble((f"{name:<9}", "dim"), str(directory / path)), soft_wrap=True)
    console.print()
    console.print(Text("Try next:"), soft_wrap=True)
    wide = max(len(command) for command, _ in NEXT)
    for command, why in NEXT:
        console.print(Text.assemble(f"  {command:<{wide}}", (f"   # {why}", "dim")), soft_wrap=True)
