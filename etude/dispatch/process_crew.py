"""A crew of several processes on one machine, each of which is a rank of one process group.

                  ┌─ pipe ─ rank 0   worker ─┐
    controller ───┤                          ├─ gloo or NCCL, through the loopback interface
                  └─ pipe ─ rank 1   worker ─┘

However the controller ends, its ranks end too: at the end of their pipe, and on Linux by the system.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any

from etude.batch import StoredBytes
from etude.child_process import boot_command, describe_exit, kill_group
from etude.config.env import build_single_machine_env
from etude.dispatch.messages import PipeChannel, RankLogRecord
from etude.dispatch.multi_rank_crew import MultiRankCrew, Rendezvous
from etude.dispatch.rank_handle import EXIT_TIMEOUT, RankHandle
from etude.dispatch.shared_bytes import SharedMemory


class ProcessCrew(MultiRankCrew["ProcessRankHandle"]):
    """Workers in separate processes, called as one."""

    def __init__(self, factory: Callable[..., object], *args: object, ranks: int, logs: Path, **options: Any) -> None:
        """Start the ranks, each with `factory(*args)` as its worker, and return once all of them are ready.

        `logs` is the directory of the ranks' logs. `options` are those of `MultiRankCrew`.
        """
        handles = [ProcessRankHandle(rank, logs / f"rank-{rank}.log", self._forward_log) for rank in range(ranks)]
        super().__init__(handles, **options)
        self._memory = SharedMemory()
        self._start(factory, *args)

    def put_bytes(self, content: bytes) -> bytes | StoredBytes:
        return self._memory.put(content)

    def _spawn(self) -> Rendezvous:
        """Start every process. Rank 0 inherits the socket at which they meet."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for handle in self._handles:
                handle.start(*([listener.fileno()] if handle.rank == 0 else []))
            return Rendezvous("127.0.0.1", listener.getsockname()[1], listener.fileno())


class ProcessRankHandle(RankHandle):
    """A rank that is a process of this machine, and the pipe to it."""

    def __init__(self, rank: int, log: Path, on_log: Callable[[RankHandle, RankLogRecord], None]) -> None:
        super().__init__(rank, log, on_log)
        self._process: Popen[bytes] | None = None
        self._channel: PipeChannel | None = None

    def __str__(self) -> str:
        return f"Rank {self.rank}" + (f" (process {self._process.pid})" if self._process else "")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *descriptors: int) -> None:
        """Start the process. It ends at the latest with the thread that calls this."""
        connection, rank_connection = Pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        inherited = (rank_connection.fileno(), *descriptors)
        command = boot_command("etude.dispatch.rank", rank_connection.fileno(), dies_with_parent=True)
        with self.log.open("ab") as log:
            # A separate session: Ctrl-C reaches the controller only, and a kill ends its child processes too.
            self._process = Popen(
                command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                pass_fds=inherited,
                start_new_session=True,
                env=build_single_machine_env(),
            )
        rank_connection.close()
        self._channel = PipeChannel(connection)
        threading.Thread(target=self._read, name=f"etude-rank-{self.rank}", daemon=True).start()

    def send(self, message: object) -> None:
        assert self._channel is not None
        with suppress(OSError):
            self._channel.send(message)

    def dump_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        if self._process is not None:
            kill_group(self._process.pid)

    def wait(self) -> None:
        if self._process is not None and self._channel is not None:
            with suppress(TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT)
            self.closed.wait(EXIT_TIMEOUT)
            self._channel.close()

    @property
    def has_exited(self) -> bool:
        """True if the process or its pipe has ended."""
        return self._process is not None and (self._process.poll() is not None or self.closed.is_set())

    def exit_reason(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(EXIT_TIMEOUT)
        except TimeoutExpired:
            return "it closed its pipe, and still runs"
        hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
        return f"{describe_exit(code)}{hint}"

    def _read(self) -> None:
        assert self._channel is not None
        while (message := self._channel.receive()) is not None:
            self.on_message(message)
        self.closed.set()
