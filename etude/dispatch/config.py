"""The time limits of processes that work together."""

from __future__ import annotations

from pydantic import Field

from etude.config import Config


class CrewConfig(Config):
    """The processes of several ranks."""

    heartbeat_timeout: float = Field(
        30.0,
        gt=0,
        description="seconds without a heartbeat of a rank, busy or not, until the run ends; longer for slow machines",
    )
    timeout: float = Field(
        1800.0,
        gt=0,
        description="seconds for ranks to start, and to wait for each other in a collective or at a call's end",
    )
