"""The main function of a worker process, which judges one answer after the other until its pipe closes.

The parent kills a process whose call takes too long. If the parent itself has died, the pipe closes, and the process
kills itself and all that it started. A call that holds the interpreter lock hides the closed pipe. Then a timer of the
system ends the process. It counts the processor time of all threads, which stands still while the process is stopped.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from etude.errors import EtudeError
from etude.rewards.verdict import run_reward

TIMER_GRACE_S = 3.0
"""Seconds between a call's limit and its timer. A parent that still lives kills the process before that."""


def main(descriptor: int) -> None:
    """Judge the messages of the pipe at this descriptor: first the reward and its limit, then tasks with answers."""
    connection = Connection(descriptor)
    payload = connection.recv_bytes()
    calls: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(connection, calls), daemon=True).start()
    try:
        reward, limit = pickle.loads(payload)
        reward.prepare()
    except Exception as error:
        problem = str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}"
        connection.send_bytes(problem.encode())
        return
    connection.send_bytes(b"")
    with asyncio.Runner() as runner:
        while True:
            task, answer = pickle.loads(calls.get())
            signal.setitimer(signal.ITIMER_PROF, (limit + TIMER_GRACE_S) * (os.cpu_count() or 1))
            verdict = run_reward(reward, reward.title, task, answer, runner)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            connection.send_bytes(pickle.dumps(verdict))


def _listen(connection: Connection[Any, Any], calls: SimpleQueue[bytes]) -> None:
    """Receive calls until the parent closes the pipe or dies; then kill this process group."""
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)
