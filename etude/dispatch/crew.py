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

from etude.batch import Batch, Outline
from etude.dispatch.config import CrewConfig
from etude.dispatch.divide import Division, Share, divide
from etude.dispatch.member import Member, Raised
from etude.dispatch.messages import Ask, Begin, Drop, Job, Make, Said, Sent, pack, unpack
from etude.errors import ConfigError, CrewError
from etude.observe import LogLevel, format_seconds, get_log
from etude.protocols import spread_of

__all__ = ["GRACE", "LONGEST", "TIMES", "Joint", "Meeting"]

M = TypeVar("M", bound=Member)
R = TypeVar("R")

TICK = 0.1
"""Seconds between two looks at the ranks."""
GRACE = 3.0
"""Seconds that the other ranks may take to end a call that has raised an error in one."""
STARTING = 60.0
"""Seconds of silence that a rank may have while it starts, when libraries are loaded and hold everything up."""
LONGEST, TIMES = 6 * 3600.0, 10.0
"""Seconds that a call may last which no rank ends, or so many times `crew.timeout` where that is more: what hangs in
all of them at once cannot be told from work, but by how long it takes."""
TELL = 10.0
"""Seconds after which it is told, again and again, what the start waits for."""


AGAIN = "Start the run again: it goes on from what it saved."


class Meeting(NamedTuple):
    """Where ranks meet."""

    host: str
    port: int
    listener: int
    """The descriptor at which rank 0 listens there."""


