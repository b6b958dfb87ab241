"""What differs between the servers that Etude drives: how each is started, asked, and told what to do.

A dialect is a bundle of small translations without a state; `Server` is the engine that speaks one. Everything goes
through endpoints that the server's makers publish: nothing in it is patched.
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
    from etude.rollout.connection import Connection
    from etude.rollout.figures import Figures

__all__ = ["Dialect", "Launch", "Piece", "plain", "refuse_bias"]

Span = tuple[str, int, int]
"""A version's label, and the tokens from and up to which it drew."""
BIAS = 100.0
"""The largest logit bias, either way, that servers take as it is."""


@dataclass(frozen=True)
class Launch:
    """What a server is started with."""

    model: Path
    python: Path
    port: int
    """Of the loopback interface; 0 until it is started."""
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    devices: tuple[int, ...]
    """The GPUs that it may see; none named are all."""
    max_running: int
    tensor_parallel: int
    nodes: int
    meet: str
    """Where the nodes of one replica meet."""
    memory: float | None
    """Share of a GPU's memory."""
    kv_gib: float | None
    kv_tokens: int | None
    """The same, in tokens."""
    sleeps: bool
    """Whether it is to give its memory up when it is asked to."""
    threads: int
    arguments: tuple[str, ...] = ()
    plugged: Path | None = None
    """A folder with Etude's plug-in for weights, for the path that the server's Python imports from."""
    adapter_rank: int = 0
    """The inner width of the adapters that it is brought; 0 if it is brought whole weights."""
    key: str = field(default="", repr=False)
    """What it is to ask for from whoever speaks with it. It stands on no command line, which any user can read."""
    keyed: Path | None = None
    """Where it finds that, if it does not take it from its environment."""


@dataclass
class Piece:
    """What a streamed answer has gained: lists with one entry for each new token."""

    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens and their log-probs, where they were asked for."""
    finish: str | None = None
    spans: list[Span] | None = None
    """With the last piece: which version drew which tokens."""


class Dialect(ABC):
    """One kind of server."""

    name: ClassVar[str]
    supported: ClassVar[tuple[int, ...]]
    """The beginning of the versions that this is written for."""
    package: ClassVar[str]
    health: ClassVar[str] = "/health"
    """Where it says that it is well, also while it is paused."""
    adapters: bool = False
    """Whether servers are brought adapters of the model that they began with, and asked for answers through them."""

    @abstractmethod
    def command(self, launch: Launch, node: int = 0) -> list[str]:
        """What to start on a node of a replica."""

    def environment(self, launch: Launch) -> dict[str, str]:
        """What its process finds in its environment: nothing is fetched from anywhere, and no other GPU is seen."""
        found = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if launch.device == "cpu":
            found |= {"OMP_NUM_THREADS": str(launch.threads), "CUDA_VISIBLE_DEVICES": ""}
        elif launch.devices:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.devices))
        return found

    def keyed(self, launch: Launch) -> str:  # noqa: ARG002
        """What stands in the file that a server takes its key from; nothing where its environment has it."""
        return ""

    @abstractmethod
    async def version(self, to: Connection) -> str:
        """Which version of it is there."""

    @abstractmethod
    def refuse(self, sampling: SamplingParams) -> None:
        """Refuse what would mean something else there."""

    @abstractmethod
    def ask(
        self, to: Connection, prompt: list[int], sampling: SamplingParams, ends: list[int]
    ) -> AsyncGenerator[Piece, None]:
        """Sample, piece by piece. `ends` are the tokens that end an answer."""

    @abstractmethod
    async def pause(self, to: Connection) -> None:
        """Stop between two tokens; what is under way stays."""

    @abstractmethod
    async def resume(self, to: Connection) -> None:
        """Go on."""

    @abstractmethod
    async def abort(self, to: Connection) -> None:
        """End all that is under way."""

    @abstractmethod
    async def sleep(self, to: Connection) -> None:
        """Give the memory back."""

    @abstractmethod
    async def wake(self, to: Connection) -> None:
        """Take the memory again."""

    @abstractmethod
    async def forget(self, to: Connection) -> None:
        """Use no keys and values again that were computed before."""

    @abstractmethod
    async def label(self, to: Connection, version: int) -> None:
        """Have tokens that are drawn from now on carry this version."""

    @abstractmethod
    async def labelled(self, to: Connection) -> str:
        """What they carry."""

    @abstractmethod
    async def load(self, to: Connection, directory: Path, version: int) -> None:
        """Compute with the weights in a directory, under a version."""

    @abstractmethod
    async def rests(self, to: Connection) -> bool:
        """Whether its engine sleeps or is paused, as the engine itself says, between two steps: the process in front of
        it cannot answer for it. False where it cannot tell."""

    @abstractmethod
    async def figures(self, to: Connection) -> Figures:
        """How much it has to do."""

    async def check(self, to: Connection) -> str:
        """The server's version, refused in a sentence where this is not written for it."""
        found = await self.version(to)
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[: len(self.supported)] if part.isdigit())
        if numbers != self.supported:
            wanted = ".".join(map(str, self.supported))
            raise ConfigError(
                f"The server at {to.url} is {self.package} {found}, and Etude speaks with {wanted}. Let Etude make its "
                f"own environment (leave `rollout.python` and `rollout.url` out), or install {self.package} {wanted}."
            )
        return found

    def context(self, models: Mapping[str, Any]) -> int:
        """How many tokens it has room for in one answer, its prompt included; from what its /v1/models says."""
        return int(models["data"][0]["max_model_len"])


def plain(sampling: SamplingParams) -> bool:
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


def refuse_bias(sampling: SamplingParams, server: str) -> None:
    """Refuse a logit bias that a server would cut to its own range."""
    wrong = next((bias for bias in sampling.logit_bias.values() if not abs(bias) <= BIAS), None)
    if wrong is not None:
        raise ConfigError(
            f"A logit bias of {wrong:g} was asked for, and {server} takes none beyond {BIAS:g} either way. {-BIAS:g} "
            f"keeps a token from being drawn."
        )
