"""The differences between kinds of servers: how to start one, send requests to it, and give it weights.

A backend is a set of small translations without state; `ServerEngine` uses one. It calls only endpoints that the
server's authors publish. Nothing in a server is patched. Each kind has two files:

    vllm.py, sglang.py                    how it is spoken to: launch arguments, requests, replies, health, load
    vllm_weights.py, sglang_weights.py    how it takes weights: pauses, files, adapters, buckets

With `kv=recompute` the prefix cache of the old weights is dropped before an update counts as done, and requests that
wait in a pause recompute their own KV cache. With `kv=keep` both stay. Later requests then share nothing with earlier
ones, because each request names the weights that it began with.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from numpy.typing import NDArray

from etude.config.env import visible_gpus
from etude.errors import ConfigError, EtudeError
from etude.observe import get_logger
from etude.protocols import KvPolicy
from etude.records import SamplingParams
from etude.rollout.held_adapters import AdapterSpec
from etude.rollout.reported_sets import LOGPROBS_ALONE, Likeliest, Recording, active_filters, needs_report
from etude.rollout.served_images import TEXT_ALONE, ImageSupport, ServedImages
from etude.token_routes import TokenRoutes

if TYPE_CHECKING:
    from etude.chat import Tokenizer
    from etude.images import ImageLayout
    from etude.rollout.config import ServerConfig
    from etude.rollout.server_client import HttpClient
    from etude.rollout.server_load import ServerLoad
    from etude.sync.transport import Bucket, WeightReceiver

VersionSpan = tuple[str, int, int]
"""A version's label, and the first and the end index of the tokens that it drew."""
RETURN_ROUTES = "--enable-return-routed-experts"
"""The argument by which vLLM and SGLang report the experts of each token."""
MAX_LOGIT_BIAS = 100.0
"""The largest logit bias, either way, that servers take unchanged."""


@dataclass(frozen=True)
class LaunchSpec:
    """The settings with which a server is started."""

    config: ServerConfig
    """The options of the run's servers."""
    model: Path
    python: Path
    dtype: Literal["float32", "bfloat16", "float16"]
    device: Literal["cpu", "cuda"]
    devices: tuple[int, ...] = ()
    """The GPUs that it may see; empty for all."""
    kv_tokens: int | None = None
    """`rollout.kv_gib`, in tokens."""
    port: int = 0
    """A port of the loopback interface; 0 until it is started."""
    threads: int = 1
    enable_sleep: bool = False
    """True if it must be able to give its memory up."""
    plugin_path: Path | None = None
    """A directory with Etude's weight plug-in, for the import path of the server's Python."""
    adapters: AdapterSpec | None = None
    """The adapters that it holds; None if it receives whole weights."""
    key: str = field(default="", repr=False)
    """The API key that clients must send. It is on no command line, which any user can read."""
    key_file: Path | None = None
    """The file with that key, for a server that does not take it from its environment."""


@dataclass(frozen=True)
class ScoredTokens:
    """The scores of the tokens of a prompt: lists with one entry for each token but the first."""

    logp: list[float]
    likeliest: list[Likeliest]


@dataclass
class StreamChunk:
    """The new tokens of a streamed answer: lists with one entry for each token."""

    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    top_logprobs: list[Likeliest] = field(default_factory=list)
    """The likeliest tokens and their log-probs, if the request asked for them."""
    alternatives: list[Likeliest] = field(default_factory=list)
    """The same of the distribution that was drawn from, if the request asked for it."""
    sets: list[list[int]] | None = None
    """The tokens that could be drawn at each place, if the server reports them."""
    routes: TokenRoutes | None = None
    """In the last chunk: the experts of the prompt and the answer, if the request asked for them."""
    finish_reason: str | None = None
    version_spans: list[VersionSpan] | None = None
    """In the last chunk: the version that drew each span of tokens."""
    read: int = 0
    """The number of the read of the connection that completed it, from 1."""


