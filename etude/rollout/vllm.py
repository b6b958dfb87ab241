"""vLLM's dialect: its token-in, token-out endpoint, and what its server offers to those who train with it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

from etude.errors import ConfigError, EngineError
from etude.records import SamplingParams
from etude.rollout.http_client import EndpointNotFoundError, HttpClient
from etude.rollout.server_backend import LaunchSpec, ServerBackend, StreamChunk, check_logit_bias
from etude.rollout.server_load import ServerLoad

__all__ = ["VllmBackend"]

METRIC_PATTERN = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)\{.*\} (\S+)$", re.M
)
MAX_TOP_LOGPROBS = 19
"""Most of the likeliest tokens that it tells unless it is started otherwise."""
ADAPTER_NAME = "policy"
"""What the adapter is called there that requests are answered through."""
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The inner widths of adapters that it makes room for."""


class VllmBackend(ServerBackend):
    """vLLM's OpenAI-compatible server."""

    name: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vLLM"
    supported_version: ClassVar[tuple[int, ...]] = (0, 32)

    def __init__(self, *, adapters: bool = False) -> None:
        self.uses_adapters = adapters

    def command(self, launch: LaunchSpec, node: int = 0) -> list[str]:
        """`vllm.entrypoints.openai.api_server`, with the log-probs of the distribution that it draws from."""
        args = [str(launch.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.model)]
        args += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
        args += ["--max-num-seqs", str(launch.max_num_seqs), "--generation-config", "vllm", "--enable-scale-out"]
        args += [
            "--logprobs-mode",
            "processed_logprobs",
            "--max-logprobs",
            str(MAX_TOP_LOGPROBS + 1),
            "--disable-uvicorn-access-log",
        ]
        if launch.tensor_parallel > 1:
            args += ["--tensor-parallel-size", str(launch.tensor_parallel)]
        if launch.nodes > 1:
            host, _, port = launch.rendezvous.rpartition(":")
            args += ["--nnodes", str(launch.nodes), "--node-rank", str(node), "--master-addr", host]
            args += ["--master-port", port, *(["--headless"] if node else [])]
        if launch.gpu_memory_utilization is not None:
            args += ["--gpu-memory-utilization", f"{launch.gpu_memory_utilization:g}"]
        if launch.kv_gib is not None:
            args += ["--kv-cache-memory-bytes", str(int(launch.kv_gib * 2**30))]
        if launch.enable_sleep:
            args.append("--enable-sleep-mode")
        if launch.device == "cpu":
            args.append("--enforce-eager")
        if launch.plugin_path is not None:
            args += ["--weight-transfer-config", '{"backend": "etude"}']
        if launch.adapter_rank:
            args += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(_round_up_rank(launch.adapter_rank))]
        return [*args, *launch.server_args]

    def environment_variables(self, launch: LaunchSpec) -> dict[str, str]:
        """Nothing is reported either, and the endpoints for training are open: what it takes a key for lies below
        /v1, /v2 and /inference."""
        server = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if launch.device == "cpu" else {}
        plugin = {} if launch.plugin_path is None else {"PYTHONPATH": str(launch.plugin_path)}
        adapter = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if launch.adapter_rank else {}
        key = {"VLLM_API_KEY": launch.key} if launch.key else {}
        return super().environment_variables(launch) | server | cpu | plugin | adapter | key

    async def get_server_version(self, client: HttpClient) -> str:
        """As /version tells."""
        return str(json.loads(await client.get("/version"))["version"])

    def check_sampling(self, sampling: SamplingParams) -> None:
        """All means the same there, within bounds."""
        check_logit_bias(sampling, "vLLM")
        if sampling.repetition_penalty != 1 and sampling.logit_bias:
            raise ConfigError(
                "`repetition_penalty` and `logit_bias` were asked for together, and vLLM adds the bias before it "
                "penalises, others after. Leave one of them out."
            )
        is_filtered = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
        if sampling.top_logprobs > MAX_TOP_LOGPROBS or (sampling.top_logprobs and is_filtered):
            raise ConfigError(
                f"{sampling.top_logprobs} `top_logprobs` were asked for, and vLLM tells up to {MAX_TOP_LOGPROBS}, of "
                f"what `top_p`, `top_k` and `min_p` have not cut off. Ask for fewer, without those."
            )

    async def stream(
        self, client: HttpClient, prompt: list[int], sampling: SamplingParams, stop_ids: list[int]
    ) -> AsyncGenerator[StreamChunk, None]:
        """By /inference/v1/generate."""
        params: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": sampling.top_logprobs and sampling.top_logprobs + 1,  # the token that was drawn takes a place
            "ignore_eos": True,  # what ends an answer is said here, by its ids
            "stop_token_ids": stop_ids,
            "stop": list(sampling.stop),
        }
        if sampling.logit_bias:
            params["logit_bias"] = {str(id): bias for id, bias in sampling.logit_bias.items()}
        if sampling.seed is not None:
            params["seed"] = sampling.seed % 2**63
        body = {"token_ids": prompt, "sampling_params": params, "stream": True}
        if self.uses_adapters:
            body["model"] = ADAPTER_NAME
        async with aclosing(client.stream_events("/inference/v1/generate", body)) as events:
            async for event in events:
                if event.get("choices"):
                    yield _parse_chunk(event["choices"][0], sampling.top_logprobs)

    async def pause(self, client: HttpClient) -> None:
        """What is under way is frozen."""
        await client.post("/pause?mode=keep&clear_cache=false")

    async def resume(self, client: HttpClient) -> None:
        """Go on."""
        await client.post("/resume")

    async def abort(self, client: HttpClient) -> None:
        """Every request ends with what it has."""
        await client.post("/abort_requests")

    async def sleep(self, client: HttpClient) -> None:
        """Weights go to the processor's memory, keys and values nowhere."""
        await client.post("/sleep?level=1")

    async def wake(self, client: HttpClient) -> None:
        """Everything is taken again."""
        await client.post("/wake_up")

    async def reset_prefix_cache(self, client: HttpClient) -> None:
        """What runs is computed once more."""
        reply = await client.post("/reset_prefix_cache?reset_running_requests=true")
        if not (reply or {}).get("success"):
            raise EngineError(f"The vLLM server at {client.url} did not let go of its prefix cache: {reply}")

    async def set_version_label(self, client: HttpClient, version: int) -> None:
        """A label is text there."""
        await client.post("/update_weight_version", {"new_version": str(version)})

    async def get_version_label(self, client: HttpClient) -> str:
        """As /weight_info tells."""
        return str(json.loads(await client.get("/weight_info"))["weight_version"])

    async def load(self, client: HttpClient, directory: Path, version: int) -> None:
        """What is under way waits meanwhile, and goes on with the new weights."""
        await self.pause(client)
        path = str(directory.resolve())
        if self.uses_adapters:
            adapter = {"lora_name": ADAPTER_NAME, "lora_path": path, "load_inplace": True}
            await client.post("/v1/load_lora_adapter", adapter)
        else:
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            await client.post("/collective_rpc", body)
        await self.reset_prefix_cache(client)
        await self.set_version_label(client, version)
        await self.resume(client)

    async def is_suspended(self, client: HttpClient) -> bool:
        """As /is_sleeping tells."""
        try:
            return bool(json.loads(await client.get("/is_sleeping"))["is_sleeping"])
        except EndpointNotFoundError as error:
            raise EngineError(
                f"{error} Start it with VLLM_SERVER_DEV_MODE=1, without which it takes no weights."
            ) from error

    async def get_load(self, client: HttpClient) -> ServerLoad:
        """As its metrics tell."""
        metrics = {
            name: float(value) for name, value in METRIC_PATTERN.findall(await client.get("/metrics", timeout=5.0))
        }
        return ServerLoad(
            running=int(metrics.get("num_requests_running", 0)),
            waiting=int(metrics.get("num_requests_waiting", 0)),
            kv_cache_usage=metrics.get("kv_cache_usage_perc", 0.0),
            preemptions=int(metrics.get("num_preemptions_total", 0)),
        )


