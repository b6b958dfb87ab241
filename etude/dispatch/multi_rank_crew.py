"""The common part of every crew of several ranks: calls that are split and joined, and a watchdog.

The watchdog thread starts the ranks, watches them, and ends them. A failure of one rank ends them all, since the others
wait for it, or soon would. These are failures:

- a rank ended, or did not start in time;
- it sent no heartbeat (it is stopped, or its machine thrashes);
- a call raised an error in it and not in the others, which may then wait for it in vain;
- it sends heartbeats but does not end a call that another rank has ended (a deadlock, an endless loop, a hung disk).

consumes       calls to all ranks, one at a time; async calls to one of them, any number at once
produces       their results, or an error that names the rank
waits for      the ranks
unblocked by   their replies, and the watchdog: every wait ends when the ranks do
"""

from __future__ import annotations

import itertools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from etude.dispatch.config import CrewConfig
from etude.dispatch.messages import (
    AsyncCallRequest,
    CallRequest,
    CancelAsyncCall,
    PayloadRef,
    RankLogRecord,
    RankSetup,
    deserialize,
    serialize,
)
from etude.dispatch.rank_handle import RankFailure, RankHandle
from etude.dispatch.split_call import Partitioner, SplitCall, split_call
from etude.errors import ConfigError, CrewError
from etude.observe import LogLevel, format_seconds, get_logger
from etude.protocols import Crew, get_dispatch_mode

M = TypeVar("M", bound=RankHandle)
R = TypeVar("R")

TICK = 0.1
"""Seconds between two checks of the ranks."""
GRACE_SECONDS = 3.0
"""Seconds that the other ranks may take to end a call that has raised an error in one."""
STARTUP_SILENCE = 60.0
"""Seconds without a heartbeat that a rank may have while it starts. Loading libraries blocks all its threads."""
MIN_CALL_LIMIT, CALL_LIMIT_TIMEOUTS = 6 * 3600.0, 10.0
"""The limit in seconds of a call that no rank ends, or as many times `crew.timeout` if that is more. A hang in all
ranks at once differs from work only by how long it takes."""
REPORT_INTERVAL = 10.0
"""Seconds between two log lines about what the start waits for."""


RESTART_HINT = "Start the run again: it continues from its last checkpoint."


class Rendezvous(NamedTuple):
    """The address at which ranks meet."""

    host: str
    port: int
    listener: int
    """The file descriptor at which rank 0 listens there."""


