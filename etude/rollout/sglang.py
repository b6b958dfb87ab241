"""Communication with SGLang: launch arguments, requests and replies of `/generate`, health, load."""

from __future__ import annotations

import base64
import json
import math
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError, EngineError
from etude.records import SamplingParams
from etude.rollout import sglang_images
from etude.rollout.held_adapters import adapter_name
from etude.rollout.reported_sets import Likeliest, active_filters
from etude.rollout.server_backend import (
    RETURN_ROUTES,
    LaunchSpec,
    ScoredTokens,
    StreamChunk,
    VersionSpan,
    sent_biases,
)
from etude.rollout.server_client import HttpClient
from etude.rollout.server_load import ServerLoad
from etude.rollout.sglang_images import check_count, describe_images, image_args
from etude.rollout.sglang_weights import SglangWeights, adapter_args

if TYPE_CHECKING:
    from etude.chat import Tokenizer
    from etude.images import ImageLayout
    from etude.rollout.served_images import ServedImages

NO_OVERLAP = "--disable-overlap-schedule"
"""The argument by which a pause in place leaves no step under way, which would meet a change of weights half-way."""
DEFAULT_SET_SIZE = 4096
"""The most tokens of a set that it reports, unless it is started with another limit."""
RESERVED_TOKENS = 6
"""Tokens of its context that no prompt may use."""