class ServerBackend(ABC):
    """One kind of server."""

    name: ClassVar[str]
    tested_version: ClassVar[tuple[int, ...]]
    """The leading numbers of the versions that the tests run."""
    paths: ClassVar[frozenset[str]]
    """The endpoints that a server of another version must have."""
    package: ClassVar[str]
    health_path: ClassVar[str] = "/health"
    """The endpoint that reports health, also while the server is paused."""
    label_path: ClassVar[str]
    """The endpoint that reports the label of the weights."""
    resume_path: ClassVar[str]
    sleep_path: ClassVar[str]
    wake_path: ClassVar[str]
    update_paths: ClassVar[tuple[str, str]]
    """The endpoints that begin and finish an update by buckets."""
    sets_since: ClassVar[tuple[int, ...]]
    """The leading numbers of the first version that reports the tokens that could be drawn."""
    grammar_args: ClassVar[tuple[str, ...]]
    """The arguments that have it hold answers to grammars by llguidance."""
    adapters_path: ClassVar[str] = ""
    """The prefix of the endpoints for adapters."""

    def __init__(self, *, adapters: int = 0, kv: KvPolicy = "recompute", recording: Recording = LOGPROBS_ALONE) -> None:
        """adapters: the number of adapters that each server holds at a time, of the model that it began with. It
        answers by them. With 0 servers receive whole weights. kv: the treatment of cached keys and values of requests
        that go on with new weights. recording: what servers report of each token."""
        self.adapters = adapters
        self.kv = kv
        self.recording = recording
        self.discards_weights = False
        """True if sleep drops the weights, because all of them are sent again before the next request."""
        self.grammar_end_ids: tuple[int, ...] = ()
        """The tokens that may end an answer of a grammar there; empty if servers hold answers to none."""
        self.images: ImageSupport | None = None
        """The images that servers take; None for none."""
        self.refusal = TEXT_ALONE
        """The sentence that refuses images if servers take none."""

    # -- how it is spoken to ------------------------------------------------------------------------------------------

    @abstractmethod
    def command(self, launch: LaunchSpec, node: int = 0) -> list[str]:
        """Return the command line for a node of a replica."""

    def environment_variables(self, launch: LaunchSpec) -> dict[str, str]:
        """Return its environment variables: nothing is downloaded, and no other GPU is visible."""
        variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if launch.device == "cpu":
            variables |= {"OMP_NUM_THREADS": str(launch.threads), "CUDA_VISIBLE_DEVICES": ""}
        elif launch.devices:
            variables["CUDA_VISIBLE_DEVICES"] = visible_gpus(launch.devices)
        return variables

    def key_file_text(self, launch: LaunchSpec) -> str:  # noqa: ARG002
        """Return the content of the key file; empty if the key is in the environment."""
        return ""

    @abstractmethod
    async def get_server_version(self, client: HttpClient) -> str:
        """Return the version of the server software."""

    def read_routes(
        self, reported: NDArray[Any] | None, sampling: SamplingParams, finish_reason: str | None
    ) -> TokenRoutes | None:
        """Return the routes that a chunk reports; None if it has none, or the request did not ask for them.

        Refuse a server that ends an answer without them.
        """
        if sampling.routes_start is None or self.recording.routes is None:
            return None
        if reported is not None:
            return self.recording.routes.read(reported, sampling.routes_start, self.package)
        if finish_reason in ("stop", "length"):
            raise ConfigError(
                f"`train.router_replay=r3` takes routes from the sampler, and {self.package} was started without "
                f"`{RETURN_ROUTES}`. Start it with that, or set `train.router_replay=r2`."
            )
        return None

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse sampling parameters that would mean something else there, as a logit bias that servers clip."""
        if needs_report(sampling) and not self.recording.has_sets:
            name, value = next(iter(active_filters(sampling).items()))
            raise ConfigError(
                f"`{name}={value:g}` cuts tokens off an answer that is trained on, and this run has {self.package} "
                f"report no sets of tokens. Set `sampling.{name}` and `sampling.top_k` for the whole run, or leave it "
                "out."
            )
        if sampling.grammar is not None:
            self._check_bound(sampling)
        biases = [bias for bias in sampling.logit_bias.values() if bias != -math.inf]
        too_large = next((bias for bias in biases if not abs(bias) <= MAX_LOGIT_BIAS), None)
        if too_large is not None:
            raise ConfigError(
                f"A logit bias of {too_large:g} was asked for, and {self.package} takes none beyond "
                f"{MAX_LOGIT_BIAS:g} either way. {-MAX_LOGIT_BIAS:g} keeps a token from being drawn."
            )

    @abstractmethod
    def find_grammar_end_ids(self, tokenizer: Tokenizer, model: Path) -> tuple[int, ...]:
        """Return the tokens that its grammar engine takes for ends of an answer of the model in a directory."""

    def _check_bound(self, sampling: SamplingParams) -> None:
        """Refuse a request for an answer of a certain form that the server cannot follow."""
        if not self.grammar_end_ids:
            raise ConfigError(
                f"An answer of a certain form was asked for, and the grammar engine of {self.package} cannot read this "
                "model's tokenizer, or finds no end token. Ask for the form in the messages, or choose "
                "`rollout=embedded`."
            )
        if sampling.min_tokens or sampling.logit_bias:
            name = "min_tokens" if sampling.min_tokens else "logit_bias"
            raise ConfigError(
                f"An answer of a certain form was asked for with `{name}`, and {self.package} may then have no token "
                f"left to draw. Leave `{name}` out, or choose `rollout=embedded`."
            )

    def close(self) -> None:
        """End the threads that read images, once the pool of its servers closes."""
        if self.images is not None:
            self.images.pixels.close()

    @abstractmethod
    def image_refusal(self, layout: ImageLayout) -> str:
        """Return the sentence that refuses images of this layout; empty if they are taken."""

    @abstractmethod
    async def check_images(self, client: HttpClient) -> None:
        """Refuse a server that would compute other features of images than the trainer."""

    @abstractmethod
    def stream(
        self,
        client: HttpClient,
        prompt: list[int],
        sampling: SamplingParams,
        stop_ids: list[int],
        salt: str,
        images: ServedImages | None = None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Sample, chunk by chunk. A token of `stop_ids` ends the answer.

        The request shares cached keys and values only with requests of the same `salt`, a text for these weights. A
        server that holds adapters draws by that of `sampling.version`.
        """

    @abstractmethod
    async def score(self, client: HttpClient, prompt: list[int], top: int) -> ScoredTokens:
        """Return the log-prob of each token of a prompt but the first, and the `top` likeliest tokens at its place."""

    @abstractmethod
    async def is_suspended(self, client: HttpClient) -> bool:
        """Return True if the engine sleeps or is paused; False if it cannot tell.

        The engine itself answers, between two steps. The HTTP process in front of it cannot answer for it.
        """

    @abstractmethod
    async def get_load(self, client: HttpClient) -> ServerLoad:
        """Return the load that the server reports."""

    async def check_version(self, client: HttpClient) -> str:
        """Return the server's version. Raise if it is not a tested one, and lacks an endpoint or does not list them."""
        version = await self.get_server_version(client)
        numbers = tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())
        if self.recording.has_sets and numbers[: len(self.sets_since)] < self.sets_since:
            raise ConfigError(
                f"`sampling.top_k={self.recording.top_k}` cuts tokens off, and the server at {client.url}, "
                f"{self.package} {version}, does not report which. Use vLLM from 0.28 or SGLang from 0.5.23, or leave "
                "it out."
            )
        if numbers[: len(self.tested_version)] == self.tested_version:
            return version
        tested = ".".join(map(str, self.tested_version))
        try:
            listed = json.loads(await client.get("/openapi.json"))["paths"].keys()
        except (EtudeError, ValueError, KeyError, TypeError, AttributeError):
            listed = frozenset()  # then the version decides
        lacking = sorted(self.paths - listed)
        if lacking:
            raise ConfigError(
                f"The server at {client.url} is {self.package} {version}, and does not list the endpoint {lacking[0]}, "
                f"which Etude uses. {self.package} {tested} is tested. Let Etude make its own environment (leave "
                f"`rollout.python` and `rollout.url` out), or install {self.package} {tested}."
            )
        get_logger("rollout").warning(
            "The server at %s is %s %s; %s is tested. It has all endpoints that Etude uses, so it is used.",
            client.url,
            self.package,
            version,
            tested,
        )
        return version

    def context_length(self, models: Mapping[str, Any]) -> int:
        """Return the most tokens of one answer, prompt included, from the reply of /v1/models."""
        return int(models["data"][0]["max_model_len"])

    # -- how it takes weights -----------------------------------------------------------------------------------------

    @abstractmethod
    async def pause(self, client: HttpClient) -> None:
        """Stop between two tokens; requests under way stay."""

    async def resume(self, client: HttpClient) -> None:
        """Continue the requests under way."""
        await client.post(self.resume_path)

    @abstractmethod
    async def abort(self, client: HttpClient) -> None:
        """End all requests under way."""

    def check_sleep(self, python: Path) -> None:  # noqa: B027
        """Refuse a Python with which a server cannot give its memory up."""

    async def sleep(self, client: HttpClient) -> None:
        """Give the memory of weights, keys and values back."""
        await client.post(self.sleep_path)

    async def wake(self, client: HttpClient) -> None:
        """Allocate the memory again; with `discards_weights` that of weights alone, until `wake_cache`."""
        await client.post(self.wake_path)

    @abstractmethod
    async def wake_cache(self, client: HttpClient) -> None:
        """Allocate the memory of keys and values again, which `wake` left out so that new weights have room."""

    @abstractmethod
    async def set_version_label(self, client: HttpClient, version: int) -> None:
        """Label all tokens from now on with this version. The label is text there."""

    async def get_version_label(self, client: HttpClient) -> str:
        """Return the label of the current weights."""
        return str(json.loads(await client.get(self.label_path))["weight_version"])

    @abstractmethod
    async def load(self, client: HttpClient, directory: Path, version: int) -> None:
        """Load the weights in a directory, under a version. Requests under way wait meanwhile, and continue with
        them."""

    async def pause_for_update(self, client: HttpClient) -> None:
        """Pause for new weights, so that requests under way can go on with them as `kv` says."""
        await self.pause(client)

    async def begin_update(self, server: WeightReceiver) -> None:
        """Open an update. One that an earlier failure left open is closed first."""
        begin, finish = self.update_paths
        try:
            await server.post(begin)
        except EtudeError:
            with suppress(EtudeError):  # no update may be open, and the failure another
                await server.post(finish)
            await server.post(begin)

    @abstractmethod
    async def load_bucket(self, server: WeightReceiver, bucket: Bucket) -> None:
        """Have the server load a bucket over its own weights."""

    @abstractmethod
    async def finish_update(self, server: WeightReceiver) -> None:
        """Close the update: the server repacks packed weights. With `kv=recompute` it drops its caches."""

    @abstractmethod
    async def join_group(self, server: WeightReceiver, group: Mapping[str, Any]) -> None:
        """Have all ranks of the server join a process group in which the sender is rank 0."""

    async def load_adapter(self, client: HttpClient, name: str, directory: Path) -> None:
        """Load an adapter in peft's format beside those that are there.

        Requests wait while the engine reads its files, and go on with the adapters that they have.
        """
        await client.post(f"{self.adapters_path}/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def unload_adapter(self, client: HttpClient, name: str) -> None:
        """Let new requests use this adapter no more, and free its place."""
        await client.post(f"{self.adapters_path}/unload_lora_adapter", {"lora_name": name})

    async def list_adapters(self, client: HttpClient) -> set[str]:
        """Return the names of the adapters that the server lists. Its first model is the one without an adapter."""
        return {str(model["id"]) for model in json.loads(await client.get("/v1/models"))["data"][1:]}

    @abstractmethod
    async def adapter_limit(self, client: HttpClient) -> int:
        """Return the number of adapters by which the server can draw at a time; 0 if it was started without any."""

    @abstractmethod
    def adapter_remedy(self, adapters: int) -> str:
        """Return the sentence that says how a server is started that holds so many adapters."""

    async def check_adapters(self, client: HttpClient) -> None:
        """Refuse a server that holds fewer adapters than this run needs."""
        limit = await self.adapter_limit(client) if self.adapters else 0
        if limit < self.adapters:
            raise ConfigError(
                f"`rollout.adapters=only` needs servers that take {self.adapters} at a time (`max_staleness` + 2, or 1 "
                f"without staleness). The server at {client.url} takes {limit}. {self.adapter_remedy(self.adapters)}"
            )


def sent_biases(sampling: SamplingParams) -> dict[str, float]:
    """Return the logit biases as a request has them. A ban is the largest bias that servers take."""
    return {str(token): max(bias, -MAX_LOGIT_BIAS) for token, bias in sampling.logit_bias.items()}


def samples_model_distribution(sampling: SamplingParams) -> bool:
    """Return True if tokens are drawn from the model's own distribution."""
    return (
        sampling.temperature == 1
        and sampling.top_p == 1
        and sampling.top_k == 0
        and sampling.min_p == 0
        and sampling.repetition_penalty == 1
        and sampling.min_tokens == 0
        and not sampling.logit_bias
        and sampling.grammar is None
    )
