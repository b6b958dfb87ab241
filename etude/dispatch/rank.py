"""What runs in a process of a crew: one worker, among others that it may exchange tensors with.

consumes       calls, one after the other, on the main thread; and questions, side by side, on an event loop beside it
produces       an answer to each, signs of life, and what it would warn of
waits for      a call; and, within one, for the other ranks, no longer than `timeout`
unblocked by   whatever comes through the pipe; its end ends the process and all it started, at once

Signals that ask a run to stop are the controller's to answer: a rank goes on until it is told, or killed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import pickle
import signal
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from etude.config.secrets import mask_text
from etude.dispatch.messages import (
    Ask,
    At,
    Beat,
    Begin,
    Begun,
    Channel,
    Done,
    Drop,
    Failed,
    Job,
    Line,
    Said,
)
from etude.errors import ConfigError, EtudeError
from etude.observe import configure, get_log

__all__ = ["Asked", "main", "serve"]

_PACKAGE = str(Path(__file__).parents[1])


def main(descriptor: int) -> None:
    """Be the rank that the first message through the pipe of this descriptor speaks of, until the pipe ends."""
    line = Line(Connection(descriptor))
    begin = line.receive()
    assert isinstance(begin, Begin), "the pipe ended before it began"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_beat, args=(line, begin.beat), daemon=True).start()
    jobs: SimpleQueue[Job] = SimpleQueue()
    asked = Asked(line)
    threading.Thread(target=_listen, args=(line, jobs, asked), daemon=True).start()
    serve(line, begin, jobs, asked)


def serve(line: Channel, begin: Begin, jobs: SimpleQueue[Job], asked: Asked) -> None:
    """Meet the other ranks, make the worker, and make calls on it, for ever."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it stands, to its log, when the controller has waited too long
    configure(begin.level, "rank", begin.rank, mask=mask_text)
    logging.getLogger("etude").addHandler(_Forward(line))
    try:
        line.send(At("meeting the other ranks"))
        _meet(begin)
        line.send(At("building its worker"))
        make, *args = line.unpack(begin.body)
        worker = asked.worker = make(*args)
    except BaseException as error:
        line.send(_failed(0, error))
        threading.Event().wait()  # until the crew, which knows why, ends this process
    line.send(Done(0, line.pack(None)))
    while True:
        line.send(_done(line, jobs.get(), worker))


def _done(line: Channel, job: Job, worker: object) -> Done | Failed:
    """Make a call."""
    try:
        method, args, kwargs = line.unpack(job.body)
        answer = method(worker, *args, **kwargs)
        return Done(job.number, line.pack(answer, keep=job.keep) if job.heard else line.pack(None))
    except BaseException as error:
        return _failed(job.number, error)


def _meet(begin: Begin) -> None:
    """Join the group of all ranks."""
    torch.set_num_threads(begin.threads)
    if begin.device == "cuda":
        there = torch.cuda.device_count()
        if there <= begin.gpu:
            raise ConfigError(
                f"{begin.ranks} ranks need {begin.ranks} GPUs, one each, and there are {there}. Lower `ranks`, or make "
                f"more of them visible."
            )
        torch.cuda.set_device(begin.gpu)
    bound = timedelta(seconds=begin.timeout)
    store = TCPStore(
        begin.host,
        begin.port,
        begin.ranks,
        is_master=begin.listener is not None,
        timeout=bound,
        master_listen_fd=begin.listener,
    )
    backend = "cpu:gloo,cuda:nccl" if begin.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=begin.rank, world_size=begin.ranks, timeout=bound)


def _beat(line: Line, every: float) -> None:
    """Give signs of life, whatever the other threads do."""
    while True:
        line.send(Beat())
        time.sleep(every)


def _listen(line: Line, jobs: SimpleQueue[Job], asked: Asked) -> None:
    """Take what comes while there is somebody to send it."""
    while (message := line.receive()) is not None:
        if isinstance(message, Job):
            jobs.put(message)
        else:
            asked.take(message)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Asked:
    """Questions to coroutine methods of the worker's, on an event loop in a thread of its own."""

    def __init__(self, line: Channel) -> None:
        self._line = line
        self.worker: object | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def take(self, message: object) -> None:
        """A question, or word that nobody waits for its answer."""
        if isinstance(message, Ask):
            self._loop.call_soon_threadsafe(self._begin, message)
        elif isinstance(message, Drop):
            self._loop.call_soon_threadsafe(self._end, message.number)

    def _begin(self, asked: Ask) -> None:
        self._tasks[asked.number] = self._loop.create_task(self._answer(asked))

    def _end(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, asked: Ask) -> None:
        try:
            method, *args = self._line.unpack(asked.body)
            answer = await method(self.worker, *args, begun=lambda: self._line.send(Begun(asked.number)))
            self._line.send(Done(asked.number, self._line.pack(answer)))
        except Exception as error:
            self._line.send(_failed(asked.number, error))
        finally:
            del self._tasks[asked.number]


class _Forward(logging.Handler):
    """Has the controller say what is worth a warning. Tracebacks stay in the rank's own log."""

    def __init__(self, line: Channel) -> None:
        super().__init__(logging.WARNING)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:
            with suppress(OSError):  # nobody is left to hear it
                self._line.send(Said(record.levelno, record.name, record.getMessage()))


def _failed(number: int, error: BaseException) -> Failed:
    """What went wrong, with the error itself where it is one of ours and can travel."""
    get_log("dispatch").error("This call failed:", exc_info=error)
    told = f"{type(error).__name__}: {error}{_where(error)}"
    return Failed(number, error if isinstance(error, EtudeError) and _travels(error) else None, told)


def _travels(error: EtudeError) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False


def _where(error: BaseException) -> str:
    """Where it was raised: the last line of Etude's, and the very last one."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE) and frame.filename != __file__]
    places = [f"{Path(at.filename).name}:{at.lineno} in {at.name}" for at in (*ours[-1:], *frames[-1:])]
    return f" ({', '.join(dict.fromkeys(places))})" if places else ""
