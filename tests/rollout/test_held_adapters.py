"""Servers that hold an adapter for each policy version: answers keep theirs, and a publish disturbs none."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.errors import ConfigError, EngineError
from etude.records import Completion, SamplingParams
from etude.rollout.failover_router import FailoverRouter
from etude.rollout.replica import Replica
from etude.rollout.server_backend import ServerBackend
from etude.rollout.sglang import SglangBackend
from etude.rollout.vllm import VllmBackend
from etude.rollout.vllm_weights import LORA_METRIC
from tests.rollout.late_server import LateServer, serving

PROMPT = np.array([5, 6], np.int32)
HELD = 3


class AdapterServer(LateServer):
    """A server of adapters. It drops the oldest by itself if it has more than `room`."""

    def __init__(self, room: int = 99) -> None:
        super().__init__()
        self.room = room
        self.held: dict[str, str] = {}
        """The directory of each adapter, by name."""
        self.label = "default"
        self.replica: Replica

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Load, unload and list adapters."""
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name, "max_model_len": 64} for name in ("model", *self.held)]})
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.held:
                return 400, "it has been loaded already"
            self.held[body["lora_name"]] = body["lora_path"]
            for name in list(self.held)[: -self.room]:
                del self.held[name]
        elif path == "/v1/unload_lora_adapter":
            if self.held.pop(body["lora_name"], None) is None:
                return 404, "it cannot be found"
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/weight_info":
            return 200, json.dumps({"weight_version": self.label})
        return super().reply(path, body)

    async def load(self, *versions: int) -> None:
        """Publish adapters, one after the other."""
        for version in versions:
            await self.replica.load(Path(f"/files/{version}"), version)

    @property
    def versions(self) -> list[str]:
        """The names of its adapters."""
        return sorted(self.held)


@asynccontextmanager
async def adapter_server(server: AdapterServer | None = None) -> AsyncGenerator[AdapterServer, None]:
    """Start a server of three adapters."""
    async with serving(server or AdapterServer(), VllmBackend(adapters=HELD)) as started:
        started.engine.is_up = True
        started.replica = Replica(started.engine, None, Path("log"), max_restarts=0, start_timeout=1.0)
        yield started


def play(scene: Callable[[AdapterServer], Coroutine[None, None, None]], server: AdapterServer | None = None) -> None:
    """Run a scene with one server."""

    async def run() -> None:
        async with adapter_server(server) as started:
            await scene(started)

    asyncio.run(run())


def ask(engine: Any, version: int | None = None) -> asyncio.Task[Completion]:
    """Request an answer."""
    return asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=20, version=version)))


def test_a_publish_adds_an_adapter_drops_the_oldest_and_pauses_nothing() -> None:
    async def scene(server: AdapterServer) -> None:
        await server.load(0, 1, 2, 3)
        assert server.versions == ["policy-v1", "policy-v2", "policy-v3"]
        assert server.held["policy-v3"] == "/files/3" and server.engine.version == 3
        assert not {"/pause", "/resume", "/abort_requests", "/reset_prefix_cache"} & set(server.posts)

    play(scene)


def test_an_answer_keeps_the_version_of_its_request_while_others_are_published() -> None:
    """The server's report names its newest version, and not that of the adapter which drew."""

    async def scene(server: AdapterServer) -> None:
        await server.load(0, 1)
        first = ask(server.engine)
        await server.requested()
        await server.send([1])
        await server.load(2)
        await server.send([2, 3])
        await server.load(3)
        later, older = ask(server.engine), ask(server.engine, version=2)
        await server.requested(3)
        report = [{"version": "3", "start": 0, "end": 4}]
        for request in range(3):
            await server.send([4], request=request, finish="stop", weight_versions=report)
        assert [(await answer).version.tolist() for answer in (first, later, older)] == [[1, 1, 1, 1], [3], [2]]
        assert [body["model"] for body in server.requests] == ["policy-v1", "policy-v3", "policy-v2"]
        assert len({body["cache_salt"] for body in server.requests}) == 3

    play(scene)


def test_a_version_whose_adapter_is_gone_is_refused() -> None:
    async def scene(server: AdapterServer) -> None:
        await server.load(0, 1, 2, 3)
        with pytest.raises(EngineError, match=r"Policy version 0 was asked for, and .* holds these: 1, 2, 3"):
            await ask(server.engine, version=0)

    play(scene)


def test_an_adapter_that_a_server_has_dropped_is_loaded_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(server: AdapterServer) -> None:
        await server.load(0, 1)
        del server.held["policy-v0"]
        await server.load(2)
        assert server.versions == ["policy-v0", "policy-v1", "policy-v2"]

    with caplog.at_level(logging.WARNING, "etude"):
        play(scene)
    assert "has dropped policy-v0" in caplog.text


def test_a_server_that_drops_adapters_for_others_is_an_error() -> None:
    async def scene(server: AdapterServer) -> None:
        await server.load(0, 1)
        with pytest.raises(EngineError, match=r"does not have policy-v0.* --max-loras 3 --max-cpu-loras 6"):
            await server.load(2)
        assert server.engine.version == 1, "nothing is drawn by an adapter that may be missing"

    play(scene, AdapterServer(room=2))


def test_adapters_of_an_earlier_run_are_replaced() -> None:
    async def scene(server: AdapterServer) -> None:
        server.held |= {"policy-v1": "/earlier/1", "policy-v7": "/earlier/7", "other": "/theirs"}
        await server.load(1)
        assert server.held == {"policy-v1": "/files/1", "other": "/theirs"}

    play(scene)


