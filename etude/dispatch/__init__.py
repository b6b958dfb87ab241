"""How a call reaches the workers of a pool, and how their answers become one."""

from __future__ import annotations

from etude.dispatch.config import CrewConfig
from etude.dispatch.local import LocalCrew

__all__ = ["CrewConfig", "LocalCrew"]
