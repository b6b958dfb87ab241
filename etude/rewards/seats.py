"""Where reward functions that may take long are called: on a thread beside the run, or in processes of their own.

A `Pool` has a few seats, each served by one thread of ours; on threads it adds one while all others hang. A call that
exceeds its limit loses its seat: a process is killed, with all it started; a thread, which nothing can end, is left to
itself. Either is replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, NamedTuple

from etude.errors import RewardError
from etude.observe import get_log
from etude.records import Outcome, Task
from etude.rewards.base import named
from etude.rewards.verdict import Verdict, too_long, tried

__all__ = ["Pool", "ProcessSeat", "Seat", "SeatLostError", "ThreadSeat"]

STARTING = 120.0
"""Seconds after which a process that does not come up is given up."""
ENDING = 2.0
"""Seconds that a process may take to end, once it has closed its pipe."""
HUNG = 5.0
"""Seconds after which a call that only waits is taken for one that hangs, where another seat may be added."""
_STDERR = 2  # what a user's function prints must not mix with what the run says on standard output
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from etude.rewards.worker import main; main(int(sys.argv[1]))"
)


class SeatLostError(Exception):
    """The call ended its seat."""

    def __init__(self, outcome: Outcome, what: str) -> None:
        super().__init__(what)
        self.outcome = outcome


class Seat(ABC):
    """A place where one call is made at a time."""

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether it ended between two calls."""

    @property
    def hangs(self) -> bool:
        """True where its call has lasted for long and used almost no processor time."""
        return False

    @abstractmethod
    def call(self, task: Task, answer: str) -> Verdict:
        """Judge one answer; raises `SeatLostError` where that ends the seat."""

    @abstractmethod
    def kill(self) -> None:
        """End it. Any thread may; a call under way then raises `SeatLostError`."""

    @abstractmethod
    def close(self) -> None:
        """End it and give back what it holds, when no call is under way."""


class ThreadSeat(Seat):
    """A thread of this process."""

    lost = False

    def __init__(self, reward: Callable[[Task, str], Any], title: str, limit: float) -> None:
        self._reward, self._title, self._limit = reward, title, limit
        self._calls: SimpleQueue[tuple[Task, str] | None] = SimpleQueue()
        self._verdicts: SimpleQueue[Verdict | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="etude-reward")
        self._thread.start()
        self._began, self._computed = time.monotonic(), self._clock()

    @property
    def hangs(self) -> bool:
        lasts = time.monotonic() - self._began
        return lasts > HUNG and self._clock() - self._computed < lasts / 10

    def call(self, task: Task, answer: str) -> Verdict:
        self._began, self._computed = time.monotonic(), self._clock()
        self._calls.put((task, answer))
        try:
            verdict = self._verdicts.get(timeout=self._limit)
        except Empty:
            raise SeatLostError(Outcome.TIMED_OUT, too_long(self._limit)) from None
        if verdict is None:
            raise SeatLostError(Outcome.CANCELLED, "was left alone")
        return verdict

    def _clock(self) -> float:
        """Seconds that its thread has computed; where the system does not tell them, all of them."""
        if self._thread.ident is None or not self._thread.is_alive() or not hasattr(time, "pthread_getcpuclockid"):
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def kill(self) -> None:
        self._calls.put(None)
        self._verdicts.put(None)

    def close(self) -> None:
        self.kill()

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            while (call := self._calls.get()) is not None:
                self._verdicts.put(tried(self._reward, self._title, *call, runner))


