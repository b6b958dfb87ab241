"""Ray itself: the one that is there already, the one that `RAY_ADDRESS` names, or one of our own on this machine.

One of our own has no dashboard, tells nobody about its use, speaks through the loopback interface and lies in a
directory that is removed. It ends with us, however we end: by `close`, or by the system, which ends its processes with
the thread that started them (on Linux; elsewhere a process of Ray's watches us).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import ray

from etude.config.env import ray_address
from etude.errors import CrewError
from etude.observe import get_log

__all__ = ["Cluster"]

STORE = 512 * 2**20
"""Bytes that the object store of a Ray of our own may take; what is more goes to the disk."""


class Cluster:
    """Ray, as this process is joined to it until this is closed."""

    def __init__(self, cpus: int) -> None:
        """`cpus` is what a Ray of our own offers at least, whatever the machine has."""
        self._place: TemporaryDirectory[str] | None = None
        self._joined = not ray.is_initialized()
        self.logs = "the folder `logs` of its session"
        if self._joined:
            address = ray_address()
            self._begin({"address": address} if address else self._own(cpus), address)

    def close(self) -> None:
        """Leave it; one of our own ends."""
        if self._joined:
            ray.shutdown()
        if self._place is not None:
            with suppress(OSError):
                self._place.cleanup()
        self._joined, self._place = False, None

    def _own(self, cpus: int) -> dict[str, Any]:
        get_log("dispatch").info("Starting Ray on this machine. `RAY_ADDRESS` would have joined another.")
        self._place = TemporaryDirectory(prefix="etude-ray-", ignore_cleanup_errors=True)
        self.logs = f"{self._place.name}/session_latest/logs"
        return {
            "address": "local",
            "num_cpus": max(cpus, os.cpu_count() or 1),
            "include_dashboard": False,
            "object_store_memory": STORE,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": self._place.name,
        }

    def _begin(self, options: dict[str, Any], address: str | None) -> None:
        """Start or join. Ray takes the signal that asks a process to end for itself: it is given back."""
        ours = threading.current_thread() is threading.main_thread()
        asked = signal.getsignal(signal.SIGTERM) if ours else None
        try:
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
        except (RuntimeError, OSError, ValueError, TimeoutError) as error:
            self.close()
            where = f"`RAY_ADDRESS` = {address} cannot be joined" if address else "Ray did not start on this machine"
            remedy = "Start it there, or unset `RAY_ADDRESS`" if address else "`cluster=local` does without it"
            raise CrewError(f"{where} ({error}). {remedy}.") from error
        finally:
            if ours:
                signal.signal(signal.SIGTERM, asked)
