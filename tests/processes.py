"""Observe processes: whether they run, their children, and their memory."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def gone(pid: int, within: float = 10.0) -> bool:
    """Return whether a process has ended, or ends within the time. A zombie has ended."""
    until = time.monotonic() + within
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)


def rise_of(act: Callable[[], object]) -> int:
    """Return by how many bytes the peak memory of this process rises during the call, as the system counts it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is reset to the current size
    before = _memory("VmRSS")
    act()
    return _memory("VmHWM") - before


def heap_rise_of(act: Callable[[], object]) -> int:
    """Return by how many bytes this process's unshared memory rises during the call, sampled every few milliseconds.

    Free memory is given back before, so that every call has to ask the system for what it uses.
    """
    give_memory_back()
    before, most, over = _memory("RssAnon"), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.003):
            most[0] = max(most[0], _memory("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        act()
    finally:
        over.set()
        watching.join()
    return max(most[0], _memory("RssAnon")) - before


def give_memory_back() -> None:
    """Collect garbage, and return free memory to the system."""
    gc.collect()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _memory(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def descendants(pid: int) -> list[int]:
    """Return all processes that this one has started, and theirs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids, before = {pid}, 0
    while len(pids) > before:
        before = len(pids)
        pids |= {child for child, parent in parents.items() if parent in pids}
    return sorted(pids - {pid})
