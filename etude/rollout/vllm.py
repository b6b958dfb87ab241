"""Communication with vLLM: launch arguments, requests and replies of its token-in, token-out endpoint, health, load."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError, EngineError
from etude.records import SamplingParams
from etude.rollout import vllm_images
from etude.rollout.held_adapters import adapter_name
from etude.rollout.reported_sets import Likeliest, active_filters, needs_report
from etude.rollout.server_backend import RETURN_ROUTES, LaunchSpec, ScoredTokens, StreamChunk, sent_biases
from etude.rollout.server_client import EndpointNotFoundError, HttpClient, ServerUnreachableError
from etude.rollout.server_load import ServerLoad
from etude.rollout.vllm_images import describe_images, image_args
from etude.rollout.vllm_weights import VllmWeights, adapter_args

if TYPE_CHECKING:
    from etude.chat import Tokenizer
    from etude.images import ImageLayout
    from etude.rollout.served_images import ServedImages

METRIC_PATTERN = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)\{.*\} (\S+)$", re.M
)
GENERATE = "/inference/v1/generate"
MAX_TOP_LOGPROBS = 19
"""The largest number of likely tokens that it reports, unless it is started with another limit."""
NO_LOGP = -9000.0
"""A log-prob below it is minus infinity."""
LOGPROBS_LIMIT = re.compile(r"Requested sample logprobs of \d+, which is greater than max allowed: (\d+)")
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks for which it can reserve memory."""

CPU_OPERATIONS = '{"custom_ops": ["-rotary_embedding"]}'
"""Rotary positions by torch on a CPU. vLLM 0.32's own operation there rotates wrongly what a model gives it by head,
such as latent attention and LFM2."""


