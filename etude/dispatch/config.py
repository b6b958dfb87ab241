"""The time limits of processes that work together."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from etude.config import Config
from etude.config.resume_marks import MAY_CHANGE


class CrewConfig(Config):
    """The processes of several ranks."""

    heartbeat_timeout: Annotated[float, MAY_CHANGE] = Field(
        30.0,
        gt=0,
        description="seconds without a heartbeat of a rank, busy or not, until the run ends; longer for slow machines",
    )
    timeout: Annotated[float, MAY_CHANGE] = Field(
        1800.0,
        gt=0,
        description="seconds for ranks to start, and to wait for each other in a collective or at a call's end",
    )
