"""A run that failed before its first step: nothing was trained, so another run may begin in its directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from etude.checkpoint.names import list_paths
from etude.errors import ConfigError, RunError
from etude.observe import get_logger
from etude.observe.jsonl import METRICS_FILE, read_last_step
from etude.recipes.recipe import Recipe
from etude.recipes.run import directory as run_directory
from etude.recipes.run.resume import inputs
from etude.recipes.run.resume.session_log import SESSIONS, read_sessions

WRITTEN = (
    run_directory.OPTIONS,
    run_directory.INPUTS,
    METRICS_FILE,
    SESSIONS,
    run_directory.JOURNAL,
    f"{run_directory.JOURNAL}-wal",
    f"{run_directory.JOURNAL}-shm",
    run_directory.CHECKPOINTS,
    run_directory.RANK_LOGS,
    run_directory.SERVER_LOGS,
    run_directory.REPLAY,
    "evaluations",
    "report",
)
"""The entries of a directory that a run writes before the end of its first step."""


def continue_or_begin_anew(directory: Path, run: Recipe, threads: str) -> None:
    """Refuse to continue a run with other options or files, unless it failed before its first step. Then remove what it
    wrote, so that the run begins anew.

    threads: the numbers of threads that it computes with.
    """
    try:
        run_directory.check_same_options(directory, run)
        inputs.RunInputs(directory, run).check(threads)
    except (ConfigError, RunError):
        if not failed_before_first_step(directory):
            raise
        message = "The run in %s failed before its first step. What it wrote is removed, and the run begins anew."
        get_logger("recipes").warning(message, directory)
        for path in (directory / name for name in WRITTEN):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not path.is_dir():  # a link to a folder is the user's
                path.unlink(missing_ok=True)


def failed_before_first_step(directory: Path) -> bool:
    """Return whether all sessions of a run ended with an error, and none finished a step.

    A run with a store elsewhere has rollouts there, and one that was stopped or killed may be continued: they stay. So
    does a directory without options, whose files may be another program's.
    """
    sessions = read_sessions(directory)
    failed = all(session.how == "failed" and not session.last_step for session in sessions)
    trained = list_paths(directory / run_directory.CHECKPOINTS) or read_last_step(directory) > 0
    stays = trained or (directory / run_directory.STORE_RUN_FILE).exists()
    return failed and not stays and (directory / run_directory.OPTIONS).exists()
