"""The tools of the embedded engine's thread: its commands, the copy of weights, its errors, its OpenMP workers.

Commands run between two tokens:

    consumes       commands, from any thread and any event loop
    produces       the result or the error of each, for its caller
    waits for      commands, while there is nothing to compute; a caller waits for the current step and for its turn
    unblocked by   a command, or `close`: waiting callers then get an error, and later commands are refused

Every thread that calls a parallel kernel gets its own OpenMP workers, which stay for its next call. GNU's OpenMP
counts all of them. Once there are more than processors, workers no longer wait awake for the next kernel but sleep
after each. A model of many small kernels then takes nearly twice as long. A trainer and an engine in two threads of one
process do not compute at the same time. So each releases its workers when it is the other's turn.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from etude.errors import EngineError

if TYPE_CHECKING:
    from etude.models import Model
    from etude.rollout.config import TorchEngineConfig

T = TypeVar("T")

CALL_TIMEOUT = 600.0
"""Seconds that a caller waits for the result of a command."""


class EngineCommands:
    """A queue of commands that one thread runs in their order."""

    def __init__(self) -> None:
        self._commands: deque[tuple[Callable[[], object], Sequence[Future[Any]]]] = deque()
        self._changed = threading.Condition()
        self._closed = ""

    def submit(self, command: Callable[[], object], *futures: Future[Any]) -> None:
        """Queue a command. If it raises, the error goes to `futures`."""
        with self._changed:
            if self._closed:
                raise EngineError(self._closed)
            self._commands.append((command, futures))
            self._changed.notify()

    def wake(self) -> None:
        """Have the thread look for work again, unless it takes no further commands."""
        with self._changed:
            if not self._closed:
                self._commands.append((lambda: None, ()))
                self._changed.notify()

    def call(self, command: Callable[[], T]) -> T:
        """Queue a command, and wait for its result."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self.submit(lambda: future.set_result(command()), future)
        try:
            return future.result(CALL_TIMEOUT)
        except TimeoutError:
            return _late_result(future)

    async def call_async(self, command: Callable[[], T]) -> T:
        """Do the same on an event loop. A cancelled wait does not cancel the command."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self.submit(lambda: future.set_result(command()), future)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), CALL_TIMEOUT)
        except TimeoutError:
            return _late_result(future)

    def run_pending(
        self, has_work: Callable[[], bool], before: Callable[[], None], on_idle: Callable[[], None]
    ) -> bool:
        """Run the queued commands, after `before`; wait for one if there is no work. Return False after `close`."""
        with self._changed:
            while not (self._commands or self._closed or has_work()):
                on_idle()
                self._changed.wait()
            count, closed = len(self._commands), self._closed
        if count:
            before()
        for _ in range(count):
            command, futures = self._commands.popleft()
            try:
                command()
            except BaseException as error:
                _fail_futures(futures, error)
        return not closed

    def close(self) -> None:
        """Accept no further commands. The queued ones still run."""
        with self._changed:
            self._closed = self._closed or "The engine is closed."
            self._changed.notify()

    def fail_pending(self, error: EngineError) -> None:
        """Accept no further commands, and fail the queued ones with this error."""
        with self._changed:
            self._closed = self._closed or str(error)
            commands = self._commands
            self._commands = deque()
        for _, futures in commands:
            _fail_futures(futures, error)


def _fail_futures(futures: Iterable[Future[Any]], error: BaseException) -> None:
    """Set the error on each future that is not done."""
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _late_result(future: Future[T]) -> T:
    """Return the result if the command is done after all; else raise. The command itself may have raised
    `TimeoutError`."""
    if not future.done():
        raise EngineError(f"The engine has not answered for {CALL_TIMEOUT:g} s: it is still computing a step.")
    return future.result()


class WeightCopy:
    """One copy, weight by weight; the experts of a weight may come one by one. Frozen weights may be missing."""

    def __init__(self, model: Model) -> None:
        self._read_name = model.read_expert_name
        self._missing = dict(model.named_weights())
        self._experts: dict[str, set[int]] = {}
        self.has_begun = False
        """True if a weight was written."""

    @property
    def is_whole(self) -> bool:
        """True if every weight was written, frozen ones too."""
        return not self._missing

    def run(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write all of these weights, or none if there are none. After an error they may be a mixture."""
        with torch.inference_mode(False), torch.no_grad():
            for name, weight in weights:
                held = self._target(name)
                if held is None or held.shape != weight.shape:
                    raise EngineError(
                        f"The weight {name} {list(weight.shape)} was sent. The engine's model does not have it, has it "
                        f"in another shape, or got it before. The two models are of different architectures."
                    )
                self.has_begun = True
                held.copy_(weight)
                self._note(name)
        unsent = [name for name, held in self._missing.items() if held.requires_grad]
        if self.has_begun and unsent:
            raise EngineError(f"{len(unsent)} weights were not sent, {min(unsent)} among them: send all or none.")

    def _target(self, name: str) -> Tensor | None:
        """Return the memory of a weight, or of one expert of it, that was not written yet."""
        parameter, expert = self._read_name(name)
        held = self._missing.get(parameter)
        if held is None or expert is None:
            return held
        is_new = expert < len(held) and expert not in self._experts.get(parameter, ())
        return held[expert] if is_new else None

    def _note(self, name: str) -> None:
        """Note that a weight, or one expert of it, was written."""
        parameter, expert = self._read_name(name)
        if expert is not None:
            written = self._experts.setdefault(parameter, set())
            written.add(expert)
            if len(written) < len(self._missing[parameter]):
                return
        del self._missing[parameter]


def to_engine_error(error: Exception, config: TorchEngineConfig) -> EngineError:
    """Return the error as a sentence. If memory ran out, it names the options to lower."""
    if isinstance(error, EngineError):
        return error
    engine_error: EngineError
    kv_gib = "its default" if config.kv_gib is None else f"{config.kv_gib:g}"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error):
        engine_error = EngineError(
            f"The engine ran out of memory. Lower kv_gib (now {kv_gib}), max_num_batched_tokens (now "
            f"{config.max_num_batched_tokens}) or max_num_seqs (now {config.max_num_seqs}). ({error})"
        )
    else:
        engine_error = EngineError(f"A step of the engine failed, and all requests under way with it: {error!r}")
    engine_error.__cause__ = error
    return engine_error


def return_unused_memory(device: torch.device) -> None:
    """Give back the memory of a GPU that torch keeps and does not use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


_SOFT = 1  # omp_pause_soft: settings stay, workers go


def _find_pause_function() -> Callable[[int], int] | None:
    try:
        pause: Callable[[int], int] = ctypes.CDLL("libgomp.so.1").omp_pause_resource_all
    except (OSError, AttributeError):
        return None  # another OpenMP, which does not count workers
    return pause


_PAUSE = _find_pause_function()


def release_omp_workers() -> None:
    """End the workers of the calling thread. Its next parallel kernel makes new ones, in microseconds."""
    if _PAUSE is not None:
        _PAUSE(_SOFT)
