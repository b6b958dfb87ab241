"""Real servers on this machine, used over their public endpoints: the engine interface that weight transports need."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest

from etude.errors import EngineError
from etude.rollout.sglang import SglangBackend
from etude.rollout.vllm import VllmBackend
from etude.rollout.vllm_weights import install_plugin
from tests.components import require_environment

Dialect = Literal["vllm", "sglang"]
ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"
PATIENCE = 240.0
"""Seconds that a server may take to start on a busy machine."""


class Served:
    """A server process of this test, with the engine interface that weight transports need."""

    def __init__(self, dialect: Dialect, url: str, process: subprocess.Popen[bytes] | None, log: Path) -> None:
        self.backend = {"vllm": VllmBackend, "sglang": SglangBackend}[dialect]()
        self.url = url
        self.ranks = 1
        self.under_way = 0
        self.version = 0
        self.withdrawn = False
        self.process = process
        self.log = log
        self.breaks: tuple[str, int] | None = None
        """The way to endpoints that begin so is cut, after so many calls."""

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Post a request to an endpoint of the server."""
        url = self.url
        if self.breaks is not None and path.startswith(self.breaks[0]):
            url = self.url if self.breaks[1] else NOWHERE
            self.breaks = self.breaks[0], max(0, self.breaks[1] - 1)
        try:
            async with httpx2.AsyncClient(timeout=120) as client:
                answer = await client.post(url + path, json=dict(body or {}))
        except httpx2.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {error!r}") from error
        if answer.status_code >= 400:
            raise EngineError(f"{self.url}{path} answered {answer.status_code}: {answer.text[:500]}")
        with suppress(ValueError):
            return answer.json()
        return answer.text

    async def abort(self) -> None:
        if self.is_vllm:
            await self.post("/abort_requests", {})
        else:
            await self.post("/abort_request", {"rid": "", "abort_all": True})

    async def drain(self) -> None:
        while self.under_way:
            await asyncio.sleep(0.01)

    async def interrupt(self) -> None:
        while self.under_way:
            await self.abort()
            await asyncio.sleep(0.01)

    async def pause_for_update(self) -> None:
        if self.is_vllm:
            await self.post("/pause?mode=keep&clear_cache=false")
        else:
            await self.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self.post("/resume" if self.is_vllm else "/continue_generation", {})

    async def set_version(self, version: int) -> None:
        more = {} if self.is_vllm else {"abort_all_requests": False}
        await self.post("/update_weight_version", {"new_version": str(version), **more})
        self.version, self.withdrawn = version, False

    def withdraw(self) -> None:
        self.withdrawn = True

    @property
    def is_vllm(self) -> bool:
        return self.backend.name == "vllm"

    async def generate(
        self, ids: Sequence[int], count: int, begun: asyncio.Event | None = None
    ) -> tuple[list[int], list[float], list[int]]:
        """Generate greedily; return ids, log-probs, and the version of each. `begun` is set when a token has come."""
        path, body = _asked(self.is_vllm, ids, count)
        token_ids: list[int] = []
        logp: list[float] = []
        spans: Sequence[Any] = ()
        self.under_way += 1
        try:
            async for event in self._events(path, body):
                if self.is_vllm:
                    (choice,) = event["choices"]
                    token_ids += choice["token_ids"] or []
                    logp += [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
                    spans = choice.get("weight_versions") or spans
                else:
                    token_ids, spans = event["output_ids"], event["meta_info"].get("weight_versions") or spans
                    logp = [entry[0] for entry in event["meta_info"]["output_token_logprobs"]]
                if begun is not None and token_ids:
                    begun.set()
        finally:
            self.under_way -= 1
        return token_ids, logp, [_number(span["version"]) for span in spans for _ in range(span["start"], span["end"])]

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with (
            httpx2.AsyncClient(timeout=120) as client,
            client.stream("POST", self.url + path, json=dict(body)) as answer,
        ):
            async for line in answer.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    event: dict[str, Any] = json.loads(data)
                    if event.get("choices") or "meta_info" in event:
                        yield event

    def says(self, ids: Sequence[int] = (5, 6, 7, 8, 9), count: int = 8) -> tuple[list[int], list[float], list[int]]:
        """Generate greedily, from code that is no coroutine."""
        return asyncio.run(self.generate(ids, count))


def _asked(vllm: bool, ids: Sequence[int], count: int) -> tuple[str, dict[str, Any]]:
    if vllm:
        sampling = {"max_tokens": count, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        return "/inference/v1/generate", {"token_ids": list(ids), "sampling_params": sampling, "stream": True}
    sampling = {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(ids), "sampling_params": sampling, "stream": True}
    return "/generate", body | {"return_logprob": True, "logprob_start_len": -1}


def _number(label: str) -> int:
    """Return a version as a number. A server that was given no version reports a string."""
    return int(label) if label.isdigit() else 0


@contextmanager
def serving(dialect: Dialect, model: Path, into: Path, *more: str) -> Iterator[Served]:
    """Start a server of the model in a directory."""
    python = require_environment(dialect).python
    port = _free_port()
    command, environment = {"vllm": _vllm, "sglang": _sglang}[dialect](python, model, port, into)
    log = into / f"{dialect}-{port}.log"
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [*command, *more],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=into,
        )
    server = Served(dialect, f"http://127.0.0.1:{port}", process, log)
    try:
        _until_ready(server)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _until_ready(server: Served) -> None:
    until = time.monotonic() + PATIENCE
    assert server.process is not None
    while server.process.poll() is None and time.monotonic() < until:
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-30:])
    pytest.fail(f"{server.backend.name} did not start within {PATIENCE:g} s:\n{tail}", pytrace=False)


def _plain() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return variables | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _vllm(python: Path, model: Path, port: int, into: Path) -> tuple[list[str], dict[str, str]]:
    flags = [
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "32"),
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enforce-eager"),
        *("--kv-cache-memory-bytes", str(2**27), "--enable-scale-out", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", '{"backend": "etude"}'),
    ]
    more = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(install_plugin(into)),
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    return command, _plain() | more


def _sglang(python: Path, model: Path, port: int, into: Path) -> tuple[list[str], dict[str, str]]:
    flags = [
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "32768", "--max-running-requests", "128"),
        "--sleep-on-idle",
    ]
    stand_ins = ROOT / "tests" / "rollout" / "sglang_on_cpu"
    more = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(stand_ins)}
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(model), *flags]
    return command, _plain() | more


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
