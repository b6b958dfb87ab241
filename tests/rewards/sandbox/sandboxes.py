"""Programs in sandboxes, for tests that are not coroutines, and the search for their processes that are left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.rewards.sandbox.probe import Protection, probe_protections
from etude.rewards.sandbox.sandbox import ProgramResult, Sandbox, SandboxLimits

WAYS = {"namespaces": (), "without namespaces": ("namespaces",)}
"""The means of isolation that are left out: none, or the namespaces, as if the kernel granted none."""
NAMED = """
import ctypes
ctypes.CDLL(None).prctl(15, b"{name}")  # the system's name of this process, and of all that it starts
"""


def run(
    code: str, text: str = "", seconds: float = 10.0, *, without: Sequence[str] = (), **limits: Any
) -> ProgramResult:
    """Run a program once."""

    async def once() -> ProgramResult:
        async with Sandbox(code, SandboxLimits(**limits), without=without) as sandbox:
            return await sandbox.run(text, seconds)

    return asyncio.run(once())


def needs(protection: Protection, without: Sequence[str] = ()) -> None:
    """Skip a test of a protection that this machine does not grant."""
    if protection not in probe_protections(tuple(without)):
        pytest.skip(f"this machine grants programs no protection of the kind '{protection}'")


def left(name: str, within: float = 5.0) -> list[int]:
    """Return the processes of this name that are left after they had time to end."""
    until = time.monotonic() + within
    while (pids := _called(name)) and time.monotonic() < until:
        time.sleep(0.02)
    return pids


def _called(name: str) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text().strip() == name:
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids
