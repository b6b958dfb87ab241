"""The process environment: the one file that reads it."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from pathlib import Path

__all__ = [
    "bound_kernel_caches",
    "cache_directory",
    "etude_command",
    "for_one_machine",
    "memory_is_chosen",
    "required_components",
]


def required_components() -> frozenset[str]:
    """The components that must be present (`ETUDE_REQUIRE`, comma-separated): their tests fail instead of skipping."""
    return frozenset(word.strip() for word in os.environ.get("ETUDE_REQUIRE", "").split(",") if word.strip())


def etude_command() -> str:
    """How `etude` is called here, to be read by a shell: by its name where that finds it, else by its path beside this
    Python."""
    beside = Path(sys.executable).with_name("etude")
    found = shutil.which("etude")
    if found is not None or not beside.exists():
        return "etude"
    here = Path.cwd()
    near = str(beside.relative_to(here)) if beside.is_relative_to(here) else str(beside)
    return shlex.quote(near if os.sep in near else f"./{near}")


def cache_directory() -> Path:
    """Where what can be made again is kept between runs: `etude` in `XDG_CACHE_HOME`, by default `~/.cache`."""
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (asked if asked.is_absolute() else Path.home() / ".cache") / "etude"


def memory_is_chosen() -> bool:
    """Whether the environment says how freed memory is kept, or who allocates it."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)


def bound_kernel_caches(kernels: int) -> None:
    """Have oneDNN, and torch in front of it, keep so many of the kernels that they compile, unless the environment says
    how many. Both read it at their first kernel."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(kernels))


def for_one_machine() -> dict[str, str]:
    """The environment for processes that speak to each other and to no other machine: through the loopback interface,
    unless it says otherwise itself."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"GLOO_SOCKET_IFNAME": loopback, **os.environ}
