"""The worker pool for reward functions that may take long: workers are threads of this process, or processes.

A `WorkerPool` has a fixed number of workers, each served by one thread of the pool. A pool of thread workers adds one
more while all others hang. A call that exceeds its limit costs its worker, and the pool starts another. A process is
killed with all that it started. A thread cannot be killed and is abandoned.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, NamedTuple

from etude.child_process import boot_command, describe_exit, kill_group
from etude.errors import RewardError
from etude.observe import get_logger
from etude.records import Outcome, Task
from etude.rewards.base import describe_task
from etude.rewards.verdict import Verdict, describe_timeout, run_reward
from etude.running_time import running_time

START_TIMEOUT_S = 120.0
"""Seconds that a process may take to start."""
EXIT_TIMEOUT_S = 2.0
"""Seconds that a process may take to end after its pipe has closed."""
HANG_SECONDS = 5.0
"""Seconds after which a call that uses almost no processor time counts as hung."""
_STDERR = 2  # the prints of a user's function must not mix with the run's standard output


class WorkerLostError(Exception):
    """The call ended its worker. The message is the middle of a sentence about the reward."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome


class Worker(ABC):
    """A thread or a process that runs one call at a time."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """True where the worker ended between two calls."""

    @property
    def is_hung(self) -> bool:
        """True where its call has lasted for long and used almost no processor time."""
        return False

    @abstractmethod
    def call(self, task: Task, answer: str) -> Verdict:
        """Judge one answer. Raises `WorkerLostError` where the call ends the worker."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker, from any thread. A running call then raises `WorkerLostError`."""

    @abstractmethod
    def close(self) -> None:
        """End the worker and release its resources, when no call runs."""


class ThreadWorker(Worker):
    """A thread of this process."""

    is_lost = False

    def __init__(self, reward: Callable[[Task, str], Any], title: str, limit: float) -> None:
        self._reward = reward
        self._title = title
        self._limit = limit
        self._calls: SimpleQueue[tuple[Task, str] | None] = SimpleQueue()
        self._verdicts: SimpleQueue[Verdict | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="etude-reward")
        self._thread.start()
        self._began = time.monotonic()
        self._cpu_began = self._cpu_seconds()

    @property
    def is_hung(self) -> bool:
        elapsed = time.monotonic() - self._began
        return elapsed > HANG_SECONDS and self._cpu_seconds() - self._cpu_began < elapsed / 10

    def call(self, task: Task, answer: str) -> Verdict:
        self._began = time.monotonic()
        self._cpu_began = self._cpu_seconds()
        self._calls.put((task, answer))
        until = running_time() + self._limit
        while True:  # more than once if this process was stopped meanwhile
            try:
                verdict = self._verdicts.get(timeout=max(0.0, until - running_time()))
                break
            except Empty:
                if running_time() >= until:
                    raise WorkerLostError(Outcome.TIMED_OUT, describe_timeout(self._limit)) from None
        if verdict is None:
            raise WorkerLostError(Outcome.CANCELLED, "was abandoned")
        return verdict

    def _cpu_seconds(self) -> float:
        """Return the processor seconds of its thread, or the clock's seconds if the system does not measure them."""
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
                self._verdicts.put(run_reward(self._reward, self._title, *call, runner))


class ProcessWorker(Worker):
    """A process that runs `etude.rewards.worker_main`. It is spawned, so that it shares no state with this one."""

    def __init__(self, payload: bytes, limit: float) -> None:
        self._payload = payload
        self._limit = limit
        self._ready = self._killed = False
        self._connection, worker_end = Pipe()
        descriptor = worker_end.fileno()
        command = boot_command("etude.rewards.worker_main", descriptor, dies_with_parent=False)
        # A new session, so that Ctrl-C reaches the run alone, and killing the process group ends its child processes.
        self._process = Popen(
            command, stdin=DEVNULL, stdout=_STDERR, pass_fds=[descriptor], start_new_session=True, close_fds=True
        )
        worker_end.close()

    @property
    def is_lost(self) -> bool:
        return self._ready and self._connection.poll(0)

    def call(self, task: Task, answer: str) -> Verdict:
        if not self._ready:
            self._wait_until_ready()
        try:
            self._connection.send_bytes(pickle.dumps((task, answer)))
            until = running_time() + self._limit
            while not self._connection.poll(max(0.0, until - running_time())):
                if running_time() >= until:
                    raise WorkerLostError(Outcome.TIMED_OUT, describe_timeout(self._limit))
            verdict: Verdict = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise WorkerLostError(Outcome.INFRA_ERROR, f"ended its process ({self._describe_exit()})") from None
        return verdict

    def kill(self) -> None:
        self._killed = True
        kill_group(self._process.pid)

    def close(self) -> None:
        kill_group(self._process.pid)
        self._process.wait()
        self._connection.close()

    def _wait_until_ready(self) -> None:
        try:
            self._connection.send_bytes(self._payload)
            problem = (
                self._connection.recv_bytes().decode() if self._connection.poll(START_TIMEOUT_S) else "it took too long"
            )
        except (EOFError, OSError):
            problem = self._describe_exit()
        if self._killed:
            raise WorkerLostError(Outcome.CANCELLED, "was not called")
        if problem:
            raise RewardError(f"A process that judges could not start: {problem}")
        self._ready = True

    def _describe_exit(self) -> str:
        """Return the exit code or signal of the process. A process that does not end in time is killed first."""
        try:
            code = self._process.wait(timeout=EXIT_TIMEOUT_S)
        except TimeoutExpired:
            kill_group(self._process.pid)
            code = self._process.wait()
        return describe_exit(code)


