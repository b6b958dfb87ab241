"""Which engine samples: the one in this process, or servers of vLLM or SGLang."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from etude.errors import ConfigError
from etude.rollout.base_config import RolloutConfig
from etude.rollout.server_backend import ServerBackend
from etude.rollout.sglang import SglangBackend
from etude.rollout.vllm import VllmBackend

__all__ = ["ENGINES", "ServerConfig", "SglangConfig", "TorchEngineConfig", "VllmConfig"]

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/]+/?$")]


class TorchEngineConfig(RolloutConfig):
    """The embedded engine."""

    kv_gib: float = Field(1.0, gt=0, description="GiB of memory for keys and values")
    block_size: int = Field(16, ge=1, description="tokens in a block of keys and values")
    max_num_batched_tokens: int = Field(2048, ge=1, description="most prompt tokens computed in a step")
    deterministic: bool = Field(True, description="float32 results that do not depend on what shares a batch")
    prepack: bool = Field(
        True,
        description="on a CPU that multiplies bf16 itself, keep weights once more as it does: the same answers, sooner",
    )

    def max_concurrency(self, ranks: int) -> int:
        """Each rank has one."""
        return self.max_num_seqs * ranks


class ServerConfig(RolloutConfig):
    """Servers that sample, in a Python environment of their own."""

    environment_names: ClassVar[Mapping[str, str]]
    """The named environment for each device."""

    url: tuple[Url, ...] = Field((), description="servers that run already; by default some are started")
    api_key_env: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*$",
        description="the environment variable that holds the key of the servers in `url`; null sends them none",
    )
    python: Path | None = Field(
        None, description="the Python that has the server's packages; null is an environment that is made when needed"
    )
    replicas: int = Field(1, ge=1, description="servers that are started, which share the work")
    tensor_parallel: int = Field(1, ge=1, description="devices that share each layer of one replica")
    nodes: int = Field(1, ge=1, description="machines that share one replica; the command for each other is told")
    rendezvous: str = Field(
        "127.0.0.1:29500", description="host:port of this machine at which the nodes of a replica meet"
    )
    devices: tuple[int, ...] = Field(
        (), description="GPUs for the replicas, in order, `tensor_parallel` for each; by default those that are there"
    )
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="share of a GPU's memory that a server takes; null is the server's own default"
    )
    kv_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of memory for keys and values; null is what `gpu_memory_utilization` leaves for them",
    )
    max_waiting: int = Field(4096, ge=0, description="most requests that wait for their turn; others are refused")
    start_timeout: float = Field(
        900.0, gt=0, description="seconds that a server may take to start, or be away while requests wait"
    )
    restarts: int = Field(3, ge=0, description="how often a server that ended, or hangs, is started again")
    server_args: tuple[str, ...] = Field((), description="what else stands on the servers' command line")
    weight_transport: Literal["files", "shm", "ipc", "gloo", "nccl"] = Field(
        "files",
        description="how weights reach the servers: `files` of a whole model, `shm`: shared memory of this machine, "
        "`ipc`: that of its GPU, `gloo` and `nccl`: a broadcast on this machine, between processors or GPUs",
    )
    adapters: Literal["merged", "only"] = Field(
        "merged",
        description="how servers get trained adapters: `merged` into whole weights; `only`: they alone, as files, to "
        "servers that keep the weights that they began with",
    )
    bucket_mib: int = Field(
        256, ge=1, description="MiB of a bucket of weights, of which there are two; `files` have none"
    )
    running: Literal["continue", "finish"] = Field(
        "continue",
        description="what becomes of answers under way when a carrier brings weights: `continue`: they go on with the "
        "new ones, and each token carries the version that drew it; `finish`: publishing waits for them",
    )
    update_timeout: float = Field(
        300.0, gt=0, description="seconds that a server may take for one part of what a carrier brings, or to finish"
    )
    address: str | None = Field(
        None,
        description="where servers reach the ranks that bring weights by `gloo` or `nccl`; null is the address from "
        "which a rank reaches the server",
    )

    @field_validator("url", "server_args", mode="before")
    @classmethod
    def _wrap_single_value(cls, value: Any) -> Any:
        """One may stand without brackets."""
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        fields = type(self).model_fields
        if self.url:
            launch_options = (
                "python",
                "replicas",
                "tensor_parallel",
                "nodes",
                "rendezvous",
                "devices",
                "gpu_memory_utilization",
                "kv_gib",
            )
            for name in (*launch_options, "restarts", "server_args"):
                if getattr(self, name) != fields[name].default:
                    raise ConfigError(
                        f"`rollout.{name}` is for servers that are started, and `rollout.url` names some that run. "
                        f"Leave one of them out."
                    )
        if self.api_key_env is not None and not self.url:
            raise ConfigError(
                "`rollout.api_key_env` is for servers that `rollout.url` names; those that are started get keys of "
                "their own. Leave it out."
            )
        if "--api-key" in " ".join(self.server_args):
            raise ConfigError(
                "`rollout.server_args` holds an `--api-key`, and servers that are started get keys of their own. Leave "
                "it out."
            )
        needed = self.replicas * self.tensor_parallel // self.nodes
        if self.devices and len(self.devices) != needed:
            raise ConfigError(
                f"`rollout.devices` names {len(self.devices)} GPUs, and `rollout.replicas` x "
                f"`rollout.tensor_parallel` / `rollout.nodes` wants {needed}. Name as many."
            )
        if self.nodes > 1 and (self.tensor_parallel % self.nodes or self.replicas > 1):
            raise ConfigError(
                f"`rollout.nodes={self.nodes}` share one replica, each with as many devices: have `rollout.replicas=1` "
                f"and a `rollout.tensor_parallel` that {self.nodes} divides."
            )
        for name in ("bucket_mib", "running", "update_timeout"):
            if self.weight_transport == "files" and getattr(self, name) != fields[name].default:
                raise ConfigError(
                    f"`rollout.{name}` is for carriers that bring weights in buckets, and "
                    "`rollout.weight_transport=files` has none. Leave it out, or choose "
                    "`rollout.weight_transport=shm`."
                )
        if self.adapters == "only" and self.weight_transport != "files":
            raise ConfigError(
                "`rollout.adapters=only` brings adapters as files, and "
                f"`rollout.weight_transport={self.weight_transport}` brings whole weights. Leave one of them out."
            )
        if self.address is not None and self.weight_transport not in ("gloo", "nccl"):
            raise ConfigError(
                "`rollout.address` is where servers reach the trainer, and by "
                f"`rollout.weight_transport={self.weight_transport}` they do not. Leave it out, or choose "
                "`rollout.weight_transport=gloo` or `nccl`."
            )
        if self.nodes == 1 and self.rendezvous != fields["rendezvous"].default:
            raise ConfigError("`rollout.rendezvous` is where several `rollout.nodes` meet. Leave it out, or set those.")
        return self

    def max_concurrency(self, ranks: int) -> int:  # noqa: ARG002
        """How many requests are computed at once by all of it."""
        return self.max_num_seqs * (len(self.url) or self.replicas)

    def needs_untied_head(self, device: str) -> bool:  # noqa: ARG002
        """Whether a model whose head is its embedding is to be served with a head of its own."""
        return False

    @abstractmethod
    def create_backend(self) -> ServerBackend:
        """How these servers are spoken to."""


class VllmConfig(ServerConfig):
    """Servers of vLLM."""

    environment_names: ClassVar[Mapping[str, str]] = {"cpu": "vllm-cpu", "cuda": "vllm"}

    def needs_untied_head(self, device: str) -> bool:
        """On a CPU vLLM computes with a packed copy of the head, which new weights reach only where it is a weight of
        its own."""
        return device == "cpu"

    def create_backend(self) -> ServerBackend:
        """vLLM's."""
        return VllmBackend(adapters=self.adapters == "only")


class SglangConfig(ServerConfig):
    """Servers of SGLang."""

    environment_names: ClassVar[Mapping[str, str]] = {"cuda": "sglang"}

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if self.adapters != "merged":
            raise ConfigError(
                "`rollout.adapters=only` is for servers of vLLM so far. Leave it out, or choose `rollout=vllm`."
            )
        if "--config" in " ".join(self.server_args):
            raise ConfigError(
                "`rollout.server_args` holds a `--config`, and SGLang reads one such file, in which it gets its key. "
                "Give the options that are in it themselves."
            )
        return self

    def create_backend(self) -> ServerBackend:
        """SGLang's."""
        return SglangBackend()


ENGINES: dict[str, type[RolloutConfig]] = {"embedded": TorchEngineConfig, "vllm": VllmConfig, "sglang": SglangConfig}
"""What samples, by its name."""
