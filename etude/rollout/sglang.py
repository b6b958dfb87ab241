"""Communication with SGLang: launch arguments, requests and replies of `/generate`, health, load."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

from etude.errors import ConfigError, EngineError
from etude.records import SamplingParams
from etude.rollout.held_adapters import adapter_name
from etude.rollout.reported_sets import Likeliest
from etude.rollout.server_backend import LaunchSpec, StreamChunk, sent_biases
from etude.rollout.server_client import HttpClient
from etude.rollout.server_load import ServerLoad
from etude.rollout.sglang_weights import SglangWeights, adapter_args

NO_OVERLAP = "--disable-overlap-schedule"
"""The argument by which a pause in place leaves no step under way, which would meet a change of weights half-way."""
RESERVED_TOKENS = 6
"""Tokens of its context that no prompt may use."""


class SglangBackend(SglangWeights):
    """SGLang's server."""

    name: ClassVar[str] = "sglang"
    package: ClassVar[str] = "SGLang"
    tested_version: ClassVar[tuple[int, ...]] = (0, 5, 23)
    sets_since: ClassVar[tuple[int, ...]] = (0, 5, 23)
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
        if self.kv == "keep":
            args.append(NO_OVERLAP)
        if launch.adapters is not None:
            args += ["--max-lora-rank", str(launch.adapters.rank), *adapter_args(launch.adapters.held)]
            args += ["--lora-target-modules", *launch.adapters.modules]
            args += ["--lora-backend", "torch_native"] if launch.device == "cpu" else []
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
        if self.kv == "keep" and not json.loads(await client.get("/server_info"))["disable_overlap_schedule"]:
            raise ConfigError(
                f"`rollout.kv=keep` pauses requests in place, and the SGLang server at {client.url} may still compute "
                f"a step then. Start it with `{NO_OVERLAP}`, or set `rollout.kv=recompute`."
            )
        return version

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse filters and a repetition penalty.

        Its log-probs are those before the filters, and its penalty has another meaning.
        """
        super().check_sampling(sampling)
        if sampling.repetition_penalty != 1:
            raise ConfigError(
                "`repetition_penalty` is set, and SGLang penalizes the tokens of the answer alone, while other "
                "engines penalize those of the prompt too. Leave it out, or choose `rollout=vllm`."
            )
        filters = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
        for name in (name for name, on in filters.items() if on and sampling.temperature > 0):
            raise ConfigError(
                f"`{name}` is set, and SGLang reports log-probs without it. The sampling distribution would be "
                f"unknown. Leave it out, or choose `rollout=vllm`."
            )

    async def stream(
        self, client: HttpClient, prompt: list[int], sampling: SamplingParams, stop_ids: list[int], salt: str
    ) -> AsyncGenerator[StreamChunk, None]:
        """Sample by /generate. SGLang does not promise that a seed repeats an answer, so none is sent."""
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "min_new_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": stop_ids,
            "stop": list(sampling.stop),
            "no_stop_trim": True,
        }
        if sampling.logit_bias:
            params["logit_bias"] = sent_biases(sampling)
        body = {
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": max(sampling.top_logprobs, sampling.alternatives),
            "stream": True,
            "extra_key": salt,
        }
        if sampling.version is not None:
            body["lora_path"] = adapter_name(sampling.version)
        async with aclosing(client.stream_events("/generate", body)) as events:
            async for read, event in events:
                yield _parse_chunk(event, sampling, read)

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
    finish, spans = meta.get("finish_reason"), meta.get("weight_versions")
    likeliest = meta.get("output_top_logprobs") or []
    return StreamChunk(
        ids=ids,
        logp=[float(entry[0]) for entry in scores],
        top_logprobs=_parse_likeliest(likeliest, sampling.top_logprobs),
        alternatives=_parse_likeliest(likeliest, sampling.alternatives),
        finish_reason=None if finish is None else finish["type"],
        version_spans=None if not spans or finish is None else [_parse_span(entry) for entry in spans],
        read=read,
    )


def _parse_likeliest(entries: list[Any], number: int) -> list[Likeliest]:
    """Return the likeliest tokens at each position, the likeliest first."""
    return [[(int(id), float(logp)) for logp, id, *_ in entry[:number]] for entry in entries] if number else []


def _parse_span(span: Any) -> tuple[str, int, int]:
    return (span["version"], span["start"], span["end"]) if isinstance(span, dict) else tuple(span)
