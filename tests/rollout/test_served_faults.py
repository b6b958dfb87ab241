"""Faults of servers: overload, absence during a change of state, and servers that never come back."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from etude.errors import EngineError
from etude.rollout import ServerPool, VllmConfig
from etude.rollout.launch import start_servers
from etude.rollout.replica import Replica, wait_for_external_servers
from etude.rollout.server_engine import ModelShape, ServerEngine
from etude.rollout.vllm import VllmBackend
from tests.rollout.stand_in import V
from tests.rollout.test_server_pool import SLOW, ask, be, expected, joining, pids, served, theirs, weights, words
from tests.waits import blocked_until as until


@pytest.fixture(autouse=True)
def glances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check servers so often that no test waits for it."""
    monkeypatch.setattr("etude.rollout.server_pool.CHECK_INTERVAL", 0.1)


def states(engine: ServerPool) -> list[tuple[bool, bool]]:
    """Return whether each server is paused, and whether it sleeps, by its own report."""

    async def state(server: ServerEngine) -> tuple[bool, bool]:
        reply = json.loads(await server.get("/state"))
        return reply["paused"], reply["asleep"]

    return asyncio.run(engine.run_on_all(state))


def test_a_server_gets_no_more_requests_than_its_limit(tmp_path: Path) -> None:
    """A group stays on one server until that one is full. An answer that ends on a withdrawn server frees no slot."""
    with served(tmp_path, replicas=2, server_args=(SLOW,)) as engine, ThreadPoolExecutor() as pool:
        first, second = engine.servers
        for pace, limit in zip(engine.router.limits, (1, 8), strict=True):
            pace.max_limit = pace.limit = limit
        pending = pool.submit(ask, engine, [[3]] * 12, 50)
        until(lambda: engine.router.waiting == 3)
        assert (first.active_requests, second.active_requests) == (1, 8)
        answers = pending.result(60)
        assert [answer.ids.tolist() for answer in answers] == [expected([3], 50)] * 12
        engine.router.limits[1].max_limit = engine.router.limits[1].limit = 1
        pending = pool.submit(ask, engine, [[n] for n in range(2)], 40)
        until(lambda: first.active_requests == second.active_requests == 1)
        second.withdraw()
        third = pool.submit(ask, engine, [[9]], 1)
        until(lambda: engine.router.waiting == 1)
        second.record_version(0)
        assert third.result(60)[0].ids.tolist() == expected([9], 1) and len(pending.result(60)) == 2


def test_the_desired_state_reaches_servers_that_were_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.rollout.server_engine.HEALTH_TIMEOUT", 0.5)
    monkeypatch.setattr("etude.rollout.replica.MAX_FAILED_CHECKS", 1000)
    with served(tmp_path, replicas=2) as engine:
        asyncio.run(engine.pause())
        assert states(engine) == [(True, False)] * 2
        engine.servers[0].is_up = False  # as after one answer that broke off
        asyncio.run(engine.resume())
        until(lambda: all(server.is_up for server in engine.servers))
        assert states(engine) == [(False, False)] * 2
        os.kill(pids(tmp_path)[0], signal.SIGSTOP)
        time.sleep(1)  # an earlier check has ended, and cannot report it as well again
        for server in engine.servers:
            server.is_up = False
        asyncio.run(engine.sleep())
        os.kill(pids(tmp_path)[0], signal.SIGCONT)
        until(lambda: all(server.is_up for server in engine.servers))
        assert states(engine) == [(False, True)] * 2
        asyncio.run(engine.wake())
        assert states(engine) == [(False, False)] * 2 and engine.stats().reduce()["engine/restarts"] == 0


