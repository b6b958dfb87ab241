"""The main program of a rank: one worker, which may exchange tensors with those of other ranks.

consumes       calls, one after the other, on the main thread; async calls, concurrently, on an event loop beside it
produces       a reply to each, heartbeats, and the warnings that it logs
waits for      a call; and, within one, for the other ranks, no longer than `timeout`
unblocked by   any message of the pipe; the end of the pipe kills the process and all its children at once

Only the controller handles the signals that ask a run to stop. A rank runs until its pipe ends, or it is killed.
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
    AsyncCallRequest,
    CallError,
    CallRequest,
    CallResult,
    CallStarted,
    CancelAsyncCall,
    Channel,
    HeartbeatMessage,
    PipeChannel,
    RankLogRecord,
    RankSetup,
    StartupStatus,
)
from etude.errors import ConfigError, EtudeError
from etude.observe import configure_logging, get_logger
from etude.running_time import EventLoop

_PACKAGE = str(Path(__file__).parents[1])


def main(descriptor: int) -> None:
    """Be the rank that the first message of this pipe describes, until the pipe ends."""
    channel = PipeChannel(Connection(descriptor))
    setup = channel.receive()
    assert isinstance(setup, RankSetup), "the pipe ended before the setup came"
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)
    threading.Thread(target=_send_heartbeats, args=(channel, setup.heartbeat_s), daemon=True).start()
    jobs: SimpleQueue[CallRequest] = SimpleQueue()
    async_calls = AsyncCallRunner(channel)
    threading.Thread(target=_receive, args=(channel, jobs, async_calls), daemon=True).start()
    serve(channel, setup, jobs, async_calls)


def serve(channel: Channel, setup: RankSetup, jobs: SimpleQueue[CallRequest], async_calls: AsyncCallRunner) -> None:
    """Join the other ranks, make the worker, and make its calls, for ever."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # writes all stacks to its log, when the controller has waited too long
    configure_logging(setup.level, "rank", setup.rank, mask=mask_text)
    logging.getLogger("etude").addHandler(_ForwardHandler(channel))
    try:
        channel.send(StartupStatus("meeting the other ranks"))
        _init_process_group(setup)
        channel.send(StartupStatus("building its worker"))
        factory, *args = channel.deserialize(setup.body)
        worker = async_calls.worker = factory(*args)
    except BaseException as error:
        channel.send(_to_call_error(0, error))
        threading.Event().wait()  # until the crew, which has the error, kills this process
    channel.send(CallResult(0, channel.serialize(None)))
    while True:
        channel.send(_run_call(channel, jobs.get(), worker))


def _run_call(channel: Channel, job: CallRequest, worker: object) -> CallResult | CallError:
    try:
        method, args, kwargs = channel.deserialize(job.body)
        result = method(worker, *args, **kwargs)
        return CallResult(
            job.number, channel.serialize(result, keep=job.keep) if job.wants_result else channel.serialize(None)
        )
    except BaseException as error:
        return _to_call_error(job.number, error)


def _init_process_group(setup: RankSetup) -> None:
    torch.set_num_threads(setup.threads)
    if setup.device == "cuda":
        visible_gpus = torch.cuda.device_count()
        if visible_gpus <= setup.gpu:
            raise ConfigError(
                f"{setup.ranks} ranks need {setup.ranks} GPUs, one each, and there are {visible_gpus}. Lower `ranks`, "
                f"or make more of them visible."
            )
        torch.cuda.set_device(setup.gpu)
    timeout = timedelta(seconds=setup.timeout)
    store = TCPStore(
        setup.host,
        setup.port,
        setup.ranks,
        is_master=setup.listener is not None,
        timeout=timeout,
        master_listen_fd=setup.listener,
    )
    backend = "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.ranks, timeout=timeout)


def _send_heartbeats(channel: PipeChannel, interval: float) -> None:
    """Send heartbeats, independent of the other threads."""
    while True:
        channel.send(HeartbeatMessage())
        time.sleep(interval)


def _receive(channel: PipeChannel, jobs: SimpleQueue[CallRequest], async_calls: AsyncCallRunner) -> None:
    """Receive messages until the pipe ends, then kill this process group."""
    while (message := channel.receive()) is not None:
        if isinstance(message, CallRequest):
            jobs.put(message)
        else:
            async_calls.handle(message)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class AsyncCallRunner:
    """Async calls to coroutine methods of the worker, on an event loop in a separate thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.worker: object | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = EventLoop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def handle(self, message: object) -> None:
        """Start an async call, or cancel one without a caller."""
        if isinstance(message, AsyncCallRequest):
            self._loop.call_soon_threadsafe(self._begin, message)
        elif isinstance(message, CancelAsyncCall):
            self._loop.call_soon_threadsafe(self._end, message.number)

    def _begin(self, request: AsyncCallRequest) -> None:
        self._tasks[request.number] = self._loop.create_task(self._answer(request))

    def _end(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, request: AsyncCallRequest) -> None:
        try:
            method, *args = self._channel.deserialize(request.body)
            result = await method(self.worker, *args, on_start=lambda: self._channel.send(CallStarted(request.number)))
            self._channel.send(CallResult(request.number, self._channel.serialize(result)))
        except Exception as error:
            self._channel.send(_to_call_error(request.number, error))
        finally:
            del self._tasks[request.number]


class _ForwardHandler(logging.Handler):
    """A log handler that sends warnings to the controller. Tracebacks stay in the rank's own log."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:
            with suppress(OSError):  # the controller has ended
                self._channel.send(RankLogRecord(record.levelno, record.name, record.getMessage()))


def _to_call_error(number: int, error: BaseException) -> CallError:
    """Return the reply for an error, with the error itself if it is an `EtudeError` that can be pickled."""
    get_logger("dispatch").error("This call failed:", exc_info=error)
    description = f"{type(error).__name__}: {error}{_raised_at(error)}"
    return CallError(number, error if isinstance(error, EtudeError) and _is_picklable(error) else None, description)


def _is_picklable(error: EtudeError) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False


def _raised_at(error: BaseException) -> str:
    """Return where it was raised: the last frame in Etude, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    etude_frames = [frame for frame in frames if frame.filename.startswith(_PACKAGE) and frame.filename != __file__]
    shown = (*etude_frames[-1:], *frames[-1:])
    locations = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in shown]
    return f" ({', '.join(dict.fromkeys(locations))})" if locations else ""
