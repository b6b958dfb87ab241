"""Ray itself: the one that is there already, the one that `RAY_ADDRESS` names, or one of our own on this machine.

One of our own has no dashboard, tells nobody about its use, speaks through the loopback interface and lies in a
directory that is removed. It ends with us, however we end: by `close`, or by the system, which ends its processes with
the thread that started them (on Linux; elsewhere a process of Ray's watches us).

Ray gives a node half a minute to start, and no longer. On a machine that has much else to do that can be too little,
and it is tried again.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from etude.config.env import ray_address
from etude.errors import CrewError
from etude.observe import get_log

__all__ = ["Cluster"]

STORE = 512 * 2**20
"""Bytes that the object store of a Ray of our own may take; what is more goes to the disk."""
TRIES = 3
"""How often a Ray of our own is started before it is given up."""


class Cluster:
    """Ray, as this process is joined to it until this is closed."""

    def __init__(self, cpus: int) -> None:
        """`cpus` is what a Ray of our own offers at least, whatever the machine has."""
        self._place: TemporaryDirectory[str] | None = None
        self._joined = not ray.is_initialized()
        self.logs = "the folder `logs` of its session"
        if self._joined and (address := ray_address()):
            self._join(address)
        elif self._joined:
            self._start(cpus)

    def close(self) -> None:
        """Leave it; one of our own ends."""
        if self._joined:
            ray.shutdown()
        if self._place is not None:
            _end(self._place.name)
            self._place.cleanup()
        self._joined, self._place = False, None

    def _join(self, address: str) -> None:
        try:
            _init(address=address)
        except Exception as error:  # whatever Ray raises
            ray.shutdown()
            raise CrewError(
                f"`RAY_ADDRESS` = {address} cannot be joined ({error}). Start a Ray there (`ray start --head`), or "
                f"unset `RAY_ADDRESS` to have one on this machine."
            ) from error

    def _start(self, cpus: int) -> None:
        log = get_log("dispatch")
        log.info("Starting Ray on this machine. `RAY_ADDRESS` would have joined another.")
        for again in range(TRIES, 0, -1):
            self._place = TemporaryDirectory(prefix="etude-ray-", ignore_cleanup_errors=True)
            self.logs = f"{self._place.name}/session_latest/logs"
            try:
                _init(
                    address="local",
                    num_cpus=max(cpus, os.cpu_count() or 1),
                    include_dashboard=False,
                    object_store_memory=STORE,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=self._place.name,
                )
                return
            except Exception as error:  # whatever Ray raises
                self.close()
                self._joined = True
                if again == 1:
                    raise CrewError(
                        f"Ray did not start on this machine, {TRIES} times ({error}). `cluster=local` does without it."
                    ) from error
                log.warning("Ray did not start (%s). Trying once more.", error)


def _init(**options: Any) -> None:
    """Join Ray, or start it. It takes the signal that asks a process to end for itself: that is given back."""
    ours = threading.current_thread() is threading.main_thread()
    asked = signal.getsignal(signal.SIGTERM) if ours else None
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    finally:
        if ours:
            signal.signal(signal.SIGTERM, asked)


def _end(place: str) -> None:
    """End whatever Ray has started in this directory and left behind, where the system tells."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if place.encode() in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