def test_a_server_drops_its_weights_in_sleep_and_gets_its_cache_after_new_ones(tmp_path: Path) -> None:
    """So that weights and their new copy never meet keys and values. One that was restarted has all memory already."""

    async def orders(server: ServerEngine) -> list[str]:
        return list(json.loads(await server.get("/state"))["orders"])

    with served(tmp_path, enable_sleep=True) as engine:
        asyncio.run(engine.sleep())
        asyncio.run(engine.wake())
        asyncio.run(engine.load(weights(tmp_path / "new", 6), 1))
        asyncio.run(engine.wake_cache())
        asyncio.run(engine.wake_cache())
        expected_orders = ["/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]
        assert asyncio.run(engine.run_on_all(orders)) == [expected_orders]
        assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4, 6)
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        until(lambda: not engine.servers[0].is_up)
        until(lambda: engine.servers[0].is_up)
        asyncio.run(engine.wake_cache())
        assert asyncio.run(engine.run_on_all(orders)) == [[]]


def test_a_server_that_dies_asleep_is_restarted_at_wake_on_a_free_port(tmp_path: Path) -> None:
    with served(tmp_path) as engine:
        asyncio.run(engine.sleep())
        (pid,), before = pids(tmp_path), engine.servers[0].url
        os.kill(pid, signal.SIGKILL)
        until(lambda: not engine.servers[0].is_up)
        with socket.socket() as another:
            another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            another.bind(("127.0.0.1", int(before.rpartition(":")[2])))
            another.listen()
            assert not pids(tmp_path) and engine.stats().reduce()["engine/restarts"] == 0
            asyncio.run(engine.wake())
            until(lambda: engine.servers[0].is_up)
            assert engine.servers[0].url != before
            assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4)
    engine.close()  # closing twice does nothing


def test_requests_fail_if_no_server_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path, restarts=0) as owner:
        config = joining(owner, monkeypatch).model_copy(update={"start_timeout": 1.5})
        with start_servers(
            config, tmp_path / "model", None, dtype="float32", device="cpu", logs=tmp_path / "b"
        ) as engine:
            assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4)
            os.kill(pids(tmp_path)[0], signal.SIGKILL)
            gone_for = (
                r"There is no server left\. The server at \S+ does not answer .* for 1\.5 s, while requests waited"
            )
            with pytest.raises(EngineError, match=gone_for):
                ask(engine, [[2]], 4)


def test_a_server_that_refused_new_weights_gets_them_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(tmp_path, replicas=2) as engine:
        first = engine.servers[0]

        async def poor(server: ServerEngine) -> None:
            if server is first:
                await server.post("/be", {"poor": not engine.replicas[0].stale_reason})

        asyncio.run(engine.run_on_all(poor))
        asyncio.run(engine.load(weights(tmp_path / "new", 11), 3))
        assert first.withdrawn and "do not fit" in engine.replicas[0].describe_absence()
        assert re.search(r"is out of rotation until it takes the new weights: .*do not fit", caplog.text)
        asyncio.run(engine.run_on_all(poor))
        until(lambda: not first.withdrawn)
        answers = ask(engine, [[n] for n in range(4)], 5)
        assert [answer.ids.tolist() for answer in answers] == [expected([n], 5, salt=11) for n in range(4)]
        assert first.version == 3 and first.finished


def busy_of(engine: ServerPool) -> tuple[ServerEngine, ServerEngine]:
    """Return the server that writes an answer, and the other of the two."""
    until(lambda: any(server.new_tokens > 2 for server in engine.servers))
    first, second = engine.servers
    return (first, second) if first.active_requests else (second, first)


def goes_on(server: ServerEngine) -> None:
    """Wait until it has written more."""
    seen = server.new_tokens
    until(lambda: server.new_tokens > seen + 1)


