"""The reward of programs, and the sandbox in which they run. `guest` holds the code that runs inside it."""

from __future__ import annotations

from etude.rewards.sandbox.code import Code

__all__ = ["Code"]
