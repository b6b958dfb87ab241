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
from etude.rollout.connection import AbsentError, Connection
from etude.rollout.dialect import Dialect, Launch, Piece, refuse_bias
from etude.rollout.figures import Figures

__all__ = ["Vllm"]

FIGURE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|num_preemptions_total)\{.*\} (\S+)$", re.M
)
TOP = 19
"""Most of the likeliest tokens that it tells unless it is started otherwise."""
ADAPTER = "policy"
"""What the adapter is called there that requests are answered through."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The inner widths of adapters that it makes room for."""


class Vllm(Dialect):
    """vLLM's OpenAI-compatible server."""

    name: ClassVar[str] = "vllm"
    package: ClassVar[str] = "vLLM"
    supported: ClassVar[tuple[int, ...]] = (0, 32)

    def __init__(self, *, adapters: bool = False) -> None:
        self.adapters = adapters

    def command(self, launch: Launch, node: int = 0) -> list[str]:
        """`vllm.entrypoints.openai.api_server`, with the log-probs of the distribution that it draws from."""
        words = [str(launch.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.model)]
        words += ["--host", "127.0.0.1", "--port", str(launch.port), "--dtype", launch.dtype]
        words += ["--max-num-seqs", str(launch.max_running), "--generation-config", "vllm", "--enable-scale-out"]
        words += [
            "--logprobs-mode",
            "processed_logprobs",
            "--max-logprobs",
            str(TOP + 1),
            "--disable-uvicorn-access-log",
        ]
        if launch.tensor_parallel > 1:
            words += ["--tensor-parallel-size", str(launch.tensor_parallel)]
        if launch.nodes > 1:
            host, _, port = launch.meet.rpartition(":")
            words += ["--nnodes", str(launch.nodes), "--node-rank", str(node), "--master-addr", host]
            words += ["--master-port", port, *(["--headless"] if node else [])]
        if launch.memory is not None:
            words += ["--gpu-memory-utilization", f"{launch.memory:g}"]
        if launch.kv_gib is not None:
            words += ["--kv-cache-memory-bytes", str(int(launch.kv_gib * 2**30))]
        if launch.sleeps:
            words.append("--enable-sleep-mode")
        if launch.device == "cpu":
            words.append("--enforce-eager")
        if launch.plugged is not None:
            words += ["--weight-transfer-config", '{"backend": "etude"}']
        if launch.adapter_rank:
            words += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(_room(launch.adapter_rank))]
        return [*words, *launch.arguments]

    def environment(self, launch: Launch) -> dict[str, str]:
        """Nothing is reported either, and the endpoints for training are open: what it takes a key for lies below
        /v1, /v2 and /inference."""
        found = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        alone = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if launch.device == "cpu" else {}
        plugged = {} if launch.plugged is None else {"PYTHONPATH": str(launch.plugged)}
        adapted = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if launch.adapter_rank else {}
        keyed = {"VLLM_API_KEY": launch.key} if launch.key else {}
        return super().environment(launch) | found | alone | plugged | adapted | keyed

    async def version(self, to: Connection) -> str:
        """As /version tells."""
        return str(json.loads(await to.get("/version"))["version"])

    def refuse(self, sampling: SamplingParams) -> None:
        """All means the same there, within bounds."""
        refuse_bias(sampling, "vLLM")
        if sampling.repetition_penalty != 1 and sampling.logit_bias:
            raise ConfigError(
                "`repetition_penalty` and `logit_bias` were asked for together, and vLLM adds the bias before it "
                "penalises, others after. Leave one of them out."
            )
        cut = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0)
        if sampling.top_logprobs > TOP or (sampling.top_logprobs and cut):
            raise ConfigError(
                f"{sampling.top_logprobs} `top_logprobs` were asked for, and vLLM tells up to {TOP}, of what `top_p`, "
                f"`top_k` and `min_p` have not cut off. Ask for fewer, without those."
            )

    async def ask(
        self, to: Connection, prompt: list[int], sampling: SamplingParams, ends: list[int]
    ) -> AsyncGenerator[Piece, None]:
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
            "stop_token_ids": ends,
            "stop": list(sampling.stop),
        }
        if sampling.logit_bias:
            params["logit_bias"] = {str(id): bias for id, bias in sampling.logit_bias.items()}
        if sampling.seed is not None:
            params["seed"] = sampling.seed % 2**63
        body = {"token_ids": prompt, "sampling_params": params, "stream": True}
        if self.adapters:
            body["model"] = ADAPTER
        async with aclosing(to.events("/inference/v1/generate", body)) as events:
            async for told in events:
                if told.get("choices"):
                    yield _piece(told["choices"][0], sampling.top_logprobs)

    async def pause(self, to: Connection) -> None:
        """What is under way is frozen."""
        await to.post("/pause?mode=keep&clear_cache=false")

    async def resume(self, to: Connection) -> None:
        """Go on."""
        await to.post("/resume")

    async def abort(self, to: Connection) -> None:
        """Every request ends with what it has."""
        await to.post("/abort_requests")

    async def sleep(self, to: Connection) -> None:
        """Weights go to the processor's memory, keys and values nowhere."""
        await to.post("/sleep?level=1")

    async def wake(self, to: Connection) -> None:
        """Everything is taken again."""
        await to.post("/wake_up")

    async def forget(self, to: Connection) -> None:
        """What runs is computed once more."""
        told = await to.post("/reset_prefix_cache?reset_running_requests=true")
        if not (told or {}).get("success"):
            raise EngineError(f"The vLLM server at {to.url} did not let go of its prefix cache: {told}")

    async def label(self, to: Connection, version: int) -> None:
        """A label is text there."""
        await to.post("/update_weight_version", {"new_version": str(version)})

    async def labelled(self, to: Connection) -> str:
        """As /weight_info tells."""
        return str(json.loads(await to.get("/weight_info"))["weight_version"])

    async def load(self, to: Connection, directory: Path, version: int) -> None:
        """What is under way waits meanwhile, and goes on with the new weights."""
        await self.pause(to)
        place = str(directory.resolve())
        if self.adapters:
            adapter = {"lora_name": ADAPTER, "lora_path": place, "load_inplace": True}
            await to.post("/v1/load_lora_adapter", adapter)
        else:
            asked = {"method": "reload_weights", "kwargs": {"weights_path": place}}
            await to.post("/collective_rpc", asked)
        await self.forget(to)
        await self.label(to, version)
        await self.resume(to)

    async def rests(self, to: Connection) -> bool:
        """As /is_sleeping tells."""
        try:
            return bool(json.loads(await to.get("/is_sleeping"))["is_sleeping"])
        except AbsentError as error:
            raise EngineError(
                f"{error} Start it with VLLM_SERVER_DEV_MODE=1, without which it takes no weights."
            ) from error

    async def figures(self, to: Connection) -> Figures:
        """As its metrics tell."""
        found = {name: float(value) for name, value in FIGURE.findall(await to.get("/metrics", within=5.0))}
        return Figures(
            running=int(found.get("num_requests_running", 0)),
            waiting=int(found.get("num_requests_waiting", 0)),
            cache=found.get("kv_cache_usage_perc", 0.0),
            preempted=int(found.get("num_preemptions_total", 0)),
        )


def _room(rank: int) -> int:
    """The least room in which an adapter of this inner width fits."""
    found = next((room for room in RANKS if room >= rank), None)
    if found is None:
        raise ConfigError(
            f"An adapter's inner width is {rank}, and vLLM takes {RANKS[-1]} at most. Lower `lora.rank`, or leave "
            f"`rollout.adapters` out."
        )
    return found


def _piece(choice: dict[str, Any], top: int) -> Piece:
    ids: list[int] = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(ids):
        raise EngineError(f"vLLM told {len(ids)} tokens with {len(content)} log-probs.")
    spans = choice.get("weight_versions")
    return Piece(
        ids=ids,
        logp=[float(each["logprob"]) for each in content],
        top=[_likeliest(each, top) for each in content] if top else [],
        finish=choice.get("finish_reason"),
        spans=None if spans is None else [(each["version"], each["start"], each["end"]) for each in spans],
    )


def _likeliest(told: dict[str, Any], top: int) -> list[tuple[int, float]]:
    """The likeliest at one place. The token that was drawn comes first there, likely or not."""
    found = {int(each["token_id"]): float(each["logprob"]) for each in told["top_logprobs"]}
    return sorted(found.items(), key=lambda each: -each[1])[:top]
