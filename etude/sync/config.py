"""The options of publishing weights to servers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from etude.config import Config
from etude.protocols import RunningPolicy, TransportName


class SyncConfig(Config):
    """Publishing weights to servers. An engine in this process needs none of it."""

    weight_transport: Literal[TransportName, "disk"] = Field(
        "shm",
        description="transport of weights to servers; `disk`: files in a directory that all see; `shm`: shared memory "
        "of one machine; `ipc`: memory of one GPU; `gloo`, `nccl`: a broadcast between CPUs or GPUs, also of several "
        "machines",
    )
    bucket_mib: int = Field(
        256, ge=1, description="MiB of a bucket, of which there are two; one tensor that is larger has room, too"
    )
    dtype: Literal["as_trained", "float32", "bfloat16", "float16"] = Field(
        "as_trained", description="dtype of weights on their way; engines cast to their own in any case"
    )
    running: RunningPolicy = Field(
        "continue",
        description="requests under way; finish: publishing waits for them; continue: they go on with the new weights, "
        "each token with its version; restart: they are ended, and their owner sends them again",
    )
    timeout: float = Field(300.0, gt=0, description="seconds that a server may take for one part of an update")
    directory: Path = Field(Path("weights"), description="for disk: where, relative to the run's directory")
    delta: bool = Field(False, description="for disk: write only the parts of the model that changed")
    address: str | None = Field(
        None,
        description="for nccl and gloo: where servers reach the trainer; null is from where it reaches them",
    )
