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

__all__ = ["GRACE", "LONGEST", "TIMES", "MultiRankCrew", "Rendezvous"]

M = TypeVar("M", bound=RankHandle)
R = TypeVar("R")

TICK = 0.1
"""Seconds between two looks at the ranks."""
GRACE = 3.0
"""Seconds that the other ranks may take to end a call that has raised an error in one."""
STARTUP_SILENCE = 60.0
"""Seconds of silence that a rank may have while it starts, when libraries are loaded and hold everything up."""
LONGEST, TIMES = 6 * 3600.0, 10.0
"""Seconds that a call may last which no rank ends, or so many times `crew.timeout` where that is more: what hangs in
all of them at once cannot be told from work, but by how long it takes."""
TELL = 10.0
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
        members: Sequence[M],
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
        self._members = members
        self._numbers = itertools.count(1)
        self._lock, self._calling = threading.Lock(), threading.Lock()
        self._rendezvous: Future[Rendezvous] = Future()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._failure_announced = threading.Event()
        """Whoever waited was told of the end."""
        self._call = _CrewCall("", {})
        self._texts: dict[str, int] = {}
        self._watchdog = threading.Thread(target=self._watch, name="etude-crew", daemon=True)

    # -- each kind's own ------------------------------------------------------------------------------------------

    def _spawn(self) -> Rendezvous:
        """Start every rank; on the keeper's thread."""
        raise NotImplementedError

    def _serialize(self, value: object) -> PayloadRef:
        """A value, as it travels to the ranks."""
        return serialize(value)

    def _deserialize(self, sent: PayloadRef) -> Any:
        """The value that came from one."""
        return deserialize(sent)

    def _handle_reply(self, came: Future[Any], read: Callable[[Future[Any]], None]) -> None:
        """Read what came of a question, on the thread that heard of it; or on another, if that may take a while."""
        read(came)

    # -- what the controller asks ---------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self._members)

    @property
    def pids(self) -> list[int]:
        """Their processes."""
        return [member.pid for member in self._members]

    def call(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call `Worker.method` (the function on the class) on all ranks, divided and joined as it declares."""
        division = split_call(get_dispatch_mode(method), args, kwargs, self.ranks, self._share, self._repeats)
        found: R = division.join([partial(self._deserialize, sent) for sent in self._call_ranks(method, division)])
        return found

    def call_for_ref(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """As `call`, of a method that gives a batch; where another rank can look at it, it may stay where it was made,
        and what is returned stands for it: it can be split, and given to other calls."""
        return self.call(method, *args, **kwargs)

    def put(self, value: object) -> Any:
        """Lay a value down where ranks can look at it; what stands for it."""
        return value

    def build_batch(
        self,
        outline: BatchMeta,  # noqa: ARG002
        refs: Sequence[Any],
        make: BatchFactory,
        metadata: Sequence[Any],
    ) -> Batch:
        """The batch that is made of values which were kept, one for each rollout, and of what else is told of them."""
        return make(refs, metadata)

    def fetch(self, batch: Batch) -> Batch:
        """A batch that may have stayed with the ranks, here."""
        return batch

    def _call_ranks(self, method: Callable[..., Any], division: SplitCall, *, keep: bool = False) -> list[PayloadRef]:
        """What each rank answers to a call, as it came; or keeps, and tells of; nothing, where that does not count."""
        bodies = [self._serialize_call(method, *each) for each in division.arguments]
        sharing = self.ranks // len(bodies)
        with self._calling:
            number = next(self._numbers)
            call = self._call = _CrewCall(
                method.__qualname__, {m: self._expect_reply(m, number) for m in self._members}
            )
            for member in self._members:
                member.send(
                    CallRequest(number, bodies[member.rank // sharing], keep, division.uses_answer_of(member.rank))
                )
            answers = [future.result() for future in call.replies.values()]  # each comes, or the keeper's error
        if call.first_failure is not None:
            raise call.first_failure.to_exception(call.what)
        return answers

    def submit(
        self, rank: int, method: Callable[..., Any], *args: Any, on_start: Callable[[], None] | None = None
    ) -> Future[Any]:
        """Ask one rank by a coroutine method of its worker, beside whatever else it does. Cancel the future to leave.

        `on_start` is called, on another thread, once the method calls the `on_start` that it is given.
        """
        body, member, number = self._serialize_call(method, *args), self._members[rank], next(self._numbers)
        answer: Future[Any] = Future()

        def came(owed: Future[Any]) -> None:
            if answer.set_running_or_notify_cancel():
                self._handle_reply(owed, read)

        def read(owed: Future[Any]) -> None:
            try:
                told = owed.result()
                if isinstance(told, RankFailure):
                    raise told.to_exception(method.__qualname__)
                answer.set_result(self._deserialize(told))
            except Exception as error:
                answer.set_exception(error)

        def left(asked: Future[Any]) -> None:
            if asked.cancelled():
                member.discard_reply(number)
                member.send(CancelAsyncCall(number))

        self._expect_reply(member, number, on_start).add_done_callback(came)
        answer.add_done_callback(left)
        member.send(AsyncCallRequest(number, body))
        return answer

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

    def _expect_reply(self, member: RankHandle, number: int, on_start: Callable[[], None] | None = None) -> Future[Any]:
        """What will come of it: at once an error, where nothing will."""
        assert not self._closing.is_set(), "this crew was closed"
        with self._lock:
            future, error = member.expect_reply(number, on_start), self._error
        if error is not None:
            member.fail(error)
        return future

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, make: Callable[..., object], *args: object) -> None:
        """Start the ranks, each with `make(*args)` for a worker; none is left if that fails."""
        try:
            self._wait_until_ready(self._serialize_call(make, *args))
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, body: PayloadRef) -> None:
        """Wait until every rank is there, and tell now and then which are not. The keeper bounds it."""
        log, began = get_logger("dispatch"), time.perf_counter()
        log.info("Starting %d ranks; threads of each: %d.", self.ranks, self._threads)
        self._watchdog.start()
        starts = {self._expect_reply(member, 0): member for member in self._members}
        meeting = self._rendezvous.result()
        for member in self._members:
            member.send(self._setup_of(member, meeting, body))
        while starts:
            done, _ = wait(starts, TELL, FIRST_COMPLETED)
            for start in done:
                member, answer = starts.pop(start), start.result()
                if isinstance(answer, RankFailure):
                    raise answer.to_exception("its start")
                member.ready = True
            passed = format_seconds(time.perf_counter() - began)
            if not done:
                log.info(
                    "After %s: %s.", passed, ", ".join(f"rank {m.rank} is {m.startup_step}" for m in starts.values())
                )
        log.info("%d ranks are there, after %s.", self.ranks, passed)

    def _setup_of(self, member: RankHandle, meeting: Rendezvous, body: PayloadRef) -> RankSetup:
        return RankSetup(
            rank=member.rank,
            ranks=self.ranks,
            host=meeting.host,
            port=meeting.port,
            listener=meeting.listener if member.rank == 0 else None,
            threads=self._threads,
            device=self._device,
            gpu=member.rank if self.sees_every_gpu else 0,
            timeout=self._config.timeout,
            heartbeat_s=min(1.0, self._config.heartbeat_timeout / 5),
            level=self._level,
            body=body,
        )

    # -- the keeper -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Start the ranks, watch them until the crew is closed or one of them is lost, and end them."""
        error: Exception | None = None
        try:
            self._rendezvous.set_result(self._spawn())
            began = last = time.monotonic()
            while error is None and not self._closing.wait(TICK):
                now = time.monotonic()
                # However long this process itself was stopped: a rank's signs of life wait in its pipe meanwhile.
                error = self._find_failure(min(now - last, 2 * TICK), now - began)
                last = now
        except CrewError as told:
            error = told
        except Exception as other:
            error = CrewError(f"The ranks could not be started or watched: {other!r}")
            error.__cause__ = other
        error = error or CrewError("The ranks were ended while something was still asked of them.")
        with self._lock:
            self._error = error
        try:
            if not self._rendezvous.done():
                self._rendezvous.set_exception(error)
            for member in self._members:
                member.fail(error)
            self._failure_announced.set()
        finally:
            _in_parallel(self._members, _kill_and_wait)

    def _find_failure(self, passed: float, since: float) -> Exception | None:
        """Why the crew cannot go on, if it cannot."""
        for member in self._members:
            member.pass_time(passed)
        for member in self._members:
            if member.has_exited:
                member.closed.wait(1.0)
                return CrewError(
                    f"{member} ended while it was {self._activity_of(member)}: {member.exit_reason()}. "
                    f"{member.log_tail()} {RESTART_HINT}"
                )
        for member in self._members:
            if member.silent > (
                self._config.heartbeat_timeout if member.ready else max(self._config.heartbeat_timeout, STARTUP_SILENCE)
            ):
                return CrewError(
                    f"{member} gave no sign of life for {member.silent:.1f} s while it was {self._activity_of(member)}"
                    f"{member.state()}. {member.log_tail()} {RESTART_HINT} A machine that is merely slow wants a "
                    f"longer `crew.heartbeat_timeout`."
                )
            if not member.ready and since > self._config.timeout:
                return CrewError(
                    f"{member} did not start within `crew.timeout` = {self._config.timeout:g} s; it was "
                    f"{member.startup_step}. {member.log_tail()}"
                )
        return self._call.stall_error(passed, self._config.timeout)

    def _activity_of(self, member: RankHandle) -> str:
        if not member.ready:
            return member.startup_step
        return f"in {self._call.what}" if self._call.pending else "answering questions, or waiting for some"

    def _forward_log(self, member: RankHandle, said: RankLogRecord) -> None:
        """Pass on what a rank warns of; what all of them say, once."""
        with self._lock:
            first = self._texts.setdefault(said.text, member.rank)
        if first == member.rank:
            logging.getLogger(said.name).log(said.level, "rank %d: %s", member.rank, said.text)


class _CrewCall:
    """A call that every rank was asked to make."""

    def __init__(self, what: str, owed: Mapping[RankHandle, Future[Any]]) -> None:
        self.what, self.replies = what, owed
        self._lasted = self._awaited = self._failed = 0.0

    @property
    def pending(self) -> list[RankHandle]:
        """Those whose answers are still to come."""
        return [member for member, future in self.replies.items() if not future.done()]

    @property
    def first_failure(self) -> RankFailure | None:
        """What the first of the ranks raised that raised anything."""
        done = [future for future in self.replies.values() if future.done() and future.exception() is None]
        return next((future.result() for future in done if isinstance(future.result(), RankFailure)), None)

    def stall_error(self, passed: float, timeout: float) -> Exception | None:
        """Why nobody need wait for the call any more, if there is a reason: some ranks have raised an error or ended it
        and others have not since, or it has lasted longer than any call does."""
        late, raised = self.pending, self.first_failure
        if not late:
            return None
        self._lasted += passed
        self._awaited += passed if len(late) < len(self.replies) else 0.0
        self._failed += passed if raised is not None else 0.0
        if raised is not None and self._failed > GRACE:
            return _with_note(
                raised.to_exception(self.what),
                f"{_names(late)} had not ended it {GRACE:g} s later. {_dump_stacks(late)}",
            )
        if self._awaited > timeout + GRACE:
            return CrewError(
                f"{_names(late)} did not end {self.what} within `crew.timeout` = {timeout:g} s after another rank had. "
                f"{_dump_stacks(late)} {RESTART_HINT} Ranks that take so much longer than each other want a longer "
                "`crew.timeout`."
            )
        if self._lasted > (longest := max(LONGEST, TIMES * timeout)):
            return CrewError(
                f"No rank has ended {self.what} in {format_seconds(longest)}. {_dump_stacks(late)} {RESTART_HINT} A "
                f"call that does take so long wants a longer `crew.timeout`: it may last {TIMES:g} times that."
            )
        return None


def _in_parallel(members: Sequence[RankHandle], do: Callable[[RankHandle], None]) -> None:
    """Do this to all of them side by side: where one's node does not answer, the others do not wait for it."""
    threads = [threading.Thread(target=do, args=(m,), name=f"etude-end-{m.rank}", daemon=True) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _kill_and_wait(member: RankHandle) -> None:
    """End a rank, and see it gone."""
    try:
        member.kill()
    except Exception as error:  # whatever it is: those that wait were told, and nobody is left to raise it to
        get_logger("dispatch").warning("%s could not be ended: %r", member, error)
    member.wait()


def _names(members: Sequence[RankHandle]) -> str:
    return " and ".join(map(str, members)).replace(" and Rank", " and rank")


def _dump_stacks(late: Sequence[RankHandle]) -> str:
    """Have ranks that hang write down where each of their threads stands; a sentence that says where that is."""
    _in_parallel(late, lambda member: member.dump_stacks())
    time.sleep(TICK)
    return f"What was under way there is at the end of {', '.join(str(member.log) for member in late)}."


def _with_note(error: Exception, note: str) -> Exception:
    """The error with a sentence more: in its own words where they are the crew's, else beside them."""
    if type(error) is CrewError:
        return CrewError(f"{str(error).removesuffix('.')}. {note}")
    error.add_note(note)
    return error