def _round_up_rank(rank: int) -> int:
    """The least room in which an adapter of this inner width fits."""
    capacity = next((capacity for capacity in ADAPTER_RANKS if capacity >= rank), None)
    if capacity is None:
        raise ConfigError(
            f"An adapter's inner width is {rank}, and vLLM takes {ADAPTER_RANKS[-1]} at most. Lower `lora.rank`, or "
            f"leave `rollout.adapters` out."
        )
    return capacity


def _parse_chunk(choice: dict[str, Any], top: int) -> StreamChunk:
    ids: list[int] = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(ids):
        raise EngineError(f"vLLM told {len(ids)} tokens with {len(content)} log-probs.")
    spans = choice.get("weight_versions")
    return StreamChunk(
        ids=ids,
        logp=[float(entry["logprob"]) for entry in content],
        top_logprobs=[_parse_top_logprobs(entry, top) for entry in content] if top else [],
        finish_reason=choice.get("finish_reason"),
        version_spans=None if spans is None else [(entry["version"], entry["start"], entry["end"]) for entry in spans],
    )


def _parse_top_logprobs(entry: dict[str, Any], top: int) -> list[tuple[int, float]]:
    """The likeliest at one place. The token that was drawn comes first there, likely or not."""
    likeliest = {int(item["token_id"]): float(item["logprob"]) for item in entry["top_logprobs"]}
    return sorted(likeliest.items(), key=lambda item: -item[1])[:top]
