"""What every crew of several ranks does, wherever they are: calls that are divided and joined, and a watch over them.

One thread, the keeper, starts the ranks, watches them, and ends them. Whatever befalls one of them ends them all,
because the others wait for it, or soon would: it ended; it gave no sign of life (stopped, or the machine thrashes); it
did not start in time; a call raised an error in it and not in the others, which then may wait for it in vain; or it
breathes and does not end a call that another rank has ended (a deadlock, an endless loop, a disk that hangs).

consumes       calls to all ranks, one at a time; questions to one of them, any number at once
produces       what came of them, or an error that names the rank
waits for      the ranks
unblocked by   their answers, and by the keeper: every wait ends when the ranks do
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

from etude.batch import Batch, BatchMeta
from etude.dispatch.config import CrewConfig
from etude.dispatch.messages import (
    AsyncCallRequest,
    BatchFactory,
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
from etude.protocols import get_dispatch_mode

__all__ = ["CALL_LIMIT_TIMEOUTS", "GRACE_SECONDS", "MIN_CALL_LIMIT", "MultiRankCrew", "Rendezvous"]

M = TypeVar("M", bound=RankHandle)
R = TypeVar("R")

TICK = 0.1
"""Seconds between two looks at the ranks."""
GRACE_SECONDS = 3.0
"""Seconds that the other ranks may take to end a call that has raised an error in one."""
STARTUP_SILENCE = 60.0
"""Seconds of silence that a rank may have while it starts, when libraries are loaded and hold everything up."""
MIN_CALL_LIMIT, CALL_LIMIT_TIMEOUTS = 6 * 3600.0, 10.0
"""Seconds that a call may last which no rank ends, or so many times `crew.timeout` where that is more: what hangs in
all of them at once cannot be told from work, but by how long it takes."""
REPORT_INTERVAL = 10.0
"""Seconds after which it is told, again and again, what the start waits for."""


RESTART_HINT = "Start the run again: it goes on from what it saved."


class Rendezvous(NamedTuple):
    """Where ranks meet."""

    host: str
    port: int
    listener: int
    """The descriptor at which rank 0 listens there."""


class MultiRankCrew(Generic[M]):
    """Several ranks, spoken to as one."""

    sees_every_gpu: ClassVar[bool] = True
    """Whether each of them sees all GPUs, of which its own is the one of its number; else it sees its own alone."""

    def __init__(
        self,
        handles: Sequence[M],
        *,
        share: Partitioner,
        config: CrewConfig | None,
        threads: int,
        device: Literal["cpu", "cuda"],
        level: LogLevel,
        repeats: int,
    ) -> None:
        """`share` says which rollouts each of them gets, `threads` is with how many it computes, and `repeats` how many
        ranks in a row get the same rollouts."""
        self._repeats = repeats
        self._config, self._share, self._level = config or CrewConfig(), share, level
        self._threads, self._device = threads, device
        self._handles = handles
        self._numbers = itertools.count(1)
        self._lock, self._call_lock = threading.Lock(), threading.Lock()
        self._rendezvous: Future[Rendezvous] = Future()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._failure_announced = threading.Event()
        """Whoever waited was told of the end."""
        self._call = _CrewCall("", {})
        self._first_ranks: dict[str, int] = {}
        self._watchdog = threading.Thread(target=self._watch, name="etude-crew", daemon=True)

    # -- each kind's own ------------------------------------------------------------------------------------------

    def _spawn(self) -> Rendezvous:
        """Start every rank; on the keeper's thread."""
        raise NotImplementedError

    def _serialize(self, value: object) -> PayloadRef:
        """A value, as it travels to the ranks."""
        return serialize(value)

    def _deserialize(self, payload_ref: PayloadRef) -> Any:
        """The value that came from one."""
        return deserialize(payload_ref)

    def _handle_reply(self, reply: Future[Any], read: Callable[[Future[Any]], None]) -> None:
        """Read what came of a question, on the thread that heard of it; or on another, if that may take a while."""
        read(reply)

    # -- what the controller asks ---------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self._handles)

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [handle.pid for handle in self._handles]

    def call(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call `Worker.method` (the function on the class) on all ranks, divided and joined as it declares."""
        split = split_call(get_dispatch_mode(method), args, kwargs, self.ranks, self._share, self._repeats)
        replies = self._call_ranks(method, split)
        result: R = split.join([partial(self._deserialize, reply) for reply in replies])
        return result

    def call_for_ref(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """As `call`, of a method that gives a batch; where another rank can look at it, it may stay where it was made,
        and what is returned stands for it: it can be split, and given to other calls."""
        return self.call(method, *args, **kwargs)

    def put(self, value: object) -> Any:
        """Lay a value down where ranks can look at it; what stands for it."""
        return value

    def build_batch(
        self,
        meta: BatchMeta,  # noqa: ARG002
        refs: Sequence[Any],
        factory: BatchFactory,
        metadata: Sequence[Any],
    ) -> Batch:
        """The batch that is made of values which were kept, one for each rollout, and of what else is told of them."""
        return factory(refs, metadata)

    def fetch(self, batch: Batch) -> Batch:
        """A batch that may have stayed with the ranks, here."""
        return batch

    def _call_ranks(self, method: Callable[..., Any], split: SplitCall, *, keep: bool = False) -> list[PayloadRef]:
        """What each rank answers to a call, as it came; or keeps, and tells of; nothing, where that does not count."""
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
            answers = [future.result() for future in call.replies.values()]  # each comes, or the watchdog's error
        if call.first_failure is not None:
            raise call.first_failure.to_exception(call.name)
        return answers

    def submit(
        self, rank: int, method: Callable[..., Any], *args: Any, on_start: Callable[[], None] | None = None
    ) -> Future[Any]:
        """Ask one rank by a coroutine method of its worker, beside whatever else it does. Cancel the future to leave.

        `on_start` is called, on another thread, once the method calls the `on_start` that it is given.
        """
        payload, handle, number = self._serialize_call(method, *args), self._handles[rank], next(self._numbers)
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
                f"What the ranks are to be given cannot be sent to another process ({error}). Define it at the top of "
                f"a module, and name it `module:Name`."
            ) from error

    def close(self) -> None:
        """End every rank, whatever it is at."""
        self._closing.set()
        if self._watchdog.ident is not None:
            self._watchdog.join()

    def _expect_reply(self, handle: RankHandle, number: int, on_start: Callable[[], None] | None = None) -> Future[Any]:
        """What will come of it: at once an error, where nothing will."""
        assert not self._closing.is_set(), "this crew was closed"
        with self._lock:
            future, error = handle.expect_reply(number, on_start), self._error
        if error is not None:
            handle.fail(error)
        return future

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, factory: Callable[..., object], *args: object) -> None:
        """Start the ranks, each with `make(*args)` for a worker; none is left if that fails."""
        try:
            self._wait_until_ready(self._serialize_call(factory, *args))
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, payload: PayloadRef) -> None:
        """Wait until every rank is there, and tell now and then which are not. The keeper bounds it."""
        log, start = get_logger("dispatch"), time.perf_counter()
        log.info("Starting %d ranks; threads of each: %d.", self.ranks, self._threads)
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
        log.info("%d ranks are there, after %s.", self.ranks, elapsed)

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

    # -- the keeper -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the ranks, watch them until the crew is closed or one of them is lost, and end them."""
        error: Exception | None = None
        try:
            self._rendezvous.set_result(self._spawn())
            start = last = time.monotonic()
            while error is None and not self._closing.wait(TICK):
                now = time.monotonic()
                # However long this process itself was stopped: a rank's signs of life wait in its pipe meanwhile.
                error = self._find_failure(min(now - last, 2 * TICK), now - start)
                last = now
        except CrewError as failure:
            error = failure
        except Exception as unexpected:
            error = CrewError(f"The ranks could not be started or watched: {unexpected!r}")
            error.__cause__ = unexpected
        error = error or CrewError("The ranks were ended while something was still asked of them.")
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
        """Why the crew cannot go on, if it cannot."""
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
                    f"{handle.state()}. {handle.log_tail()} {RESTART_HINT} A machine that is merely slow wants a "
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
        return f"in {self._call.name}" if self._call.pending else "answering questions, or waiting for some"

    def _forward_log(self, handle: RankHandle, record: RankLogRecord) -> None:
        """Pass on what a rank warns of; what all of them say, once."""
        with self._lock:
            first = self._first_ranks.setdefault(record.text, handle.rank)
        if first == handle.rank:
            logging.getLogger(record.name).log(record.level, "rank %d: %s", handle.rank, record.text)


class _CrewCall:
    """A call that every rank was asked to make."""

    def __init__(self, name: str, replies: Mapping[RankHandle, Future[Any]]) -> None:
        self.name, self.replies = name, replies
        self._total_seconds = self._since_first_end = self._since_failure = 0.0

    @property
    def pending(self) -> list[RankHandle]:
        """Those whose answers are still to come."""
        return [handle for handle, future in self.replies.items() if not future.done()]

    @property
    def first_failure(self) -> RankFailure | None:
        """What the first of the ranks raised that raised anything."""
        done = [future for future in self.replies.values() if future.done() and future.exception() is None]
        return next((future.result() for future in done if isinstance(future.result(), RankFailure)), None)

    def stall_error(self, elapsed: float, timeout: float) -> Exception | None:
        """Why nobody need wait for the call any more, if there is a reason: some ranks have raised an error or ended it
        and others have not since, or it has lasted longer than any call does."""
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
                "other want a longer `crew.timeout`."
            )
        if self._total_seconds > (limit := max(MIN_CALL_LIMIT, CALL_LIMIT_TIMEOUTS * timeout)):
            return CrewError(
                f"No rank has ended {self.name} in {format_seconds(limit)}. {_dump_stacks(pending)} {RESTART_HINT} "
                f"A call that does take so long wants a longer `crew.timeout`: it may last "
                f"{CALL_LIMIT_TIMEOUTS:g} times that."
            )
        return None