class MultiRankCrew(Crew, Generic[M]):
    """Several ranks, called as one."""

    sees_every_gpu: ClassVar[bool] = True
    """True if each rank sees all GPUs and uses the one of its number; false if it sees only its own."""

    def __init__(
        self,
        handles: Sequence[M],
        *,
        share: Partitioner,
        config: CrewConfig | None = None,
        threads: int = 1,
        device: Literal["cpu", "cuda"] = "cpu",
        level: LogLevel = "warning",
        repeats: int = 1,
    ) -> None:
        """`share` assigns rollouts to ranks. Each rank computes with `threads` threads, and `repeats` ranks in a row
        get the same rollouts."""
        self._repeats = repeats
        self._config = config or CrewConfig()
        self._share = share
        self._level = level
        self._threads = threads
        self._device = device
        self._handles = handles
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._call_lock = threading.Lock()
        self._rendezvous: Future[Rendezvous] = Future()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._failure_announced = threading.Event()
        """Set when every caller got the error that ended the crew."""
        self._call = _CrewCall("", {})
        self._first_ranks: dict[str, int] = {}
        self._watchdog = threading.Thread(target=self._watch, name="etude-crew", daemon=True)

    # -- for subclasses -------------------------------------------------------------------------------------------

    def _spawn(self) -> Rendezvous:
        """Start every rank, on the watchdog's thread."""
        raise NotImplementedError

    def _serialize(self, value: object) -> PayloadRef:
        return serialize(value)

    def _deserialize(self, payload_ref: PayloadRef) -> Any:
        return deserialize(payload_ref)

    def _handle_reply(self, reply: Future[Any], read: Callable[[Future[Any]], None]) -> None:
        """Read the reply to an async call, on the thread that received it, or on another if that may take long."""
        read(reply)

    # -- for the controller ---------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self._handles)

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [handle.pid for handle in self._handles]

    def call(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call `Worker.method` (the function on the class) on all ranks, split and joined as its dispatch mode says."""
        split = split_call(get_dispatch_mode(method), args, kwargs, self.ranks, self._share, self._repeats)
        replies = self._call_ranks(method, split)
        result: R = split.join([partial(self._deserialize, reply) for reply in replies])
        return result

    def _call_ranks(self, method: Callable[..., Any], split: SplitCall, *, keep: bool = False) -> list[PayloadRef]:
        """Return each rank's reply, still serialized; with `keep`, references to batches. An unused reply is empty."""
        payloads = [self._serialize_call(method, *arguments) for arguments in split.arguments]
        ranks_per_share = self.ranks // len(payloads)
        with self._call_lock:
            number = next(self._numbers)
            replies: dict[RankHandle, Future[Any]] = {
                handle: self._expect_reply(handle, number) for handle in self._handles
            }
            call = self._call = _CrewCall(method.__qualname__, replies)
            for handle in self._handles:
                payload = payloads[handle.rank // ranks_per_share]
                handle.send(CallRequest(number, payload, keep, split.uses_answer_of(handle.rank)))
            # each future gets a reply, or the watchdog's error
            answers = [future.result() for future in call.replies.values()]
        if call.first_failure is not None:
            raise call.first_failure.to_exception(call.name)
        return answers

    def submit(
        self, rank: int, method: Callable[..., Any], *args: Any, on_start: Callable[[], None] | None = None
    ) -> Future[Any]:
        """Call a coroutine method of one rank's worker, concurrently with everything else. Cancel the future to stop
        it.

        `on_start` is called, on another thread, once the method calls the `on_start` that it is given.
        """
        payload = self._serialize_call(method, *args)
        handle = self._handles[rank]
        number = next(self._numbers)
        result: Future[Any] = Future()

        def on_reply(reply: Future[Any]) -> None:
            if result.set_running_or_notify_cancel():
                self._handle_reply(reply, read)

        def read(reply: Future[Any]) -> None:
            try:
                value = reply.result()
                if isinstance(value, RankFailure):
                    raise value.to_exception(method.__qualname__)
                result.set_result(self._deserialize(value))
            except Exception as error:
                result.set_exception(error)

        def on_done(future: Future[Any]) -> None:
            if future.cancelled():
                handle.discard_reply(number)
                handle.send(CancelAsyncCall(number))

        self._expect_reply(handle, number, on_start).add_done_callback(on_reply)
        result.add_done_callback(on_done)
        handle.send(AsyncCallRequest(number, payload))
        return result

    def _serialize_call(self, function: Callable[..., object], *args: Any) -> PayloadRef:
        try:
            return self._serialize((function, *args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"A value for the ranks cannot be sent to another process ({error}). Define it at the top of a module, "
                f"and name it `module:Name`."
            ) from error

    def close(self) -> None:
        """Kill every rank, even one in the middle of a call."""
        self._closing.set()
        if self._watchdog.ident is not None:
            self._watchdog.join()

    def _expect_reply(self, handle: RankHandle, number: int, on_start: Callable[[], None] | None = None) -> Future[Any]:
        """Return a future reply; it fails at once if the crew has ended."""
        assert not self._closing.is_set(), "this crew was closed"
        with self._lock:
            future, error = handle.expect_reply(number, on_start), self._error
        if error is not None:
            handle.fail(error)
        return future

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, factory: Callable[..., object], *args: object) -> None:
        """Start the ranks, each with `factory(*args)` as its worker. If that fails, none is left."""
        try:
            self._wait_until_ready(self._serialize_call(factory, *args))
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, payload: PayloadRef) -> None:
        """Wait until every rank is ready, and log from time to time which are not. The watchdog bounds the wait."""
        log = get_logger("dispatch")
        start = time.perf_counter()
        count = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        log.info("Starting %s; threads of each: %d.", count, self._threads)
        self._watchdog.start()
        pending = {self._expect_reply(handle, 0): handle for handle in self._handles}
        rendezvous = self._rendezvous.result()
        for handle in self._handles:
            handle.send(self._setup_of(handle, rendezvous, payload))
        while pending:
            done, _ = wait(pending, REPORT_INTERVAL, FIRST_COMPLETED)
            for future in done:
                handle, reply = pending.pop(future), future.result()
                if isinstance(reply, RankFailure):
                    raise reply.to_exception("its start")
                handle.ready = True
            elapsed = format_seconds(time.perf_counter() - start)
            if not done:
                steps = ", ".join(f"rank {handle.rank} is {handle.startup_step}" for handle in pending.values())
                log.info("After %s: %s.", elapsed, steps)
        log.info("Ready after %s: %s.", elapsed, count)

    def _setup_of(self, handle: RankHandle, rendezvous: Rendezvous, payload: PayloadRef) -> RankSetup:
        return RankSetup(
            rank=handle.rank,
            ranks=self.ranks,
            host=rendezvous.host,
            port=rendezvous.port,
            listener=rendezvous.listener if handle.rank == 0 else None,
            threads=self._threads,
            device=self._device,
            gpu=handle.rank if self.sees_every_gpu else 0,
            timeout=self._config.timeout,
            heartbeat_s=min(1.0, self._config.heartbeat_timeout / 5),
            level=self._level,
            body=payload,
        )

    # -- the watchdog ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the ranks, watch them until the crew closes or one is lost, and kill them."""
        error: Exception | None = None
        try:
            self._rendezvous.set_result(self._spawn())
            start = last = time.monotonic()
            while error is None and not self._closing.wait(TICK):
                now = time.monotonic()
                # This process itself may have been stopped: a rank's heartbeats wait in its pipe meanwhile.
                error = self._find_failure(min(now - last, 2 * TICK), now - start)
                last = now
        except CrewError as failure:
            error = failure
        except Exception as unexpected:
            error = CrewError(f"The ranks could not be started or watched: {unexpected!r}")
            error.__cause__ = unexpected
        error = error or CrewError("The ranks were ended while calls were still under way.")
        with self._lock:
            self._error = error
        try:
            if not self._rendezvous.done():
                self._rendezvous.set_exception(error)
            for handle in self._handles:
                handle.fail(error)
            self._failure_announced.set()
        finally:
            _in_parallel(self._handles, _kill_and_wait)

    def _find_failure(self, elapsed: float, total: float) -> Exception | None:
        """Return the reason that the crew cannot continue; None if it can."""
        for handle in self._handles:
            handle.pass_time(elapsed)
        for handle in self._handles:
            if handle.has_exited:
                handle.closed.wait(1.0)
                return CrewError(
                    f"{handle} ended while it was {self._activity_of(handle)}: {handle.exit_reason()}. "
                    f"{handle.log_tail()} {RESTART_HINT}"
                )
        for handle in self._handles:
            if handle.silent > (
                self._config.heartbeat_timeout if handle.ready else max(self._config.heartbeat_timeout, STARTUP_SILENCE)
            ):
                return CrewError(
                    f"{handle} gave no sign of life for {handle.silent:.1f} s while it was {self._activity_of(handle)}"
                    f"{handle.state()}. {handle.log_tail()} {RESTART_HINT} A machine that is merely slow needs a "
                    f"longer `crew.heartbeat_timeout`."
                )
            if not handle.ready and total > self._config.timeout:
                return CrewError(
                    f"{handle} did not start within `crew.timeout` = {self._config.timeout:g} s; it was "
                    f"{handle.startup_step}. {handle.log_tail()}"
                )
        return self._call.stall_error(elapsed, self._config.timeout)

    def _activity_of(self, handle: RankHandle) -> str:
        if not handle.ready:
            return handle.startup_step
        return f"in {self._call.name}" if self._call.pending else "answering async calls, or waiting for one"

    def _forward_log(self, handle: RankHandle, record: RankLogRecord) -> None:
        """Log a warning of a rank; a warning that all of them send, once."""
        with self._lock:
            first = self._first_ranks.setdefault(record.text, handle.rank)
        if first == handle.rank:
            logging.getLogger(record.name).log(record.level, "rank %d: %s", handle.rank, record.text)


class _CrewCall:
    """A call to every rank."""

    def __init__(self, name: str, replies: Mapping[RankHandle, Future[Any]]) -> None:
        self.name = name
        self.replies = replies
        self._total_seconds = self._since_first_end = self._since_failure = 0.0

    @property
    def pending(self) -> list[RankHandle]:
        """The ranks whose replies are still to come."""
        return [handle for handle, future in self.replies.items() if not future.done()]

    @property
    def first_failure(self) -> RankFailure | None:
        """The failure of the first rank that raised one."""
        done = [future for future in self.replies.values() if future.done() and future.exception() is None]
        return next((future.result() for future in done if isinstance(future.result(), RankFailure)), None)

    def stall_error(self, elapsed: float, timeout: float) -> Exception | None:
        """Return the reason to give the call up, or None: some ranks ended it, by an error or not, and others have not
        since, or it lasts too long."""
        pending, failure = self.pending, self.first_failure
        if not pending:
            return None
        self._total_seconds += elapsed
        self._since_first_end += elapsed if len(pending) < len(self.replies) else 0.0
        self._since_failure += elapsed if failure is not None else 0.0
        if failure is not None and self._since_failure > GRACE_SECONDS:
            return _with_note(
                failure.to_exception(self.name),
                f"{_names(pending)} had not ended it {GRACE_SECONDS:g} s later. {_dump_stacks(pending)}",
            )
        if self._since_first_end > timeout + GRACE_SECONDS:
            return CrewError(
                f"{_names(pending)} did not end {self.name} within `crew.timeout` = {timeout:g} s after another rank "
                f"had. {_dump_stacks(pending)} {RESTART_HINT} Ranks that take so much longer than each "
                "other need a longer `crew.timeout`."
            )
        if self._total_seconds > (limit := max(MIN_CALL_LIMIT, CALL_LIMIT_TIMEOUTS * timeout)):
            return CrewError(
                f"No rank has ended {self.name} in {format_seconds(limit)}. {_dump_stacks(pending)} {RESTART_HINT} "
                f"A call that does take so long needs a longer `crew.timeout`: it may last "
                f"{CALL_LIMIT_TIMEOUTS:g} times that."
            )
        return None


def _in_parallel(handles: Sequence[RankHandle], action: Callable[[RankHandle], None]) -> None:
    """Run this on all ranks in parallel, so that a node that does not answer delays no other."""
    threads = [
        threading.Thread(target=action, args=(handle,), name=f"etude-end-{handle.rank}", daemon=True)
        for handle in handles
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _kill_and_wait(handle: RankHandle) -> None:
    try:
        handle.kill()
    except Exception as error:  # any error: all callers have an error, and no caller is left to raise it to
        get_logger("dispatch").warning("%s could not be ended: %r", handle, error)
    handle.wait()


def _names(handles: Sequence[RankHandle]) -> str:
    return " and ".join(map(str, handles)).replace(" and Rank", " and rank")


def _dump_stacks(handles: Sequence[RankHandle]) -> str:
    """Have ranks that hang write the stacks of their threads to their logs. Return a sentence that names the logs."""
    _in_parallel(handles, lambda handle: handle.dump_stacks())
    time.sleep(TICK)
    return f"The stacks of their threads are at the end of {', '.join(str(handle.log) for handle in handles)}."


def _with_note(error: Exception, note: str) -> Exception:
    """Return the error with one more sentence: in its text if it is a `CrewError`, else as a note."""
    if type(error) is CrewError:
        return CrewError(f"{str(error).removesuffix('.')}. {note}")
    error.add_note(note)
    return error
