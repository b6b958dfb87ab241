"""Which machine a process is on."""

from __future__ import annotations

from pathlib import Path

__all__ = ["machine_id"]


def machine_id() -> str:
    """Names the machine, where processes have the numbers that they have here; empty where that cannot be told."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