def test_a_server_that_comes_back_gets_all_adapters_that_rollouts_use() -> None:
    """Its owner has restarted it, with another adapter of the same name."""

    async def scene(server: AdapterServer) -> None:
        await server.load(0, 1, 2)
        server.held, server.label, server.engine.is_up = {"policy-v1": "/theirs"}, "default", False
        await server.replica.check_health(lambda: None)
        assert server.held == {f"policy-v{version}": f"/files/{version}" for version in range(3)}
        assert not server.engine.withdrawn

    play(scene)


def test_no_request_for_an_earlier_adapter_has_the_salt_of_the_one_that_replaces_it() -> None:
    """Else the server would answer later requests with keys and values of the earlier one."""
    salts: dict[str, str] = {}

    class Watched(AdapterServer):
        def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
            if "policy-v1" in self.held:
                salts[self.held["policy-v1"]] = self.engine.adapters.salt(1)  # that of a request at this moment
            return super().reply(path, body)

    async def scene(server: AdapterServer) -> None:
        await server.load(1)
        await server.replica.load(Path("/others/1"), 1)

    play(scene, Watched())
    assert salts["/files/1"] != salts["/others/1"]


@asynccontextmanager
async def two_servers() -> AsyncGenerator[tuple[AdapterServer, AdapterServer, FailoverRouter], None]:
    """Start two servers with the adapters of versions 0 and 1, and a router over them."""
    async with adapter_server() as one, adapter_server() as two:
        router = FailoverRouter([one.engine, two.engine], max_num_seqs=8, max_waiting=8)
        for server in (one, two):
            await server.load(0, 1)
        router.published_version = 1
        yield one, two, router


def test_a_new_adapter_is_used_once_all_servers_have_it() -> None:
    async def run() -> None:
        async with two_servers() as (one, _, router):
            await one.load(2)
            assert all(map(router.accepts_requests, (0, 1))), "both answer while the other one loads"
            answer = ask(router)
            await one.requested()
            await one.send([1], finish="stop")
            assert (await answer).version.tolist() == [1]
            router.published_version = 2
            assert router.accepts_requests(0) and not router.accepts_requests(1), "it did not get the newest adapter"

    asyncio.run(run())


def test_another_server_continues_an_answer_with_the_same_adapter() -> None:
    async def run() -> None:
        async with two_servers() as (one, two, router):
            answer = ask(router)
            await one.requested()
            await one.send([1, 2])
            for server in (one, two):
                await server.load(2)
            router.published_version = 2
            one.close()
            await two.requested()
            await two.send([3], finish="stop")
            completion = await answer
            assert completion.ids.tolist() == [1, 2, 3] and completion.version.tolist() == [1, 1, 1]
            assert (two.requests[0]["model"], two.requests[0]["token_ids"]) == ("policy-v1", [5, 6, 1, 2])
            assert (router.resumed, router.restarted) == (1, 0)

    asyncio.run(run())


HELP = f"# HELP {LORA_METRIC} Running stats on lora requests.\n"
VLLM, SGLANG = VllmBackend(adapters=HELD), SglangBackend(adapters=HELD)


@pytest.mark.parametrize(
    ("backend", "path", "reply", "limit", "remedy"),
    [
        (VLLM, "/metrics", f'{HELP}{LORA_METRIC}{{max_lora="2",running=""}} 1.0\n', 2, "--max-loras 3"),
        (VLLM, "/metrics", "vllm:num_requests_running 0\n", 0, "--enable-lora"),
        (SGLANG, "/server_info", '{"enable_lora": true, "max_loras_per_batch": 2}', 2, "--max-loras-per-batch 3"),
        (
            SGLANG,
            "/server_info",
            '{"enable_lora": true, "max_loras_per_batch": 8, "max_loaded_loras": 1}',
            1,
            "without",
        ),
        (SGLANG, "/server_info", '{"enable_lora": null, "max_loras_per_batch": 8}', 0, "--enable-lora"),
    ],
)
def test_a_server_that_takes_too_few_adapters_is_refused(
    backend: ServerBackend, path: str, reply: str, limit: int, remedy: str
) -> None:
    async def run() -> str:
        async with serving(LateServer(), backend) as server:
            server.answers[path] = 200, reply
            with pytest.raises(ConfigError) as caught:
                await server.engine.backend.check_adapters(server.engine)
            return str(caught.value)

    error = asyncio.run(run())
    assert "needs servers that take 3 at a time" in error and f"takes {limit}. " in error and remedy in error


def test_a_server_that_takes_enough_adapters_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reports the limit a moment after it has drawn a token."""
    monkeypatch.setattr("etude.rollout.vllm_weights.LIMIT_DELAYS", (0.0, 0.01))

    class LateLimit(LateServer):
        def reply(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
            reply = super().reply(path, body)
            if path == "/metrics":
                self.answers[path] = 200, f'{HELP}{LORA_METRIC}{{max_lora="3",running=""}} 1.0\n'
            return reply

    async def run() -> None:
        async with serving(LateLimit(), VLLM) as server, asyncio.TaskGroup() as group:
            server.answers["/metrics"] = 200, HELP
            checked = group.create_task(server.engine.backend.check_adapters(server.engine))
            await server.requested()
            server.end()
            await checked

    asyncio.run(run())
