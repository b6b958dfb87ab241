"""New weights while answers are under way: no token gets a version newer than the weights that drew it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from etude.errors import EtudeError
from etude.records import Completion, SamplingParams
from etude.rollout.server_backend import ServerBackend
from etude.rollout.sglang import SglangBackend
from etude.rollout.vllm import VllmBackend
from tests.rollout.late_server import LateServer, late_server

PROMPT = np.array([5, 6], np.int32)


def answered(play: Callable[[LateServer], Coroutine[None, None, None]]) -> Completion:
    """Return the answer to one request, while the test plays the server."""

    async def run() -> Completion:
        async with late_server() as server, asyncio.TaskGroup() as group:
            asked = group.create_task(server.engine.generate(PROMPT, SamplingParams(max_tokens=20)))
            await server.requested()
            await play(server)
            return await asked

    return asyncio.run(run())


def test_a_piece_that_arrives_after_a_publish_gets_the_older_version() -> None:
    async def play(server: LateServer) -> None:
        await server.send([1])
        server.publish(1)
        await server.send([2, 3])  # drawn before the pause, perhaps
        await server.send([4])
        await server.send([5], finish="stop")

    assert answered(play).version.tolist() == [0, 0, 0, 1, 1]


def test_all_pieces_of_the_first_read_after_a_publish_get_the_older_version() -> None:
    async def play(server: LateServer) -> None:
        await server.send([1])
        server.publish(1)
        await server.send([2], [3], [4])
        await server.send([5], finish="stop")

    assert answered(play).version.tolist() == [0, 0, 0, 0, 1]


def test_the_first_tokens_of_a_request_from_before_a_publish_get_the_older_version() -> None:
    async def play(server: LateServer) -> None:
        server.publish(1)
        server.publish(2)
        await server.send([1])
        await server.send([2])
        server.publish(3)
        await server.send([3])
        await server.send([4], finish="stop")

    assert answered(play).version.tolist() == [0, 2, 2, 3]


def test_a_request_after_a_publish_has_no_token_of_the_version_before() -> None:
    async def run() -> Completion:
        async with late_server() as server, asyncio.TaskGroup() as group:
            server.publish(1)
            asked = group.create_task(server.engine.generate(PROMPT, SamplingParams(max_tokens=20)))
            await server.requested()
            await server.send([1])
            await server.send([2], finish="stop")
            return await asked

    assert asyncio.run(run()).version.tolist() == [1, 1]


@pytest.mark.parametrize(("label", "versions"), [("0", [0, 1, 1, 1]), ("default", [0, 1, 1, 1])])
def test_the_servers_own_report_replaces_the_versions(label: str, versions: list[int]) -> None:
    """A label without a number leaves the versions of its tokens."""

    async def play(server: LateServer) -> None:
        await server.send([1])
        server.publish(1)
        await server.send([2, 3])
        report = [{"version": label, "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 4}]
        await server.send([4], finish="stop", weight_versions=report)

    assert answered(play).version.tolist() == versions


def test_a_stream_never_tells_a_reader_a_version_that_is_too_new() -> None:
    """The reader takes the pieces of one read one by one, and new weights come between two of them."""

    async def run() -> list[list[int]]:
        async with late_server() as server, asyncio.TaskGroup() as group:
            deltas = server.engine.stream(PROMPT, SamplingParams(max_tokens=20))
            first = group.create_task(anext(deltas))
            await server.requested()
            sending = group.create_task(server.send([1], [2], [3]))
            versions = [(await first).version.tolist()]
            server.publish(1)
            versions += [(await anext(deltas)).version.tolist() for _ in range(2)]
            await sending
            for token in (4, 5):
                following = group.create_task(anext(deltas))
                await server.send([token])
                versions.append((await following).version.tolist())
            await deltas.aclose()
            return versions

    assert asyncio.run(run()) == [[0], [0], [0], [0], [1]]


@pytest.mark.parametrize(("backend", "name"), [(VllmBackend(), "cache_salt"), (SglangBackend(), "extra_key")])
def test_a_request_shares_its_cache_only_within_its_weights(backend: ServerBackend, name: str) -> None:
    """A version may come twice with other weights: after a resume, or from another run at the same server."""

    async def run() -> list[str]:
        async with late_server(backend) as server:
            for count in range(1, 6):
                if count in (2, 4):
                    server.publish(4)
                asked = asyncio.create_task(server.engine.generate(PROMPT, SamplingParams(max_tokens=20)))
                await server.requested(count)
                asked.cancel()
                with suppress(asyncio.CancelledError):
                    await asked
            return [body[name] for body in server.requests]

    first, second, third, fourth, fifth = asyncio.run(run())
    assert second == third and fourth == fifth and len({first, second, fourth}) == 3


VLLM, SGLANG = VllmBackend(), SglangBackend()


@pytest.mark.parametrize(
    ("backend", "paths"),
    [
        (VLLM, ["/pause", "/finish_weight_update", "/reset_prefix_cache"]),
        (VllmBackend(kv="keep"), ["/pause", "/finish_weight_update"]),
        (SGLANG, ["/pause_generation retract", "/end_weight_update", "/flush_cache"]),
        (SglangBackend(kv="keep"), ["/pause_generation in_place", "/end_weight_update"]),
    ],
)
def test_an_update_drops_the_cache_only_if_it_is_to_be_recomputed(backend: ServerBackend, paths: list[str]) -> None:
    async def run() -> list[str]:
        async with late_server(backend) as server:
            server.answers["/reset_prefix_cache"] = 200, '{"success": true}'
            await server.engine.pause_for_update()
            await backend.finish_update(server.engine)
            return server.posts

    assert asyncio.run(run()) == paths


@pytest.mark.parametrize(
    ("backend", "path", "status", "reply"),
    [
        (VLLM, "/reset_prefix_cache", 200, '{"success": false}'),
        (VLLM, "/reset_prefix_cache", 200, ""),
        *((SGLANG, "/update_weights_from_disk", 200, reply) for reply in ("", '"ok"', '{"success": null}')),
    ],
)
def test_a_server_that_loads_weights_and_keeps_its_old_cache_is_out_of_rotation(
    backend: ServerBackend, path: str, status: int, reply: str, tmp_path: Path
) -> None:
    async def run() -> tuple[str, bool, int]:
        async with late_server(backend) as server:
            server.answers[path] = status, reply
            with pytest.raises(EtudeError) as caught:
                await server.engine.load(tmp_path, 1)
            return str(caught.value), server.engine.withdrawn, server.engine.version

    error, withdrawn, version = asyncio.run(run())
    assert withdrawn and version == 0
    assert (f"did not load {tmp_path}" if backend is SGLANG else "did not drop the prefix cache") in error


@pytest.mark.parametrize(
    ("backend", "path", "status", "reply"),
    [
        (VLLM, "/reset_prefix_cache", 200, '{"success": false}'),
        (VLLM, "/reset_prefix_cache", 200, ""),
        (SGLANG, "/flush_cache", 400, "Flush cache failed."),
    ],
)
def test_an_update_fails_if_the_server_does_not_drop_its_old_cache(
    backend: ServerBackend, path: str, status: int, reply: str
) -> None:
    async def run() -> str:
        async with late_server(backend) as server:
            server.answers[path] = status, reply
            with pytest.raises(EtudeError) as caught:
                await backend.finish_update(server.engine)
            return str(caught.value)

    error = asyncio.run(run())
    assert path in error and (reply if backend is SGLANG else "did not drop the prefix cache") in error