class VllmBackend(VllmWeights):
    """vLLM's OpenAI-compatible server."""

    name: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vLLM"
    tested_version: ClassVar[tuple[int, ...]] = (0, 32)
    sets_since: ClassVar[tuple[int, ...]] = (0, 28)
    grammar_args: ClassVar[tuple[str, ...]] = ("--structured-outputs-config.backend", "guidance")
    paths: ClassVar[frozenset[str]] = VllmWeights.paths | {GENERATE, "/is_sleeping"}

    def command(self, launch: LaunchSpec, node: int = 0) -> list[str]:
        """Return the command line of its API server. Log-probs are those of the sampling distribution."""
        config = launch.config
        args = [str(launch.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.model)]
        args += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
        args += ["--generation-config", "vllm", "--enable-scale-out"]
        args += [] if config.max_num_seqs is None else ["--max-num-seqs", str(config.max_num_seqs)]
        args += [
            "--logprobs-mode",
            "processed_logprobs",
            "--max-logprobs",
            str(max(MAX_TOP_LOGPROBS, self.recording.alternatives) + 1),
            "--disable-uvicorn-access-log",
        ]
        args += ["--return-sampling-mask"] if self.recording.has_sets else []
        args += [RETURN_ROUTES] if self.recording.routes is not None else []
        args += self.grammar_args if self.grammar_end_ids else ()
        args += [] if self.images is None else image_args(self.images, config.server_args)
        if config.tensor_parallel > 1:
            args += ["--tensor-parallel-size", str(config.tensor_parallel)]
        if config.nodes > 1:
            host, _, port = config.rendezvous.rpartition(":")
            args += ["--nnodes", str(config.nodes), "--node-rank", str(node), "--master-addr", host]
            args += ["--master-port", port, *(["--headless"] if node else [])]
        if config.gpu_memory_utilization is not None:
            args += ["--gpu-memory-utilization", f"{config.gpu_memory_utilization:g}"]
        if config.kv_gib is not None:
            args += ["--kv-cache-memory-bytes", str(int(config.kv_gib * 2**30))]
        if launch.enable_sleep:
            args.append("--enable-sleep-mode")
        if launch.device == "cpu":
            args += ["--enforce-eager", "--compilation-config", CPU_OPERATIONS]
        if launch.plugin_path is not None:
            args += ["--weight-transfer-config", '{"backend": "etude"}']
        if launch.adapters is not None:
            args += ["--max-lora-rank", str(_round_up_rank(launch.adapters.rank)), *adapter_args(launch.adapters.held)]
        return [*args, *config.server_args]

    def environment_variables(self, launch: LaunchSpec) -> dict[str, str]:
        """Add variables that turn usage reports off and open the training endpoints.

        The API key protects only the paths below /v1, /v2 and /inference.
        """
        server = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if launch.device == "cpu" else {}
        plugin = {} if launch.plugin_path is None else {"PYTHONPATH": str(launch.plugin_path)}
        adapter = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if launch.adapters is not None else {}
        key = {"VLLM_API_KEY": launch.key} if launch.key else {}
        return super().environment_variables(launch) | server | cpu | plugin | adapter | key

    async def get_server_version(self, client: HttpClient) -> str:
        return str(json.loads(await client.get("/version"))["version"])

    def find_grammar_end_ids(self, tokenizer: Tokenizer, model: Path) -> tuple[int, ...]:  # noqa: ARG002
        """Return the tokenizer's own end token alone."""
        return tokenizer.eos_ids[:1] if "eos_token" in tokenizer.special_tokens else ()

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse combinations and sizes that vLLM does not support; every parameter has the usual meaning.

        A server that reports sets takes no request without `top_k`.
        """
        super().check_sampling(sampling)
        if sampling.repetition_penalty != 1 and sampling.logit_bias:
            raise ConfigError(
                "`repetition_penalty` and `logit_bias` are both set, and vLLM adds the bias before the penalty, other "
                "engines after. Leave one of them out."
            )
        if self.recording.has_sets and sampling.temperature > 0 and sampling.top_k == 0:
            raise ConfigError(
                "vLLM reports the tokens that can be drawn in this run, and then takes no request without `top_k`. Set "
                "`top_k`, 512 for example."
            )
        is_filtered = self.recording.has_sets or bool(active_filters(sampling))
        if sampling.top_logprobs > MAX_TOP_LOGPROBS or (sampling.top_logprobs and is_filtered):
            raise ConfigError(
                f"{sampling.top_logprobs} `top_logprobs` are set, and vLLM reports up to {MAX_TOP_LOGPROBS}, of the "
                f"tokens that `top_p`, `top_k` and `min_p` keep. Set fewer, without those."
            )

    def image_refusal(self, layout: ImageLayout) -> str:
        return vllm_images.image_refusal(layout)

    async def check_images(self, client: HttpClient) -> None:
        await vllm_images.check_server(client)

    async def stream(
        self,
        client: HttpClient,
        prompt: list[int],
        sampling: SamplingParams,
        stop_ids: list[int],
        salt: str,
        images: ServedImages | None = None,
    ) -> AsyncGenerator[StreamChunk, None]:
        likeliest = max(sampling.top_logprobs, sampling.alternatives)
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            **self._distribution(sampling),
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": likeliest and likeliest + 1,  # the drawn token takes one entry
            "ignore_eos": True,  # the ids below end an answer
            "stop_token_ids": stop_ids,
            "stop": list(sampling.stop),
        }
        if sampling.logit_bias:
            params["logit_bias"] = sent_biases(sampling)
        if sampling.grammar is not None:
            params["structured_outputs"] = {"grammar": sampling.grammar}
        if sampling.routes_start:
            params["routed_experts_prompt_start"] = sampling.routes_start
        if sampling.seed is not None:
            params["seed"] = sampling.seed % 2**63
        body = {"token_ids": prompt, "sampling_params": params, "stream": True, "cache_salt": salt}
        if sampling.version is not None:
            body["model"] = adapter_name(sampling.version)
        try:
            async with aclosing(_events(client, body, images)) as events:
                async for read, event in events:
                    if event.get("choices"):
                        chunk = _parse_chunk(event["choices"][0], sampling, read)
                        reported = _parse_routes(event["choices"][0].get("routed_experts"))
                        chunk.routes = self.read_routes(reported, sampling, chunk.finish_reason)
                        yield chunk
        except EngineError as error:
            _check_logprobs_limit(error, sampling)
            raise

    async def score(self, client: HttpClient, prompt: list[int], top: int) -> ScoredTokens:
        """Score a prompt by its `prompt_logprobs`, which are those of the model's own distribution."""
        params = {"max_tokens": 1, "ignore_eos": True, "prompt_logprobs": top}
        body = {"token_ids": prompt, "sampling_params": params, "stream": False}
        reply = await client.post(GENERATE, body)
        entries = (reply["prompt_logprobs"] or [None])[1:]
        scores = [_parse_prompt_entry(entry) for entry in entries]
        return ScoredTokens(
            [entry[token] for entry, token in zip(scores, prompt[1:], strict=True)],
            [sorted(entry.items(), key=lambda item: -item[1])[:top] for entry in scores],
        )

    def _distribution(self, sampling: SamplingParams) -> dict[str, float]:
        """Return the parameters of the distribution to draw from.

        A server that reports sets takes no temperature of 0, so the likeliest token is asked for as the only one.
        """
        if self.recording.has_sets and sampling.temperature == 0:
            return {"temperature": 1.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0}
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }

    async def is_suspended(self, client: HttpClient) -> bool:
        try:
            return bool(json.loads(await client.get("/is_sleeping"))["is_sleeping"])
        except EndpointNotFoundError as error:
            raise EngineError(
                f"{error} Start it with VLLM_SERVER_DEV_MODE=1, which it needs to take weights."
            ) from error

    async def get_load(self, client: HttpClient) -> ServerLoad:
        metrics = {
            name: float(value) for name, value in METRIC_PATTERN.findall(await client.get("/metrics", timeout=5.0))
        }
        return ServerLoad(
            running=int(metrics.get("num_requests_running", 0)),
            waiting=int(metrics.get("num_requests_waiting", 0)),
            kv_cache_usage=metrics.get("kv_cache_usage_perc", 0.0),
            preemptions=int(metrics.get("num_preemptions_total", 0)),
        )


