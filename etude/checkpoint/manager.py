"""The checkpoints of a run: written beside each other, kept as long as they are wanted, found again after a crash.

A save goes into a directory of another name, and takes its own by one rename when it is whole: at every moment the
newest checkpoint is either the one before or this one. A save that was killed leaves a directory that nobody takes for
a checkpoint, and the next save removes it. Names carry the step and a running number, so that nothing is ever written
over, also where a run goes back to an earlier step and saves the same one again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from etude.checkpoint.files import (
    Checkpoint,
    TensorTree,
    load_tensors,
    read_checkpoint,
    verify_checkpoint,
    write_manifest,
    write_tensors,
)
from etude.errors import CheckpointError, EtudeError
from etude.integrity import read_json, sync_directory, write_json
from etude.observe import get_logger

__all__ = ["CheckpointManager"]

T = TypeVar("T")

_NAME = re.compile(r"step-(\d{8,})\.(\d+)")
_WRITING = ".writing"
_BEST = "best.json"
_REMEDY = (
    "It says which checkpoint is the best: bring it back from a copy, or remove it, and the next step that is scored "
    "is the best until a better one."
)
_log = get_logger("checkpoint")


def _do_nothing(_point: str) -> None:
    """What happens at a point of a save, where nobody wants anything."""


class CheckpointManager:
    """The checkpoints in one directory. One process (or one process group, all of its ranks) writes."""

    def __init__(self, directory: Path, keep: int = 2, on_point: Callable[[str], None] = _do_nothing) -> None:
        """`on_point` is called at named points of a save, where tests kill the process."""
        self.directory = directory
        self.keep = keep
        self._on_point = on_point

    def save(self, step: int, tensors: TensorTree, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint and return once it is on the disk; then let go of those that are no longer wanted.

        Every rank calls it, with its own shards of the tensors and the same facts. If it fails, the checkpoints that
        were there are there still.
        """
        staging = self.directory / _WRITING
        self._run_on_rank_zero(lambda: self._clear(staging))
        failure: CheckpointError | None = None
        try:
            write_tensors(staging, tensors)
        except CheckpointError as error:
            failure = error
        path = self._run_on_rank_zero(lambda: self._finish(staging, step, facts, failure))
        return Checkpoint(step, path, facts)

    def newest(self, *, fall_back: bool = False) -> Checkpoint | None:
        """The newest checkpoint, every byte of it verified; None where there is none.

        A broken one is an error that names the file and the newest whole one before it. With `fall_back` that one is
        returned instead.
        """
        first_error: CheckpointError | None = None
        for path in reversed(self._paths()):
            try:
                checkpoint = verify_checkpoint(path)
            except CheckpointError as error:
                first_error = first_error or error
                continue
            if first_error is None:
                return checkpoint
            if fall_back:
                _log.warning(f"{first_error} Going back to {checkpoint.path}, of step {checkpoint.step}.")
                return checkpoint
            raise CheckpointError(
                f"{first_error} The newest whole checkpoint before it is {checkpoint.path.name}, of step "
                f"{checkpoint.step}. Bring the damaged file back from a copy, or set `checkpoint.fall_back=true` "
                f"(`etude export` takes --fall-back)."
            ) from first_error
        if first_error is not None:
            raise CheckpointError(
                f"{first_error} There is no whole checkpoint before it. Bring the damaged file back from a copy, or "
                f"begin a new run in another directory."
            ) from first_error
        return None

    def list_complete(self) -> list[Checkpoint]:
        """Those that are there with all their files, oldest first."""
        checkpoints = []
        for path in self._paths():
            try:
                checkpoints.append(read_checkpoint(path))
            except CheckpointError:
                continue  # `newest` complains of it; here it counts for nothing
        return checkpoints

    def load(self, checkpoint: Checkpoint, tensors: TensorTree) -> None:
        """Read into these tensors, in place. The checkpoint may hold more than is asked for, never less."""
        load_tensors(checkpoint, tensors)

    def mark_best(self, step: int, score: float, metric: str = "") -> bool:
        """Keep the checkpoint of this step as the best, if it has a higher score than the best so far.

        `measured` says by what. A score by something else compares with nothing, and the new one takes its place.
        Only a step that was saved can be the best: returns whether this one now is. One that a run which went back has
        saved again counts as it was saved last: the first may be damaged.
        """
        saved = [checkpoint for checkpoint in self.list_complete() if checkpoint.step == step]
        if not saved:
            return False
        entry = {"name": saved[-1].path.name, "step": step, "score": score, "measured": metric}
        best = self._read_best()
        if best is not None and best["measured"] == metric:
            saved_again = best["step"] == step and best["name"] != entry["name"]
            if score <= best["score"] and not saved_again:
                return False
        self._run_on_rank_zero(lambda: write_json(self.directory / _BEST, entry))
        return True

    def best(self) -> Checkpoint | None:
        """The checkpoint that `mark_best` chose."""
        best = self._read_best()
        return None if best is None else verify_checkpoint(self.directory / best["name"])

    def best_score(self, metric: str = "") -> float | None:
        """The score that the best checkpoint was marked with, if it was measured so."""
        best = self._read_best()
        return None if best is None or best["measured"] != metric else float(best["score"])

    # -- what the first rank does alone ---------------------------------------------------------------------------

    def _clear(self, staging: Path) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        return staging

    def _finish(self, staging: Path, step: int, facts: Mapping[str, Any], failure: CheckpointError | None) -> Path:
        """From shards on the disk to a checkpoint with a name; whatever goes wrong, the half-written one goes."""
        try:
            if failure is not None:
                raise failure
            self._on_point("checkpoint.writing")
            write_manifest(staging, step, facts)
            self._on_point("checkpoint.renaming")
            number = max((_sequence_number(path) for path in self._paths()), default=0) + 1
            path = self.directory / f"step-{step:08d}.{number}"
            staging.rename(path)
            sync_directory(self.directory)
        except (CheckpointError, OSError) as error:
            free = shutil.disk_usage(self.directory).free / 2**20
            shutil.rmtree(staging, ignore_errors=True)
            raise CheckpointError(
                f"Step {step} could not be saved in {self.directory}, where {free:.0f} MiB are free: {error} Earlier "
                f"checkpoints are whole. Make room, or save to another disk."
            ) from error
        self._remove_old()
        return path

    def _remove_old(self) -> None:
        """Remove what is older than the oldest of the newest whole ones, the best excepted."""
        best = self._read_best()
        oldest = _sequence_number(self.list_complete()[-self.keep :][0].path)
        for path in self._paths():
            if _sequence_number(path) < oldest and (best is None or path.name != best["name"]):
                shutil.rmtree(path)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _paths(self) -> list[Path]:
        """Every directory with a checkpoint's name, in the order they were written."""
        if not self.directory.is_dir():
            return []
        return sorted((path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)), key=_sequence_number)

    def _read_best(self) -> dict[str, Any] | None:
        path = self.directory / _BEST
        if not path.is_file():
            return None
        entry = read_json(path, _REMEDY)
        return entry if (self.directory / entry["name"]).is_dir() else None

    def _run_on_rank_zero(self, action: Callable[[], T]) -> T:
        """Let the first rank act, and every rank wait for it and share what came of it."""
        if not (dist.is_available() and dist.is_initialized()):
            return action()
        shared: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                shared[0] = action()
            except (EtudeError, OSError) as error:
                shared[1] = error
        dist.broadcast_object_list(shared, src=0)
        if shared[1] is not None:
            raise shared[1]
        result: T = shared[0]
        return result


def _sequence_number(path: Path) -> int:
    """Its place in the order of writing."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} is not the name of a checkpoint"
    return int(match[2])
