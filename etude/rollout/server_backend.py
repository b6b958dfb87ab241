"""What differs between the servers that Etude drives: how each is started, asked, and told what to do.

A dialect is a bundle of small translations without a state; `ServerEngine` is the engine that speaks one. Everything
goes through endpoints that the server's makers publish: nothing in it is patched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from etude.errors import ConfigError
from etude.records import SamplingParams

if TYPE_CHECKING:
    from etude.rollout.http_client import HttpClient
    from etude.rollout.server_load import ServerLoad

__all__ = ["LaunchSpec", "ServerBackend", "StreamChunk", "check_logit_bias", "samples_model_distribution"]

VersionSpan = tuple[str, int, int]
"""A version's label, and the tokens from and up to which it drew."""
MAX_LOGIT_BIAS = 100.0
"""The largest logit bias, either way, that servers take as it is."""


@dataclass(frozen=True)
class LaunchSpec:
    """What a server is started with."""

    model: Path
    python: Path
    port: int
    """Of the loopback interface; 0 until it is started."""
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    devices: tuple[int, ...]
    """The GPUs that it may see; none named are all."""
    max_num_seqs: int
    tensor_parallel: int
    nodes: int
    rendezvous: str
    """Where the nodes of one replica meet."""
    gpu_memory_utilization: float | None
    """Share of a GPU's memory."""
    kv_gib: float | None
    kv_tokens: int | None
    """The same, in tokens."""
    enable_sleep: bool
    """Whether it is to give its memory up when it is asked to."""
    threads: int
    server_args: tuple[str, ...] = ()
    plugin_path: Path | None = None
    """A folder with Etude's plug-in for weights, for the path that the server's Python imports from."""
    adapter_rank: int = 0
    """The inner width of the adapters that it is brought; 0 if it is brought whole weights."""
    key: str = field(default="", repr=False)
    """What it is to ask for from whoever speaks with it. It stands on no command line, which any user can read."""
    key_file: Path | None = None
    """Where it finds that, if it does not take it from its environment."""


@dataclass
class StreamChunk:
    """What a streamed answer has gained: lists with one entry for each new token."""

    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens and their log-probs, where they were asked for."""
    finish_reason: str | None = None
    version_spans: list[VersionSpan] | None = None
    """With the last piece: which version drew which tokens."""


class ServerBackend(ABC):
    """One kind of server."""

    name: ClassVar[str]
    supported_version: ClassVar[tuple[int, ...]]
    """The beginning of the versions that this is written for."""
    package: ClassVar[str]
    health_path: ClassVar[str] = "/health"
    """Where it says that it is well, also while it is paused."""
    uses_adapters: bool = False
    """Whether servers are brought adapters of the model that they began with, and asked for answers through them."""

    @abstractmethod
    def command(self, launch: LaunchSpec, node: int = 0) -> list[str]:
        """What to start on a node of a replica."""

    def environment_variables(self, launch: LaunchSpec) -> dict[str, str]:
        """What its process finds in its environment: nothing is fetched from anywhere, and no other GPU is seen."""
        variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if launch.device == "cpu":
            variables |= {"OMP_NUM_THREADS": str(launch.threads), "CUDA_VISIBLE_DEVICES": ""}
        elif launch.devices:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.devices))
        return variables

    def key_file_text(self, launch: LaunchSpec) -> str:  # noqa: ARG002
        """What stands in the file that a server takes its key from; nothing where its environment has it."""
        return ""

    @abstractmethod
    async def get_server_version(self, client: HttpClient) -> str:
        """Which version of it is there."""

    @abstractmethod
    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse what would mean something else there."""

    @abstractmethod
    def stream(
        self, client: HttpClient, prompt: list[int], sampling: SamplingParams, stop_ids: list[int]
    ) -> AsyncGenerator[StreamChunk, None]:
        """Sample, piece by piece. `ends` are the tokens that end an answer."""

    @abstractmethod
    async def pause(self, client: HttpClient) -> None:
        """Stop between two tokens; what is under way stays."""

    @abstractmethod
    async def resume(self, client: HttpClient) -> None:
        """Go on."""

    @abstractmethod
    async def abort(self, client: HttpClient) -> None:
        """End all that is under way."""

    @abstractmethod
    async def sleep(self, client: HttpClient) -> None:
        """Give the memory back."""

    @abstractmethod
    async def wake(self, client: HttpClient) -> None:
        """Take the memory again."""

    @abstractmethod
    async def reset_prefix_cache(self, client: HttpClient) -> None:
        """Use no keys and values again that were computed before."""

    @abstractmethod
    async def set_version_label(self, client: HttpClient, version: int) -> None:
        """Have tokens that are drawn from now on carry this version."""

    @abstractmethod
    async def get_version_label(self, client: HttpClient) -> str:
        """What they carry."""

    @abstractmethod
    async def load(self, client: HttpClient, directory: Path, version: int) -> None:
        """Compute with the weights in a directory, under a version."""

    @abstractmethod
    async def is_suspended(self, client: HttpClient) -> bool:
        """Whether its engine sleeps or is paused, as the engine itself says, between two steps: the process in front of
        it cannot answer for it. False where it cannot tell."""

    @abstractmethod
    async def get_load(self, client: HttpClient) -> ServerLoad:
        """How much it has to do."""

    async def check_version(self, client: HttpClient) -> str:
        """The server's version, refused in a sentence where this is not written for it."""
        version = await self.get_server_version(client)
        numbers = tuple(
            int(part) for part in version.split("+")[0].split(".")[: len(self.supported_version)] if part.isdigit()
        )
        if numbers != self.supported_version:
            supported = ".".join(map(str, self.supported_version))
            raise ConfigError(
                f"The server at {client.url} is {self.package} {version}, and Etude speaks with {supported}. Let Etude "
                f"make its own environment (leave `rollout.python` and `rollout.url` out), or install {self.package} "
                f"{supported}."
            )
        return version

    def context_length(self, models: Mapping[str, Any]) -> int:
        """How many tokens it has room for in one answer, its prompt included; from what its /v1/models says."""
        return int(models["data"][0]["max_model_len"])


def samples_model_distribution(sampling: SamplingParams) -> bool:
    """Whether tokens are drawn from the model's own distribution."""
    return (
        sampling.temperature == 1
        and sampling.top_p == 1
        and sampling.top_k == 0
        and sampling.min_p == 0
        and sampling.repetition_penalty == 1
        and sampling.min_tokens == 0
        and not sampling.logit_bias
    )


def check_logit_bias(sampling: SamplingParams, server: str) -> None:
    """Refuse a logit bias that a server would cut to its own range."""
    too_large = next((bias for bias in sampling.logit_bias.values() if not abs(bias) <= MAX_LOGIT_BIAS), None)
    if too_large is not None:
        raise ConfigError(
            f"A logit bias of {too_large:g} was asked for, and {server} takes none beyond {MAX_LOGIT_BIAS:g} either "
            f"way. {-MAX_LOGIT_BIAS:g} keeps a token from being drawn."
        )
