"""The checkpoints of a run: their atomic writing, their retention, and their recovery after a crash.

A save writes into a staging directory, and one rename gives it its final name when it is whole. So at every moment the
newest checkpoint is either the previous one or this one. A killed save leaves a staging directory, which is never read
as a checkpoint and which the next save removes. A name has the step and a sequence number, so that no checkpoint is
overwritten. This holds also for a run that goes back and saves the same step again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

import torch.distributed as dist

from etude.checkpoint.files import (
    Checkpoint,
    TensorTree,
    is_distributed,
    load_tensors,
    plan_write,
    read_checkpoint,
    write_manifest,
)
from etude.checkpoint.names import BEST, list_paths, sequence_number
from etude.checkpoint.storage import CheckpointWriter
from etude.errors import CheckpointError, EtudeError
from etude.integrity import read_json, sync_directory, write_json
from etude.observe import get_logger

T = TypeVar("T")

_STAGING = ".writing"
_REMEDY = (
    "It names the best checkpoint: bring it back from a copy, or remove it, and the next scored step is the best "
    "until a better one."
)
_log = get_logger("checkpoint")


def _do_nothing(_point: str) -> None:
    """Do nothing. Managers are sent to ranks, and a lambda cannot be."""


class CheckpointManager:
    """The checkpoints in one directory. One process writes, or all ranks of one process group."""

    def __init__(self, directory: Path, keep: int = 2, on_point: Callable[[str], None] = _do_nothing) -> None:
        """`on_point` is called at named points of a save, where tests kill the process."""
        self.directory = directory
        self.keep = keep
        self._on_point = on_point

    def save(self, step: int, tensors: TensorTree, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint, wait until it is on the disk, and remove the old ones.

        Every rank calls it, with its own shards of the tensors and the same facts. A failure leaves the earlier
        checkpoints unchanged.
        """
        return self.begin(step, tensors, facts)()

    def begin(
        self,
        step: int,
        tensors: TensorTree,
        facts: Mapping[str, Any],
        *,
        copy: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Callable[[], Checkpoint]:
        """Prepare a save as `save` does, and return the function that writes it. Every rank calls both.

        copy: copy the tensors to CPU memory now, so that they may change before the function is called, and while it
        runs on another thread. group: the ranks, in a process group that no other thread uses meanwhile.
        """
        staging = _on_rank_zero(self._make_staging)
        try:
            writer = plan_write(staging, tensors, copy=copy)
        except CheckpointError as error:
            hint = " Or make no copy: leave `checkpoint.async_save` out." if copy else ""
            raise CheckpointError(f"{self._failure(staging, step, error)}{hint}") from error
        kept_facts = deepcopy(facts) if copy else facts

        def write() -> Checkpoint:
            failure: Exception | None = None
            try:
                writer.write()
            except Exception as error:  # the other ranks wait for this rank's outcome
                failure = error if isinstance(error, OSError) else CheckpointError(f"{type(error).__name__}: {error}.")
            failure = _first_of_all_ranks(failure, group)
            if failure is not None:
                raise self._failure(staging, step, failure) from failure
            path = _on_rank_zero(lambda: self._finish(staging, step, kept_facts, writer), group)
            return Checkpoint(step, path, kept_facts)

        return write

    def newest(self, *, fall_back: bool = False) -> Checkpoint | None:
        """Return the newest checkpoint, with every byte verified, or None if there is none.

        A broken checkpoint is an error, which names the file and the newest whole checkpoint before it. With
        `fall_back` that whole checkpoint is returned instead.
        """
        first_error: CheckpointError | None = None
        for path in reversed(list_paths(self.directory)):
            try:
                checkpoint = read_checkpoint(path, checksums=True)
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
        """Return the checkpoints with all their files, oldest first."""
        checkpoints = []
        for path in list_paths(self.directory):
            try:
                checkpoints.append(read_checkpoint(path))
            except CheckpointError:
                continue  # `newest` reports it; here it is skipped
        return checkpoints

    def load(self, checkpoint: Checkpoint, tensors: TensorTree) -> None:
        """Load into these tensors in place. The checkpoint must have all of them, and may have more."""
        load_tensors(checkpoint, tensors)

    def mark_best(self, step: int, score: float, metric: str = "") -> bool:
        """Mark the checkpoint of this step as the best if its score is higher than the best so far.

        metric: the name of the score. The best score of another metric is replaced without a comparison. Only a saved
        step can be the best; returns True if this step now is. If a run went back and saved a step again, the last
        save counts, because the first may be damaged.
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
        _on_rank_zero(lambda: write_json(self.directory / BEST, entry))
        return True

    def best(self) -> Checkpoint | None:
        """Return the best checkpoint, which `mark_best` marked, or None."""
        best = self._read_best()
        return None if best is None else read_checkpoint(self.directory / best["name"], checksums=True)

    def best_score(self, metric: str = "") -> float | None:
        """Return the score of the best checkpoint, if it was marked by this metric."""
        best = self._read_best()
        return None if best is None or best["measured"] != metric else float(best["score"])

    # -- on rank 0 alone ------------------------------------------------------------------------------------------

    def _make_staging(self) -> Path:
        """Make an empty staging directory, and remove those of saves that were killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for abandoned in self.directory.glob(f"{_STAGING}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        staging = self.directory / f"{_STAGING}-{token_hex(4)}"
        staging.mkdir()
        return staging

    def _failure(self, staging: Path, step: int, error: Exception) -> CheckpointError:
        """Remove the staging directory, and return the error of a save."""
        free = shutil.disk_usage(self.directory).free / 2**20
        reason = f"{error}." if isinstance(error, OSError) else str(error)
        shutil.rmtree(staging, ignore_errors=True)
        return CheckpointError(
            f"Step {step} could not be saved in {self.directory}, where {free:.0f} MiB are free: {reason} Earlier "
            f"checkpoints are whole. Make room, or save to another disk."
        )

    def _finish(self, staging: Path, step: int, facts: Mapping[str, Any], writer: CheckpointWriter) -> Path:
        """Turn the written shards into a named checkpoint. A failure removes the staging directory."""
        try:
            self._on_point("checkpoint.writing")
            writer.write_index()
            write_manifest(staging, step, facts)
            self._on_point("checkpoint.renaming")
            number = max(map(sequence_number, list_paths(self.directory)), default=0) + 1
            path = self.directory / f"step-{step:08d}.{number}"
            staging.rename(path)
            sync_directory(self.directory)
        except (CheckpointError, OSError) as error:
            raise self._failure(staging, step, error) from error
        self._remove_old()
        return path

    def _remove_old(self) -> None:
        """Remove the checkpoints that are older than the newest `keep` whole ones, except the best."""
        best = self._read_best()
        oldest = self.list_complete()[-self.keep :][0].path
        for path in takewhile(lambda path: path != oldest, list_paths(self.directory)):
            if best is None or path.name != best["name"]:
                shutil.rmtree(path)

    # -- helpers -------------------------------------------------------------------------------------------------

    def _read_best(self) -> dict[str, Any] | None:
        path = self.directory / BEST
        if not path.is_file():
            return None
        entry = read_json(path, _REMEDY)
        return entry if (self.directory / entry["name"]).is_dir() else None


def _on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action on rank 0. Every rank waits for it, and gets its result or its error."""
    if not is_distributed():
        return action()
    shared: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            shared[0] = action()
        except (EtudeError, OSError) as error:
            shared[1] = error
    dist.broadcast_object_list(shared, src=0, group=group)
    if shared[1] is not None:
        raise shared[1]
    result: T = shared[0]
    return result


def _first_of_all_ranks(failure: Exception | None, group: dist.ProcessGroup | None) -> Exception | None:
    """Wait until every rank has written, and return the first rank's failure, if any."""
    if not is_distributed():
        return failure
    failures: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)
    return next(filter(None, failures), None)