class ProcessSeat(Seat):
    """A process that `etude.rewards.worker` runs in: spawned, so that it shares nothing with this one."""

    def __init__(self, payload: bytes, limit: float) -> None:
        self._payload, self._limit = payload, limit
        self._ready = self._killed = False
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-c", _BOOT, str(descriptor), json.dumps(sys.path)]
        # In a session of its own, so that Ctrl-C is the run's to answer, and killing it ends what it started.
        self._process = Popen(
            command, stdin=DEVNULL, stdout=_STDERR, pass_fds=[descriptor], start_new_session=True, close_fds=True
        )
        theirs.close()

    @property
    def lost(self) -> bool:
        return self._ready and self._connection.poll(0)

    def call(self, task: Task, answer: str) -> Verdict:
        if not self._ready:
            self._await_start()
        try:
            self._connection.send_bytes(pickle.dumps((task, answer)))
            if not self._connection.poll(self._limit):
                raise SeatLostError(Outcome.TIMED_OUT, too_long(self._limit))
            verdict: Verdict = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise SeatLostError(Outcome.INFRA_ERROR, f"ended its process ({self._end()})") from None
        return verdict

    def kill(self) -> None:
        self._killed = True
        self._kill_all()

    def close(self) -> None:
        self._kill_all()
        self._process.wait()
        self._connection.close()

    def _await_start(self) -> None:
        try:
            self._connection.send_bytes(self._payload)
            problem = self._connection.recv_bytes().decode() if self._connection.poll(STARTING) else "it took too long"
        except (EOFError, OSError):
            problem = self._end()
        if self._killed:
            raise SeatLostError(Outcome.CANCELLED, "was not called")
        if problem:
            raise RewardError(f"A process that judges could not start: {problem}")
        self._ready = True

    def _kill_all(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # it ended, and so did all that it started
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> str:
        """How the process ended, or was ended because it no longer answers."""
        try:
            code = self._process.wait(timeout=ENDING)
        except TimeoutExpired:
            self._kill_all()
            code = self._process.wait()
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


class _Call(NamedTuple):
    task: Task
    answer: str
    future: Future[Verdict]


class Pool:
    """A bounded number of seats, and the calls that wait for one. Any thread may submit; one closes."""

    def __init__(self, seats: int, open_seat: Callable[[], Seat], title: str, most: int | None = None) -> None:
        """most: how many there may be while calls hang; as many as there are by default."""
        self._open_seat, self._title = open_seat, title
        self._seats, self._most = seats, most or seats
        self._widened = False
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._taken: set[Seat] = set()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(seats)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task, answer: str) -> Future[Verdict]:
        """Judge one answer as soon as a seat is free. A future that is cancelled before that is not served."""
        assert not self._closed, "the judge is closed"
        call = _Call(task, answer, Future())
        self._calls.put(call)
        return call.future

    def widen(self) -> None:
        """Add a seat, where those that are there are all held by calls that hang. It goes when one of these ends."""
        with self._lock:
            if self._closed or len(self._threads) >= self._most or len(self._taken) < len(self._threads):
                return
            if not all(seat.hangs for seat in self._taken):
                return
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()
            if self._widened:
                return
            self._widened = True
        get_log("rewards").warning(
            "A call of the reward %s has waited for over %g seconds. Until it ends, other answers are judged beside "
            "it, on another thread; `judging.workers=0` keeps to one at a time. To judge several at a time always, set "
            "`judging.workers=2`, for processes, or make it a coroutine function. This is said once.",
            *(self._title, HUNG),
        )

    def close(self) -> None:
        """End every seat. What is under way or waits gets a verdict that says so."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._calls.put(None)
            for seat in self._taken:
                seat.kill()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _serve(self) -> None:
        """Keep one seat, taken at the first call, and serve one call after the other at it."""
        seat: Seat | None = None
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            began = time.perf_counter()
            try:
                if self._closed:
                    raise SeatLostError(Outcome.CANCELLED, "was not called")
                if seat is not None and seat.lost:
                    self._leave(seat)
                    seat = None
                if seat is None:
                    seat = self._take()
                call.future.set_result(seat.call(call.task, call.answer))
            except SeatLostError as lost:
                call.future.set_result(self._failure(lost, call.task, time.perf_counter() - began))
                self._leave(seat)
                seat = None
            except BaseException as error:  # no seat could be had: the caller is told, and the next call tries again
                call.future.set_exception(error)
                self._leave(seat)
                seat = None
            if time.perf_counter() - began > HUNG and self._is_one_too_many():
                break
        self._leave(seat)

    def _is_one_too_many(self) -> bool:
        """Take this thread, whose call hung, off the list where another stood in for it."""
        with self._lock:
            if self._closed or len(self._threads) <= self._seats:
                return False
            self._threads.remove(threading.current_thread())
            return True

    def _failure(self, lost: SeatLostError, task: Task, seconds: float) -> Verdict:
        if self._closed:
            told = f"The reward {self._title} was stopped on {named(task)}, because the judge was closed."
            return Verdict.failure(Outcome.CANCELLED, told, seconds)
        return Verdict.failure(lost.outcome, f"The reward {self._title} {lost} on {named(task)}.", seconds)

    def _take(self) -> Seat:
        seat = self._open_seat()
        with self._lock:
            self._taken.add(seat)
            if self._closed:
                seat.kill()
        return seat

    def _leave(self, seat: Seat | None) -> None:
        if seat is not None:
            with self._lock:
                self._taken.discard(seat)
            seat.close()
