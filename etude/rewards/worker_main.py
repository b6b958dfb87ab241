"""What runs in a process that judges: one answer after the other, until the pipe to the parent ends.

The parent ends a process whose call takes too long. Should the parent itself be gone, the end of the pipe ends the
process and all it started; and where a call holds the interpreter so fast that nothing is noticed, the system's alarm
ends it soon after its limit.
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

__all__ = ["main"]

ALARM_GRACE_S = 3.0
"""Seconds after its limit at which a call is ended by the alarm: the parent, if there is one, has long done so."""


def main(descriptor: int) -> None:
    """Judge what comes through the pipe of this descriptor: first the reward and its limit, then tasks and answers."""
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
            signal.setitimer(signal.ITIMER_REAL, limit + ALARM_GRACE_S)
            verdict = run_reward(reward, reward.title, task, answer, runner)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            connection.send_bytes(pickle.dumps(verdict))


def _listen(connection: Connection[Any, Any], calls: SimpleQueue[bytes]) -> None:
    """Take calls while there is somebody to make them."""
    try:
        while True:
            calls.put(connection.recv_bytes())
    except (EOFError, OSError):
        os.killpg(os.getpgrp(), signal.SIGKILL)