class SglangBackend(SglangWeights):
    """SGLang's server."""

    name: ClassVar[str] = "sglang"
    package: ClassVar[str] = "SGLang"
    tested_version: ClassVar[tuple[int, ...]] = (0, 5, 23)
    sets_since: ClassVar[tuple[int, ...]] = (0, 5, 23)
    grammar_args: ClassVar[tuple[str, ...]] = ("--grammar-backend", "llguidance")
    paths: ClassVar[frozenset[str]] = SglangWeights.paths | {"/generate"}
    health_path: ClassVar[str] = "/model_info"  # its /health draws a token, which a paused server does not

    def command(self, launch: LaunchSpec, node: int = 0) -> list[str]:
        config = launch.config
        args = [str(launch.python), "-m", "sglang.launch_server", "--model-path", str(launch.model)]
        args += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
        args += ["--sampling-defaults", "openai"]
        args += [] if config.max_num_seqs is None else ["--max-running-requests", str(config.max_num_seqs)]
        args += ["--incremental-streaming-output", "--skip-server-warmup", "--weight-version", "0", "--sleep-on-idle"]
        if config.tensor_parallel > 1:
            args += ["--tp-size", str(config.tensor_parallel)]
        if config.nodes > 1:
            args += ["--nnodes", str(config.nodes), "--node-rank", str(node), "--dist-init-addr", config.rendezvous]
        if config.gpu_memory_utilization is not None:
            args += ["--mem-fraction-static", f"{config.gpu_memory_utilization:g}"]
        if launch.kv_tokens is not None:
            args += ["--max-total-tokens", str(launch.kv_tokens)]
        if launch.enable_sleep and launch.device == "cuda":
            args.append("--enable-memory-saver")
        args += self.grammar_args if self.grammar_end_ids else ()
        if self.kv == "keep":
            args.append(NO_OVERLAP)
        args += [RETURN_ROUTES] if self.recording.routes is not None else []
        if self.recording.top_k * 2 > DEFAULT_SET_SIZE:  # tokens as likely as the last one are kept too
            args += ["--sampling-mask-max-tokens", str(self.recording.top_k * 2)]
        if launch.adapters is not None:
            args += ["--max-lora-rank", str(launch.adapters.rank), *adapter_args(launch.adapters.held)]
            args += ["--lora-target-modules", *launch.adapters.modules]
            args += ["--lora-backend", "torch_native"] if launch.device == "cpu" else []
        args += [] if self.images is None else image_args(self.images, config.server_args)
        if launch.key_file is not None and not node:
            args += ["--config", str(launch.key_file)]
        if launch.device == "cpu":
            args += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            args.append("--disable-cuda-graph")
        return [*args, *config.server_args]

    def environment_variables(self, launch: LaunchSpec) -> dict[str, str]:
        """Add the variable that selects the CPU engine, which SGLang does not select by itself."""
        return super().environment_variables(launch) | (
            {"SGLANG_USE_CPU_ENGINE": "1"} if launch.device == "cpu" else {}
        )

    def key_file_text(self, launch: LaunchSpec) -> str:
        """Return a file of options, with the key as its only one."""
        return f'api-key: "{launch.key}"\n' if launch.key else ""

    def context_length(self, models: Mapping[str, Any]) -> int:
        """Return its context length, less the tokens that no prompt may use."""
        return super().context_length(models) - RESERVED_TOKENS

    def check_sleep(self, python: Path) -> None:
        """Refuse a Python without the package by which SGLang gives memory up; the server would end at its start."""
        found = subprocess.run(
            [python, "-c", "import torch_memory_saver"], capture_output=True, check=False, timeout=60
        )
        if found.returncode:
            raise ConfigError(
                f"`train.offload` has SGLang give its memory up, which it does by the package torch_memory_saver, and "
                f"{python} cannot import it. Install it there (`pip install torch_memory_saver`), or leave "
                f"`train.offload` out."
            )

    async def get_server_version(self, client: HttpClient) -> str:
        return str(json.loads(await client.get("/server_info"))["version"])

    async def check_version(self, client: HttpClient) -> str:
        """Do as the base class, and refuse a server that could change its weights during a step."""
        version = await super().check_version(client)
        info = json.loads(await client.get("/server_info"))
        limit = info.get("sampling_mask_max_tokens", DEFAULT_SET_SIZE)
        if self.recording.top_k > limit:
            raise ConfigError(
                f"SGLang reports at most {limit} tokens a set, and `sampling.top_k={self.recording.top_k}`. Lower it, "
                f"or start the server with `--sampling-mask-max-tokens {self.recording.top_k}`."
            )
        if self.kv == "keep" and not info["disable_overlap_schedule"]:
            raise ConfigError(
                f"`rollout.kv=keep` pauses requests in place, and the SGLang server at {client.url} may still compute "
                f"a step then. Start it with `{NO_OVERLAP}`, or set `rollout.kv=recompute`."
            )
        return version

    def find_grammar_end_ids(self, tokenizer: Tokenizer, model: Path) -> tuple[int, ...]:  # noqa: ARG002
        """Return the end tokens of the model's own files. With none of them a server with grammars does not start."""
        named: set[int] = set()
        for file in ("config.json", "generation_config.json"):
            if (model / file).is_file():
                ids = json.loads((model / file).read_text(encoding="utf-8")).get("eos_token_id")
                named |= {ids} if isinstance(ids, int) else set(ids or ())
        return tuple(sorted(named))

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse a repetition penalty, which has another meaning there, and filters that it cannot report.

        With filters its usual log-probs are those before them. Beside sets it reports those after them.
        """
        super().check_sampling(sampling)
        if sampling.repetition_penalty != 1:
            raise ConfigError(
                "`repetition_penalty` is set, and SGLang penalizes the tokens of the answer alone, while other "
                "engines penalize those of the prompt too. Leave it out, or choose `rollout=vllm`."
            )
        filters = active_filters(sampling)
        if filters and sampling.top_k == 0:
            raise ConfigError(
                f"`{next(iter(filters))}` is set, and SGLang reports the distribution that it leaves only with `top_k` "
                "above 0. Set `top_k`, 512 for example."
            )
        if filters and sampling.top_logprobs:
            raise ConfigError(
                f"{sampling.top_logprobs} `top_logprobs` are set, and SGLang does not report them beside `top_p`, "
                "`top_k` and `min_p`. Leave one of them out."
            )

    def image_refusal(self, layout: ImageLayout) -> str:
        return sglang_images.image_refusal(layout)

    async def check_images(self, client: HttpClient) -> None:
        await sglang_images.check_server(client)

    async def stream(
        self,
        client: HttpClient,
        prompt: list[int],
        sampling: SamplingParams,
        stop_ids: list[int],
        salt: str,
        images: ServedImages | None = None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Sample by /generate. SGLang does not promise that a seed repeats an answer, so none is sent."""
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "min_new_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": stop_ids,
            "stop": list(sampling.stop),
            "no_stop_trim": True,
        }
        if sampling.logit_bias:
            params["logit_bias"] = sent_biases(sampling)
        if sampling.grammar is not None:
            params["ebnf"] = sampling.grammar
        body = {
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": max(sampling.top_logprobs, sampling.alternatives),
            "stream": True,
            "extra_key": salt,
        }
        if active_filters(sampling):
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
        if sampling.routes_start is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": sampling.routes_start}
        if sampling.version is not None:
            body["lora_path"] = adapter_name(sampling.version)
        if images is not None:
            body |= await images.support.pixels.run(partial(describe_images, prompt, images))
        async with aclosing(client.stream_events("/generate", body)) as events:
            async for read, event in events:
                if images is not None:
                    check_count(event["meta_info"], len(prompt))
                chunk = _parse_chunk(event, sampling, read)
                reported = _parse_routes(event["meta_info"].get("routed_experts"))
                chunk.routes = self.read_routes(reported, sampling, chunk.finish_reason)
                yield chunk

    async def score(self, client: HttpClient, prompt: list[int], top: int) -> ScoredTokens:
        """Score a prompt by the log-probs of its input tokens."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }
        meta = (await client.post("/generate", body))["meta_info"]
        likeliest = [entry or [] for entry in meta.get("input_top_logprobs") or []]
        return ScoredTokens(
            [_parse_logp(entry) for entry in meta["input_token_logprobs"][1:]], _parse_likeliest(likeliest[1:], top)
        )

    async def is_suspended(self, client: HttpClient) -> bool:
        """Probe the scheduler by /server_info, and return False: SGLang does not report this state."""
        await client.get("/server_info")
        return False

    async def get_load(self, client: HttpClient) -> ServerLoad:
        """Return the load that /v1/loads reports. A server counts retracted requests if it has `--enable-metrics`."""
        loads = json.loads(await client.get("/v1/loads?include=core,queues", timeout=5.0))["loads"]
        return ServerLoad(
            running=sum(int(load.get("num_running_reqs", 0)) for load in loads),
            waiting=sum(int(load.get("num_waiting_reqs", 0)) for load in loads),
            kv_cache_usage=max((float(load.get("token_usage", 0.0)) for load in loads), default=0.0),
            preemptions=0,
            retracted=sum(int((load.get("queues") or {}).get("retracted", 0)) for load in loads),
        )


def _parse_chunk(event: dict[str, Any], sampling: SamplingParams, read: int) -> StreamChunk:
    ids, meta = event.get("output_ids") or [], event["meta_info"]
    scores = meta.get("output_token_logprobs") or []
    if len(scores) != len(ids):
        raise EngineError(f"SGLang sent {len(ids)} tokens with {len(scores)} log-probs.")
    if ids and active_filters(sampling):
        return _parse_cut_chunk(ids, meta, sampling, read)
    likeliest = meta.get("output_top_logprobs") or []
    return StreamChunk(
        ids=ids,
        logp=[_parse_logp(entry) for entry in scores],
        top_logprobs=_parse_likeliest(likeliest, sampling.top_logprobs),
        alternatives=_parse_likeliest(likeliest, sampling.alternatives),
        finish_reason=_parse_finish(meta),
        version_spans=_parse_spans(meta),
        read=read,
    )


def _parse_logp(entry: Sequence[Any]) -> float:
    """Return the log-prob of a token, whose id follows it. JSON has null in place of NaN."""
    if entry[0] is None:
        raise EngineError(
            f"SGLang computed no number for the log-prob of token {entry[1]}. It computes this model wrongly here: "
            "choose another dtype or device for it, or `rollout=vllm`."
        )
    return float(entry[0])


def _parse_cut_chunk(ids: list[int], meta: dict[str, Any], sampling: SamplingParams, read: int) -> StreamChunk:
    """Return a chunk of tokens of which each has its set, with the log-prob of every token in it, likeliest first."""
    sets, scores = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if not sets or not scores or len(sets) < len(ids) or len(sets) != len(scores):
        raise ConfigError(
            f"These sampling parameters cut tokens off, and this SGLang server sent {len(ids)} tokens with "
            f"{len(sets or ())} sets of those that are left. Use SGLang from 0.5.23, or leave the filters out."
        )
    sets = sets[-len(ids) :]  # a server that sends whole lists repeats the earlier ones
    scores = scores[-len(ids) :]
    logp = [dict(zip(allowed, each, strict=True)) for allowed, each in zip(sets, scores, strict=True)]
    width = sampling.alternatives
    return StreamChunk(
        ids=ids,
        logp=[score.get(token, -math.inf) for token, score in zip(ids, logp, strict=True)],
        alternatives=[list(score.items())[:width] for score in logp] if width else [],
        sets=sets,
        finish_reason=_parse_finish(meta),
        version_spans=_parse_spans(meta),
        read=read,
    )


def _parse_routes(encoded: str | None) -> NDArray[np.int32] | None:
    """[N · layers · k]: return the experts of tokens, which SGLang sends as the bytes of int32 numbers."""
    return None if encoded is None else np.frombuffer(base64.b64decode(encoded), np.dtype("<i4"))


def _parse_finish(meta: dict[str, Any]) -> str | None:
    finish = meta.get("finish_reason")
    return None if finish is None else str(finish["type"])


def _parse_spans(meta: dict[str, Any]) -> list[VersionSpan] | None:
    """Return the versions that drew the answer, which its last chunk reports."""
    spans = meta.get("weight_versions")
    if not spans or meta.get("finish_reason") is None:
        return None
    return [_parse_span(entry) for entry in spans]


def _parse_likeliest(entries: list[Any], number: int) -> list[Likeliest]:
    """Return the likeliest tokens at each position, the likeliest first."""
    return [[(int(id), float(logp)) for logp, id, *_ in entry[:number]] for entry in entries] if number else []


def _parse_span(span: Any) -> VersionSpan:
    return (span["version"], span["start"], span["end"]) if isinstance(span, dict) else tuple(span)
