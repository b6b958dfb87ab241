"""How a call reaches the workers of a pool, and how their answers become one."""

from __future__ import annotations

from etude.dispatch.local import LocalCrew

__all__ = ["LocalCrew"]