class _RewardCall(NamedTuple):
    task: Task
    answer: str
    future: Future[Verdict]


class WorkerPool:
    """A fixed number of workers and a queue of calls. Any thread may submit; one thread closes."""

    def __init__(
        self, workers: int, start_worker: Callable[[], Worker], title: str, max_workers: int | None = None
    ) -> None:
        """max_workers: the most workers while calls hang; `workers` by default."""
        self._start_worker = start_worker
        self._title = title
        self._num_workers = workers
        self._max_workers = max_workers or workers
        self._has_grown = False
        self._calls: SimpleQueue[_RewardCall | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._active: set[Worker] = set()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task, answer: str) -> Future[Verdict]:
        """Judge one answer as soon as a worker is free. A future that is cancelled before that is skipped."""
        assert not self._closed, "the judge is closed"
        call = _RewardCall(task, answer, Future())
        self._calls.put(call)
        return call.future

    def add_worker_if_hung(self) -> None:
        """Add a worker if calls that hang hold all others. One worker leaves again when such a call ends."""
        with self._lock:
            if self._closed or len(self._threads) >= self._max_workers or len(self._active) < len(self._threads):
                return
            if not all(worker.is_hung for worker in self._active):
                return
            thread = threading.Thread(target=self._serve, daemon=True)
            self._threads.append(thread)
            thread.start()
            if self._has_grown:
                return
            self._has_grown = True
        get_logger("rewards").warning(
            "A call of the reward %s has waited for over %g seconds. Until it ends, another thread judges other "
            "answers; `judging.workers=0` judges one answer at a time. To judge several at a time always, set "
            "`judging.workers=2`, for processes, or make it a coroutine function. This warning appears once.",
            self._title,
            HANG_SECONDS,
        )

    def close(self) -> None:
        """End every worker. Calls that run or wait get a verdict of the outcome `CANCELLED`."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._calls.put(None)
            for worker in self._active:
                worker.kill()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _serve(self) -> None:
        """Serve one call after the other on one worker, which starts with the first call."""
        worker: Worker | None = None
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            began = time.perf_counter()
            try:
                if self._closed:
                    raise WorkerLostError(Outcome.CANCELLED, "was not called")
                if worker is not None and worker.is_lost:
                    self._release_worker(worker)
                    worker = None
                if worker is None:
                    worker = self._acquire_worker()
                call.future.set_result(worker.call(call.task, call.answer))
            except WorkerLostError as error:
                call.future.set_result(self._failure(error, call.task, time.perf_counter() - began))
                self._release_worker(worker)
                worker = None
            except BaseException as error:  # no worker could start: the caller gets the error; the next call retries
                call.future.set_exception(error)
                self._release_worker(worker)
                worker = None
            if time.perf_counter() - began > HANG_SECONDS and self._retire_thread():
                break
        self._release_worker(worker)

    def _retire_thread(self) -> bool:
        """Remove this thread, whose call hung, if the pool has more threads than workers. True if it was removed."""
        with self._lock:
            if self._closed or len(self._threads) <= self._num_workers:
                return False
            self._threads.remove(threading.current_thread())
            return True

    def _failure(self, error: WorkerLostError, task: Task, seconds: float) -> Verdict:
        if self._closed:
            message = f"The reward {self._title} was stopped on {describe_task(task)}, because the judge was closed."
            return Verdict.failure(Outcome.CANCELLED, message, seconds)
        sentence = f"The reward {self._title} {error} on {describe_task(task)}."
        return Verdict.failure(error.outcome, sentence, seconds, f"{self._title} {error.outcome}")

    def _acquire_worker(self) -> Worker:
        worker = self._start_worker()
        with self._lock:
            self._active.add(worker)
            if self._closed:
                worker.kill()
        return worker

    def _release_worker(self, worker: Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._active.discard(worker)
            worker.close()
