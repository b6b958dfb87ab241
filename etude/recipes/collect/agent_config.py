"""The options of agents, their runners, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from etude.config import Config
from etude.config.address import parse_address
from etude.config.resume_marks import MAY_CHANGE


class AgentConfig(Config):
    """The agent that makes rollouts, its runners, and its limits."""

    path: str | None = Field(
        None, description="path/to/file.py:name or module:name: a function or class, `@etude.agent`"
    )
    sources: Mapping[str, str] = Field(
        {},
        description="the agent of each data source in a mix, by its name; tasks of others go to `agent.path`, or are "
        "answered once",
    )
    strategy: Annotated[Literal["shm", "cs"], MAY_CHANGE] = Field(
        "shm", description="shm: runners are threads of this process; cs: runners are separate processes"
    )
    runners: Annotated[int, MAY_CHANGE] = Field(
        1, ge=0, description="runners to start; 0 waits for runners that join from elsewhere"
    )
    max_concurrency: Annotated[int, MAY_CHANGE] = Field(
        16, ge=1, description="attempts that each runner makes at a time; more need more memory and model calls"
    )
    timeout: Annotated[float, MAY_CHANGE] = Field(
        600.0, gt=0, description="seconds that an attempt may take; smaller fails slow attempts earlier"
    )
    heartbeat_timeout: Annotated[float, MAY_CHANGE] = Field(
        60.0,
        gt=0,
        description="seconds without a heartbeat after which a runner's attempts are lost; smaller retries "
        "them earlier",
    )
    runner_timeout: Annotated[float, MAY_CHANGE] = Field(
        300.0, gt=0, description="seconds to wait for a runner while there is none, before the run fails"
    )
    failed_reward: float | Literal["drop"] = Field(
        "drop", description="reward of an attempt whose last retry failed; drop trains on none"
    )
    tags: tuple[str, ...] = Field((), description="train only on turns with one of these tags; empty trains on all")
    parameters: Literal["force", "default"] = Field(
        "force", description="force: the run's sampling parameters apply; default: the agent's own, where it sets them"
    )
    strict: bool = Field(
        False, description="refuse requests with fields that the run sets or cannot serve; false ignores those fields"
    )
    max_calls: Annotated[int, MAY_CHANGE] = Field(
        256, ge=1, description="model calls that are answered at a time; more calls wait"
    )
    image_hosts: tuple[str, ...] = Field(
        (), description="hosts from which the endpoint fetches the images of calls; none: only images within calls"
    )
    external: Path | None = Field(
        None, description="a YAML file of other providers' models that agents may call: recorded, never trained"
    )
    store: Annotated[str | None, MAY_CHANGE] = Field(
        None,
        description="address of a store (`etude store DIRECTORY`) that keeps the rollouts; its admin key is read "
        "from ETUDE_STORE_KEY. null keeps them in this process",
    )
    listen: Annotated[str, MAY_CHANGE] = Field(
        "127.0.0.1:0",
        description="address and port of the endpoint, and of this process's own store; port 0 is a free one",
    )

    @field_validator("listen")
    @classmethod
    def _listen_is_an_address(cls, value: str) -> str:
        parse_address(value, "agent.listen=")
        return value

    @property
    def is_enabled(self) -> bool:
        """True if agents make the rollouts, and not the run's own engine."""
        return bool(self.names)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port to listen on."""
        return parse_address(self.listen, "agent.listen=")

    @property
    def names(self) -> list[str]:
        """The names of all agents."""
        return [*([] if self.path is None else [self.path]), *self.sources.values()]

    def plays(self, source: str) -> bool:
        """Return whether an agent plays the tasks of a data source, which are not answered once."""
        return self.path is not None or source in self.sources