def _in_parallel(handles: Sequence[RankHandle], action: Callable[[RankHandle], None]) -> None:
    """Do this to all of them side by side: where one's node does not answer, the others do not wait for it."""
    threads = [
        threading.Thread(target=action, args=(handle,), name=f"etude-end-{handle.rank}", daemon=True)
        for handle in handles
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _kill_and_wait(handle: RankHandle) -> None:
    """End a rank, and see it gone."""
    try:
        handle.kill()
    except Exception as error:  # whatever it is: those that wait were told, and nobody is left to raise it to
        get_logger("dispatch").warning("%s could not be ended: %r", handle, error)
    handle.wait()


def _names(handles: Sequence[RankHandle]) -> str:
    return " and ".join(map(str, handles)).replace(" and Rank", " and rank")


def _dump_stacks(handles: Sequence[RankHandle]) -> str:
    """Have ranks that hang write down where each of their threads stands; a sentence that says where that is."""
    _in_parallel(handles, lambda handle: handle.dump_stacks())
    time.sleep(TICK)
    return f"What was under way there is at the end of {', '.join(str(handle.log) for handle in handles)}."


def _with_note(error: Exception, note: str) -> Exception:
    """The error with a sentence more: in its own words where they are the crew's, else beside them."""
    if type(error) is CrewError:
        return CrewError(f"{str(error).removesuffix('.')}. {note}")
    error.add_note(note)
    return error