async def _events(
    client: HttpClient, body: dict[str, Any], images: ServedImages | None
) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """Send a request and yield its events. If the server lacks an image that it was sent, send it again with all."""
    omits = False
    for send_all in (False, True):
        if images is not None:
            describe = partial(describe_images, images, send_all=send_all)
            body["features"], omits = await images.support.pixels.run(describe)
        try:
            async with aclosing(client.stream_events(GENERATE, body)) as events:
                async for event in events:
                    if images is not None:
                        images.sent.add(map(images.key, images.prompt.contents))
                    omits = False
                    yield event
            return
        except ServerUnreachableError:
            raise
        except EngineError:  # a server that has dropped an image answers 500, before any token
            if images is None or not omits:
                raise
            images.sent.clear()


def _round_up_rank(rank: int) -> int:
    """Return the smallest reservable rank that holds an adapter of this rank."""
    capacity = next((capacity for capacity in ADAPTER_RANKS if capacity >= rank), None)
    if capacity is None:
        raise ConfigError(
            f"The adapter rank is {rank}, and vLLM takes {ADAPTER_RANKS[-1]} at most. Lower `lora.rank`, or leave "
            f"`rollout.adapters` out."
        )
    return capacity


def _check_logprobs_limit(error: EngineError, sampling: SamplingParams) -> None:
    """Raise the remedy if a server refused the number of log-probs."""
    limit = LOGPROBS_LIMIT.search(str(error))
    if limit is not None:
        asked = max(sampling.top_logprobs, sampling.alternatives)
        option = "correction.alternatives" if sampling.alternatives else "top_logprobs"
        raise ConfigError(
            f"This server returns {int(limit[1]) - 1} log-probs a token, and `{option}={asked}`. Start it with "
            f"`--max-logprobs {asked + 1}`."
        ) from error


def _parse_chunk(choice: dict[str, Any], sampling: SamplingParams, read: int) -> StreamChunk:
    ids: list[int] = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(ids):
        raise EngineError(f"vLLM sent {len(ids)} tokens with {len(content)} log-probs.")
    spans = choice.get("weight_versions")
    sets: list[list[int]] | None = choice.get("sampling_mask")
    if ids and sets is None and needs_report(sampling):
        raise ConfigError(
            "This run trains on answers that are cut off by `sampling.top_k`, and this vLLM server does not report "
            "the tokens that are left. Start it with `--return-sampling-mask`."
        )
    if ids and sets is not None and len(sets) != len(ids):
        raise EngineError(f"vLLM sent {len(ids)} tokens with {len(sets)} sets of tokens that could be drawn.")
    return StreamChunk(
        ids=ids,
        logp=[float(entry["logprob"]) for entry in content],
        top_logprobs=_parse_likeliest(content, sampling.top_logprobs),
        alternatives=_parse_likeliest(content, sampling.alternatives),
        sets=sets,
        finish_reason=choice.get("finish_reason"),
        version_spans=None if spans is None else [(entry["version"], entry["start"], entry["end"]) for entry in spans],
        read=read,
    )


def _parse_prompt_entry(entry: dict[str, dict[str, Any]]) -> dict[int, float]:
    """Return the log-probs at one place of a prompt: of its token, and of the likeliest ones."""
    read = {int(token): float(item["logprob"]) for token, item in entry.items()}
    return {token: logp if logp > NO_LOGP else -math.inf for token, logp in read.items()}


def _parse_routes(encoded: str | None) -> NDArray[Any] | None:
    """[N, layers, k]: return the experts of tokens, of which vLLM sends the bytes of an npy file."""
    if encoded is None:
        return None
    routes: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    return routes


def _parse_likeliest(content: list[dict[str, Any]], number: int) -> list[Likeliest]:
    """Return the likeliest tokens at each position. An entry lists the drawn token first, likely or not."""
    if not number:
        return []
    return [sorted(_parse_logprobs(entry).items(), key=lambda item: -item[1])[:number] for entry in content]


def _parse_logprobs(entry: dict[str, Any]) -> dict[int, float]:
    """Return the log-probs of an entry. Where vLLM means minus infinity, which JSON lacks, it writes a low number."""
    read = {int(item["token_id"]): float(item["logprob"]) for item in entry["top_logprobs"]}
    return {token: logp if logp > NO_LOGP else -math.inf for token, logp in read.items()}