class Joint(Generic[M]):
    """Several ranks, spoken to as one."""

    sees_every_gpu: ClassVar[bool] = True
    """Whether each of them sees all GPUs, of which its own is the one of its number; else it sees its own alone."""

    def __init__(
        self,
        members: Sequence[M],
        *,
        share: Share,
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
        self._spawned: Future[Meeting] = Future()
        self._closing = threading.Event()
        self._error: Exception | None = None
        self._told = threading.Event()
        """Whoever waited was told of the end."""
        self._call = _Call("", {})
        self._texts: dict[str, int] = {}
        self._keeper = threading.Thread(target=self._keep, name="etude-crew", daemon=True)

    # -- each kind's own ------------------------------------------------------------------------------------------

    def _spawn(self) -> Meeting:
        """Start every rank; on the keeper's thread."""
        raise NotImplementedError

    def _pack(self, value: object) -> Sent:
        """A value, as it travels to the ranks."""
        return pack(value)

    def _unpack(self, sent: Sent) -> Any:
        """The value that came from one."""
        return unpack(sent)

    def _look(self, came: Future[Any], read: Callable[[Future[Any]], None]) -> None:
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
        division = divide(spread_of(method), args, kwargs, self.ranks, self._share, self._repeats)
        found: R = division.join([partial(self._unpack, sent) for sent in self._answers(method, division)])
        return found

    def hold(self, method: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """As `call`, of a method that gives a batch; where another rank can look at it, it may stay where it was made,
        and what is returned stands for it: it can be split, and given to other calls."""
        return self.call(method, *args, **kwargs)

    def keep(self, value: object) -> Any:
        """Lay a value down where ranks can look at it; what stands for it."""
        return value

    def compose(self, outline: Outline, kept: Sequence[Any], make: Make, told: Sequence[Any]) -> Batch:  # noqa: ARG002
        """The batch that is made of values which were kept, one for each rollout, and of what else is told of them."""
        return make(kept, told)

    def fetch(self, batch: Batch) -> Batch:
        """A batch that may have stayed with the ranks, here."""
        return batch

    def _answers(self, method: Callable[..., Any], division: Division, *, keep: bool = False) -> list[Sent]:
        """What each rank answers to a call, as it came; or keeps, and tells of; nothing, where that does not count."""
        bodies = [self._packed(method, *each) for each in division.arguments]
        sharing = self.ranks // len(bodies)
        with self._calling:
            number = next(self._numbers)
            call = self._call = _Call(method.__qualname__, {m: self._owe(m, number) for m in self._members})
            for member in self._members:
                member.send(Job(number, bodies[member.rank // sharing], keep, division.heard(member.rank)))
            answers = [future.result() for future in call.owed.values()]  # each comes, or the keeper's error
        if call.raised is not None:
            raise call.raised.error(call.what)
        return answers

    def ask(
        self, rank: int, method: Callable[..., Any], *args: Any, begun: Callable[[], None] | None = None
    ) -> Future[Any]:
        """Ask one rank by a coroutine method of its worker, beside whatever else it does. Cancel the future to leave.

        `begun` is called, on another thread, once the method says so by the `begun` that it is given.
        """
        body, member, number = self._packed(method, *args), self._members[rank], next(self._numbers)
        answer: Future[Any] = Future()

        def came(owed: Future[Any]) -> None:
            if answer.set_running_or_notify_cancel():
                self._look(owed, read)

        def read(owed: Future[Any]) -> None:
            try:
                told = owed.result()
                if isinstance(told, Raised):
                    raise told.error(method.__qualname__)
                answer.set_result(self._unpack(told))
            except Exception as error:
                answer.set_exception(error)

        def left(asked: Future[Any]) -> None:
            if asked.cancelled():
                member.forgive(number)
                member.send(Drop(number))

        self._owe(member, number, begun).add_done_callback(came)
        answer.add_done_callback(left)
        member.send(Ask(number, body))
        return answer

    def _packed(self, function: Callable[..., object], *args: Any) -> Sent:
        try:
            return self._pack((function, *args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"What the ranks are to be given cannot be sent to another process ({error}). Define it at the top of "
                f"a module, and name it `module:Name`."
            ) from error

    def close(self) -> None:
        """End every rank, whatever it is at."""
        self._closing.set()
        if self._keeper.ident is not None:
            self._keeper.join()

    def _owe(self, member: Member, number: int, begun: Callable[[], None] | None = None) -> Future[Any]:
        """What will come of it: at once an error, where nothing will."""
        assert not self._closing.is_set(), "this crew was closed"
        with self._lock:
            future, error = member.owe(number, begun), self._error
        if error is not None:
            member.fail(error)
        return future

    # -- starting -------------------------------------------------------------------------------------------------

    def _start(self, make: Callable[..., object], *args: object) -> None:
        """Start the ranks, each with `make(*args)` for a worker; none is left if that fails."""
        try:
            self._wait(self._packed(make, *args))
        except BaseException:
            self.close()
            raise

    def _wait(self, body: Sent) -> None:
        """Wait until every rank is there, and tell now and then which are not. The keeper bounds it."""
        log, began = get_log("dispatch"), time.perf_counter()
        log.info("Starting %d ranks; threads of each: %d.", self.ranks, self._threads)
        self._keeper.start()
        starts = {self._owe(member, 0): member for member in self._members}
        meeting = self._spawned.result()
        for member in self._members:
            member.send(self._begin(member, meeting, body))
        while starts:
            done, _ = wait(starts, TELL, FIRST_COMPLETED)
            for start in done:
                member, answer = starts.pop(start), start.result()
                if isinstance(answer, Raised):
                    raise answer.error("its start")
                member.ready = True
            passed = format_seconds(time.perf_counter() - began)
            if not done:
                log.info("After %s: %s.", passed, ", ".join(f"rank {m.rank} is {m.at}" for m in starts.values()))
        log.info("%d ranks are there, after %s.", self.ranks, passed)

    def _begin(self, member: Member, meeting: Meeting, body: Sent) -> Begin:
        return Begin(
            rank=member.rank,
            ranks=self.ranks,
            host=meeting.host,
            port=meeting.port,
            listener=meeting.listener if member.rank == 0 else None,
            threads=self._threads,
            device=self._device,
            gpu=member.rank if self.sees_every_gpu else 0,
            timeout=self._config.timeout,
            beat=min(1.0, self._config.silence / 5),
            level=self._level,
            body=body,
        )

    # -- the keeper -----------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Start the ranks, watch them until the crew is closed or one of them is lost, and end them."""
        error: Exception | None = None
        try:
            self._spawned.set_result(self._spawn())
            began = last = time.monotonic()
            while error is None and not self._closing.wait(TICK):
                now = time.monotonic()
                # However long this process itself was stopped: a rank's signs of life wait in its pipe meanwhile.
                error = self._lost(min(now - last, 2 * TICK), now - began)
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
            if not self._spawned.done():
                self._spawned.set_exception(error)
            for member in self._members:
                member.fail(error)
            self._told.set()
        finally:
            _at_once(self._members, _end)

    def _lost(self, passed: float, since: float) -> Exception | None:
        """Why the crew cannot go on, if it cannot."""
        for member in self._members:
            member.pass_time(passed)
        for member in self._members:
            if member.ended:
                member.over.wait(1.0)
                return CrewError(
                    f"{member} ended while it was {self._doing(member)}: {member.end()}. {member.last_words()} {AGAIN}"
                )
        for member in self._members:
            if member.silent > (self._config.silence if member.ready else max(self._config.silence, STARTING)):
                return CrewError(
                    f"{member} gave no sign of life for {member.silent:.1f} s while it was {self._doing(member)}"
                    f"{member.state()}. {member.last_words()} {AGAIN} A machine that is merely slow wants a longer "
                    f"`crew.silence`."
                )
            if not member.ready and since > self._config.timeout:
                return CrewError(
                    f"{member} did not start within `crew.timeout` = {self._config.timeout:g} s; it was {member.at}. "
                    f"{member.last_words()}"
                )
        return self._call.forsaken(passed, self._config.timeout)

    def _doing(self, member: Member) -> str:
        if not member.ready:
            return member.at
        return f"in {self._call.what}" if self._call.late else "answering questions, or waiting for some"

    def _said(self, member: Member, said: Said) -> None:
        """Pass on what a rank warns of; what all of them say, once."""
        with self._lock:
            first = self._texts.setdefault(said.text, member.rank)
        if first == member.rank:
            logging.getLogger(said.name).log(said.level, "rank %d: %s", member.rank, said.text)


class _Call:
    """A call that every rank was asked to make."""

    def __init__(self, what: str, owed: Mapping[Member, Future[Any]]) -> None:
        self.what, self.owed = what, owed
        self._lasted = self._awaited = self._failed = 0.0

    @property
    def late(self) -> list[Member]:
        """Those whose answers are still to come."""
        return [member for member, future in self.owed.items() if not future.done()]

    @property
    def raised(self) -> Raised | None:
        """What the first of the ranks raised that raised anything."""
        done = [future for future in self.owed.values() if future.done() and future.exception() is None]
        return next((future.result() for future in done if isinstance(future.result(), Raised)), None)

    def forsaken(self, passed: float, timeout: float) -> Exception | None:
        """Why nobody need wait for the call any more, if there is a reason: some ranks have raised an error or ended it
        and others have not since, or it has lasted longer than any call does."""
        late, raised = self.late, self.raised
        if not late:
            return None
        self._lasted += passed
        self._awaited += passed if len(late) < len(self.owed) else 0.0
        self._failed += passed if raised is not None else 0.0
        if raised is not None and self._failed > GRACE:
            return _beside(
                raised.error(self.what), f"{_names(late)} had not ended it {GRACE:g} s later. {_where(late)}"
            )
        if self._awaited > timeout + GRACE:
            return CrewError(
                f"{_names(late)} did not end {self.what} within `crew.timeout` = {timeout:g} s after another rank had. "
                f"{_where(late)} {AGAIN} Ranks that take so much longer than each other want a longer `crew.timeout`."
            )
        if self._lasted > (longest := max(LONGEST, TIMES * timeout)):
            return CrewError(
                f"No rank has ended {self.what} in {format_seconds(longest)}. {_where(late)} {AGAIN} A call that does "
                f"take so long wants a longer `crew.timeout`: it may last {TIMES:g} times that."
            )
        return None


def _at_once(members: Sequence[Member], do: Callable[[Member], None]) -> None:
    """Do this to all of them side by side: where one's node does not answer, the others do not wait for it."""
    threads = [threading.Thread(target=do, args=(m,), name=f"etude-end-{m.rank}", daemon=True) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end(member: Member) -> None:
    """End a rank, and see it gone."""
    try:
        member.kill()
    except Exception as error:  # whatever it is: those that wait were told, and nobody is left to raise it to
        get_log("dispatch").warning("%s could not be ended: %r", member, error)
    member.wait()


def _names(members: Sequence[Member]) -> str:
    return " and ".join(map(str, members)).replace(" and Rank", " and rank")


def _where(late: Sequence[Member]) -> str:
    """Have ranks that hang write down where each of their threads stands; a sentence that says where that is."""
    _at_once(late, lambda member: member.trace())
    time.sleep(TICK)
    return f"What was under way there is at the end of {', '.join(str(member.log) for member in late)}."


def _beside(error: Exception, told: str) -> Exception:
    """The error with a sentence more: in its own words where they are the crew's, else beside them."""
    if type(error) is CrewError:
        return CrewError(f"{str(error).removesuffix('.')}. {told}")
    error.add_note(told)
    return error
