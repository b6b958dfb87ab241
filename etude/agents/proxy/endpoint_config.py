"""The options of the model endpoint."""

from __future__ import annotations

from pydantic import Field

from etude.agents.proxy.external import ExternalModel
from etude.agents.proxy.sampling_rules import ParameterMode
from etude.config import Config


class EndpointConfig(Config):
    """The model endpoint."""

    max_running: int = Field(256, ge=1, description="most answers sampled at once; more calls wait")
    max_waiting: int = Field(2048, ge=0, description="most calls that wait; the next is answered 429, with Retry-After")
    timeout_s: float = Field(600.0, gt=0, description="seconds for a call, waiting included; then it is answered 504")
    max_body_mib: float = Field(
        16.0, gt=0, le=32, description="MiB of the largest request; a larger one is answered 413"
    )
    parameters: ParameterMode = Field(
        "force", description="force: the run's sampling parameters hold; default: the agent's own, where it sets them"
    )
    strict: bool = Field(
        False, description="refuse requests whose fields the run decides or cannot serve, in place of ignoring those"
    )
    count_rerendered: bool = Field(
        True, description="count the tokens that rendering conversations again would have changed"
    )
    max_images: int = Field(16, ge=1, description="most images of a request")
    image_hosts: tuple[str, ...] = Field((), description="hosts from which images are fetched; none: data URLs only")
    external: dict[str, ExternalModel] = Field(
        {}, description="models of other providers, by the names that agents ask for: recorded, never trained"
    )
