"""Saves in the background: a thread of each rank writes a checkpoint while the next steps run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from etude.checkpoint.files import Checkpoint, TensorTree, is_distributed
from etude.checkpoint.manager import CheckpointManager
from etude.errors import CheckpointError

MAX_WRITE_SECONDS = 1800.0
"""The longest wait for a checkpoint that is being written, and of a rank for another rank's part."""


class BackgroundSaver:
    """One rank's saves in the background, at most one at a time. All ranks make the same calls.

    consumes       tensors, which are copied before `begin` returns and may change then
    produces       checkpoints: `finish` returns one once it is on the disk under its name, or raises why it is not
    waits for      the disk, and for the other ranks' parts, on a thread
    unblocked by   the end of the write; or the end of the process, which leaves the checkpoints before
    """

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._step = 0
        self._write: Future[Checkpoint] | None = None

    def begin(self, checkpoints: CheckpointManager, step: int, tensors: TensorTree, facts: Mapping[str, Any]) -> None:
        """Copy the tensors to CPU memory, and begin to write them. `finish` must have returned the save before."""
        assert self._write is None, "the save before is not finished"
        if self._group is None and is_distributed():
            # the default group is used by training meanwhile
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=MAX_WRITE_SECONDS))
        write = checkpoints.begin(step, tensors, facts, copy=True, group=self._group)
        self._step = step
        self._write = _run_on_thread(write, f"etude-save-{step}")

    def finish(self, timeout: float = MAX_WRITE_SECONDS) -> Checkpoint | None:
        """Wait until the save is on the disk, and return its checkpoint; None if none was started.

        timeout: seconds, after which a `CheckpointError` is raised.
        """
        if self._write is None:
            return None
        write = self._write
        try:
            checkpoint = write.result(timeout)
        except TimeoutError as error:
            if write.done():  # the write itself failed so
                raise
            raise CheckpointError(
                f"Step {self._step} is still being saved after {timeout:g} s, so it does not count as saved. Earlier "
                f"checkpoints are whole. Check the disk."
            ) from error
        finally:
            if write.done():
                self._write = None
        return checkpoint


def _run_on_thread(action: Callable[[], Checkpoint], name: str) -> Future[Checkpoint]:
    future: Future[Checkpoint] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
