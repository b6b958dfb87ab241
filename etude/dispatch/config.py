"""How long processes that work together may take, and be silent."""

from __future__ import annotations

from pydantic import Field

from etude.config import Config

__all__ = ["CrewConfig"]


class CrewConfig(Config):
    """The processes of several ranks."""

    heartbeat_timeout: float = Field(
        30.0, gt=0, description="seconds without a sign of life from a rank, busy or not, after which the run ends"
    )
    timeout: float = Field(
        1800.0,
        gt=0,
        description="seconds that ranks may take to start, and to wait for each other: in an exchange, or for a call's "
        "end",
    )