def test_answers_end_on_this_side_if_a_server_ignores_the_abort(tmp_path: Path) -> None:
    """The weights of those answers would be unknown."""
    new = weights(tmp_path / "new", 11)
    with served(tmp_path, replicas=2, server_args=("--pace=0.2",)) as engine, ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, engine, [[3]], 30)
        busy, other = busy_of(engine)
        be(busy.url, poor=True, deaf=True, pace=5.0)
        be(other.url, pace=0.0)
        asyncio.run(engine.load(new, 1))
        (answer,) = pending.result(30)
        assert answer.ids.tolist() == expected([3], 30, salt=11) and set(answer.version.tolist()) == {1}
        until(lambda: busy.is_up)
        assert busy.withdrawn and states(engine)[engine.servers.index(busy)] == (True, False), "it stays stopped"
        be(busy.url, poor=False, deaf=False, pace=0.0)
        until(lambda: not busy.withdrawn)
        assert states(engine) == [(False, False)] * 2 and busy.version == 1


def test_an_answer_of_uncertain_version_is_restarted(tmp_path: Path) -> None:
    """A weight sender lets a server continue before the trainer knows that it has the weights."""
    with served(tmp_path, replicas=2, restarts=0, server_args=("--pace=0.1",)) as engine, ThreadPoolExecutor() as pool:
        pending = pool.submit(ask, engine, [[3]], 40)
        busy, other = busy_of(engine)
        servers = engine.withdraw_servers()

        async def stamped(server: ServerEngine) -> None:
            await server.post("/update_weight_version", {"new_version": "1"})

        asyncio.run(engine.run_on_all(stamped))
        goes_on(busy)
        engine.readmit_servers(dict.fromkeys(servers, 1), 1)
        goes_on(busy)
        be(other.url, pace=0.0)
        port = busy.url.rpartition(":")[2]
        os.kill(next(pid for pid in pids(tmp_path) if port in words(pid)), signal.SIGKILL)
        (answer,) = pending.result(30)
        assert answer.ids.tolist() == expected([3], 40) and set(answer.version.tolist()) == {1}
        assert engine.stats().reduce()["engine/requests_restarted"] == 1


def test_a_joined_server_that_returns_with_other_weights_gets_no_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Version 0 is a version like any other."""
    with theirs(tmp_path) as server:
        config = VllmConfig(url=(server.url,))
        model = weights(tmp_path / "model", 5)
        with start_servers(config, model, None, dtype="float32", device="cpu", logs=tmp_path) as engine:
            asyncio.run(engine.load(weights(tmp_path / "new", 11), 0))
            assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4, salt=11)
            server.end()
            until(lambda: not engine.servers[0].is_up)
            server.begin()
            until(lambda: engine.servers[0].is_up)
            (answer,) = ask(engine, [[2]], 4)
            assert answer.ids.tolist() == expected([2], 4, salt=11) and set(answer.version.tolist()) == {0}
    assert "has other weights than it was sent" in caplog.text


def test_a_joined_server_is_awake_when_it_is_joined_and_when_it_is_left(tmp_path: Path) -> None:
    with theirs(tmp_path) as server:
        config, model = VllmConfig(url=(server.url,)), tmp_path / "theirs"
        for path in ("/sleep", "/pause"):  # a killed run leaves it so
            httpx2.post(f"{server.url}{path}", json={})
        with start_servers(config, model, None, dtype="float32", device="cpu", logs=tmp_path) as engine:
            assert states(engine) == [(False, False)] and ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4)
            asyncio.run(engine.pause())
            asyncio.run(engine.sleep())
            assert states(engine) == [(True, True)]
        state = httpx2.get(f"{server.url}/state").json()
        assert not state["paused"] and not state["asleep"]


def test_a_joined_server_without_training_endpoints_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with theirs(tmp_path) as server:
        server.be(closed=True)
        config, model = VllmConfig(url=(server.url,)), tmp_path / "theirs"
        with (
            pytest.raises(EngineError, match=r"answered 404 to /is_sleeping.*Start it with VLLM_SERVER_DEV_MODE=1"),
            start_servers(config, model, None, dtype="float32", device="cpu", logs=tmp_path),
        ):
            pass


def test_a_server_that_was_away_gets_the_new_weights_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.rollout.replica.MAX_FAILED_CHECKS", 1000)
    with served(tmp_path, replicas=2) as engine:
        first, second = engine.servers
        be(first.url, ill=True)
        first.is_up = False  # as after an answer that broke off
        asyncio.run(engine.load(weights(tmp_path / "new", 11), 3))
        assert (first.version, second.version) == (0, 3)
        be(first.url, ill=False)
        until(lambda: engine.router.accepts_requests(0))
        answers = ask(engine, [[n] for n in range(8)], 5)
        assert [answer.ids.tolist() for answer in answers] == [expected([n], 5, salt=11) for n in range(8)]
        assert first.finished and second.finished and engine.stats().reduce()["engine/restarts"] == 0
        be(first.url, ill=True)
        first.is_up = False
        withdrawn = engine.withdraw_servers()
        be(first.url, ill=False)
        until(lambda: first.is_up)  # it comes back while the other server gets the weights
        engine.set_weight_reloader(lambda server: server.set_version(4))
        engine.readmit_servers(dict.fromkeys(withdrawn, 4), 4)
        until(lambda: (first.version, second.version) == (4, 4))


@pytest.mark.parametrize("replies", [(False, True), (False, False)])
def test_a_joined_server_that_misses_one_check_before_a_publish_stays_up(
    replies: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> tuple[bool, int]:
        left, changes = iter(replies), list[None]()

        async def is_healthy(server: ServerEngine) -> bool:
            return next(left)

        monkeypatch.setattr(ServerEngine, "is_healthy", is_healthy)
        server = ServerEngine("http://127.0.0.1:9", VllmBackend(), ModelShape(V, 64, 1))
        server.is_up = True
        replica = Replica(server, None, Path("log"), max_restarts=0, start_timeout=0.0)
        with suppress(EngineError):
            await wait_for_external_servers([replica], lambda: changes.append(None))
        await server.close()
        return server.is_up, len(changes)

    assert asyncio.run(run()) == ((True, 0) if any(replies) else (False, 1))
    assert ("It gets no requests" in caplog.text) != any(replies)


def test_a_server_whose_engine_hangs_is_restarted_though_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("etude.rollout.health_check.MAX_SILENCE", 2.0)
    with served(tmp_path, restarts=3) as engine:
        be(engine.servers[0].url, hangs=True)
        httpx2.post(f"{engine.servers[0].url}/pause", json={})
        assert ask(engine, [[3]], 30)[0].ids.tolist() == expected([3], 30)
        assert engine.stats().reduce()["engine/restarts"] >= 1
    assert "has said nothing for 2 s, though that answers" in caplog.text


def test_a_joined_server_gets_no_requests_while_its_engine_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.rollout.health_check.MAX_SILENCE", 1.0)
    with theirs(tmp_path) as server:
        config, model = VllmConfig(url=(server.url,)), tmp_path / "theirs"
        with start_servers(config, model, None, dtype="float32", device="cpu", logs=tmp_path) as engine:
            server.be(hangs=True)
            until(lambda: not engine.servers[0].is_up)
            server.be(hangs=False)
            assert ask(engine, [[2]], 4)[0].ids.tolist() == expected([2], 4)


def test_a_busy_or_sleeping_engine_is_not_taken_for_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine need not answer while it samples, and while it receives weights."""
    monkeypatch.setattr("etude.rollout.health_check.MAX_SILENCE", 2.0)

    def silent() -> None:
        end = time.monotonic() + 2.5
        until(lambda: time.monotonic() > end)

    with served(tmp_path, server_args=("--pace=0.06",)) as engine:
        be(engine.servers[0].url, hangs=True)
        assert ask(engine, [[2]], 55)[0].ids.tolist() == expected([2], 55)
        withheld = engine.withdraw_servers()
        silent()
        engine.readmit_servers(dict.fromkeys(withheld, 0), 0)
        asyncio.run(engine.sleep())
        silent()
        asyncio.run(engine.wake())
        assert engine.servers[0].is_up and engine.stats().reduce()["engine/restarts"] == 0
