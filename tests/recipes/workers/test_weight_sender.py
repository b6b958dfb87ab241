"""The ranks of a run send its weights to the servers themselves. The controller names the servers, and receives the
results.

The servers are stand-ins, which report the weights they received and their sender.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.chat import Tokenizer
from etude.dispatch import LocalCrew
from etude.errors import ConfigError, EngineError
from etude.models import create, save, tiny_config
from etude.observe import Metrics
from etude.protocols import Crew, TransportName, dispatch_mode
from etude.recipes.run.builders.crew import build_rank_worker
from etude.recipes.run.config import Run
from etude.recipes.servers.rank_engines import start_ranks
from etude.recipes.servers.server_weights import WeightPublisher, build_send_plan, serve_run
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.recipes.workers.weight_sender import SendPlan, WeightSender
from etude.records import SamplingParams
from etude.rollout import ServerConfig, ServerPool
from etude.rollout.server_client import ServerAddress
from etude.rollout.server_engine import ServerEngine
from etude.rollout.vllm import VllmBackend
from etude.sync import SyncConfig
from tests.processes import rise_of
from tests.recipes.runs import run_of
from tests.rollout.test_server_pool import be, expected, ids, pids, python, served, theirs, until, words
from tests.served import on, options_of
from tests.vlms import load_vlm, write_vlm
from tests.worlds import make_tasks, make_tokenizer

REPLICAS = 3


@dispatch_mode()
def sums(worker: PolicyWorker) -> dict[str, int]:
    """Return a checksum of each weight of a trainer."""
    return {name: zlib.crc32(weight.detach().numpy().tobytes()) for name, weight in worker.weights()}


@dataclass
class World:
    """A run whose ranks send weights to servers."""

    run: Run
    crew: Crew
    pids: list[int]
    """The processes of the ranks."""
    served: ServerPool
    publish: WeightPublisher
    directory: Path

    @property
    def servers(self) -> list[ServerEngine]:
        return list(self.served.servers)

    def weights(self) -> dict[str, int]:
        """Return the checksum of each of the trainer's weights."""
        return self.crew.call(sums)

    def post(self, path: str, body: dict[str, object]) -> list[object]:
        """Return the servers' answers to a request."""
        return asyncio.run(self.served.run_on_all(lambda server: server.post(path, body)))

    def carried(self) -> list[dict[str, object]]:
        """Return the weights that each server received, and their buckets."""

        return self.get("/carried")

    def get(self, path: str) -> list[dict[str, object]]:
        """Return the answer of each server at a path."""

        async def read(server: ServerEngine) -> dict[str, object]:
            reply: dict[str, object] = json.loads(await server.get(path))
            return reply

        return asyncio.run(self.served.run_on_all(read))

    def be(self, how: dict[str, object], *which: int) -> None:
        """Change the behavior of servers: for example, let them refuse weights."""
        urls = [self.servers[place].url for place in which]

        async def post(server: ServerEngine) -> None:
            if server.url in urls:
                await server.post("/be", how)

        asyncio.run(self.served.run_on_all(post))

    def of(self, place: int) -> int:
        """Return the process of a server."""
        port = self.servers[place].url.rpartition(":")[2]
        return next(pid for pid in pids(self.directory) if port in words(pid))

    def versions(self) -> list[int]:
        return [server.version for server in self.servers]


@contextmanager
def world_of(
    directory: Path, ranks: int = 1, hidden: int = 64, *, sees: bool = False, **options: object
) -> Iterator[World]:
    """Start a run's ranks and servers, without its loop. sees: the model takes images."""
    if sees:
        write_vlm("qwen3_vl", directory / "model")
    else:
        size = make_tokenizer(directory / "model")
        save(
            create(tiny_config(size, layers=2, hidden=hidden, heads=2, context=128, tied=False), seed=0),
            directory / "model",
        )
    make_tasks(directory / "tasks.jsonl", 4)
    given: dict[str, object] = {
        "rollout.weight_transport": "shm",
        "rollout.bucket_mib": 1,
        "rollout.replicas": REPLICAS,
    }
    given |= {"rollout": "vllm", "rollout.restarts": 2, "ranks": ranks}
    if "rollout.python" not in options:
        given["rollout.python"] = python(directory)
    if "rollout.url" in options:  # the URLs of running servers
        given = {name: given[name] for name in ("rollout", "rollout.weight_transport", "rollout.bucket_mib", "ranks")}
    run = run_of(directory, **given | options)
    config = run.rollout
    assert isinstance(config, ServerConfig)
    tokenizer = Tokenizer.load(directory / "model")
    several = start_ranks(build_rank_worker, run, directory / "ranks") if ranks > 1 else None
    with (
        closing(several or LocalCrew(build_rank_worker(run))) as crew,
        serve_run(run, config, tokenizer, crew, directory) as served_run,
    ):
        yield World(run, crew, several.pids if several else [os.getpid()], *served_run, directory)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two ranks and three servers."""
    with world_of(tmp_path_factory.mktemp("two"), ranks=2, hidden=1024) as world:
        yield world


def ask(world: World, tokens: int = 6) -> list[tuple[list[int], set[int]]]:
    """Return the answers to a few prompts, and their versions."""
    prompts = [ids([n]) for n in range(1, 5)]
    result = world.served.generate_all(prompts, [SamplingParams(max_tokens=tokens)] * len(prompts))
    return [(completion.ids.tolist(), set(completion.version.tolist())) for completion in result]


def answers(world: World, version: int, tokens: int = 6) -> list[tuple[list[int], set[int]]]:
    """Return the expected answers of servers that have the trainer's weights."""
    salt = sum(world.weights().values()) % 97
    return [(expected([n], tokens, salt), {version}) for n in range(1, 5)]


def test_each_rank_sends_to_its_servers_and_nothing_passes_through_the_controller(two: World) -> None:
    two.publish(1)  # loads libraries before the measurement
    metrics: list[Metrics] = []
    risen = rise_of(lambda: metrics.append(two.publish(2)))
    reduced = metrics[0].reduce()
    size = reduced["publish_bytes"] / 2
    assert (
        size > 3e7
        and reduced["publish_failed_replicas"] == 0
        and reduced["publish_ms"] >= reduced["publish_pause_ms"] > 0
    )
    assert risen < size / 8
    weights = two.weights()
    result = two.carried()
    assert all(state["weights"] == weights for state in result)
    by = [{int(str(path).split("_")[1]) for path in state["buckets"]} for state in result]  # type: ignore[attr-defined]
    assert by == [{two.pids[0]}, {two.pids[1]}, {two.pids[0]}]
    assert two.versions() == [2] * REPLICAS and ask(two) == answers(two, 2)


def test_a_failing_server_holds_up_no_other_and_gets_the_next_weights(two: World) -> None:
    two.be({"poor": True}, 1)
    failed = two.publish(3).reduce()
    assert failed["publish_failed_replicas"] == 1 and failed["publish_debt"] == 1, "it still has version 2"
    assert [server.withdrawn for server in two.servers] == [False, True, False]
    assert ask(two) == answers(two, 3)
    two.be({"poor": False}, 1)
    mended = two.publish(4).reduce()
    assert mended["publish_failed_replicas"] == mended["publish_debt"] == 0
    assert two.versions() == [4] * REPLICAS and not any(server.withdrawn for server in two.servers)


def test_if_all_servers_fail_the_error_quotes_each(two: World) -> None:
    two.be({"poor": True}, 0, 1, 2)
    with pytest.raises(EngineError) as failed:
        two.publish(5)
    text = str(failed.value)
    assert all(f"{server.url}: " in text for server in two.servers) and text.count("the weights do not fit") == REPLICAS
    assert all(server.withdrawn for server in two.servers)
    two.be({"poor": False}, 0, 1, 2)
    two.publish(6)
    assert ask(two) == answers(two, 6)


def test_a_restarted_server_gets_the_newest_weights(two: World) -> None:
    two.publish(7)
    os.kill(two.of(1), signal.SIGKILL)
    until(lambda: two.served.stats().reduce()["engine/restarts"] == 1, 60)
    until(lambda: not two.servers[1].withdrawn and two.versions() == [7] * REPLICAS, 60)
    result = two.carried()[1]
    assert result["weights"] == two.weights()
    assert {int(path.split("_")[1]) for path in result["buckets"]} == {two.pids[1]}, "by the same rank as always"  # type: ignore[attr-defined]
    assert ask(two) == answers(two, 7)


@pytest.mark.slow
def test_a_frozen_tower_is_sent_to_a_server_once_and_again_after_its_restart(tmp_path: Path) -> None:
    with world_of(tmp_path, sees=True, **{"rollout.replicas": 1}) as world:
        whole, partial = (world.publish(version).reduce()["publish_bytes"] for version in (1, 2))
        tower = load_vlm(tmp_path / "model").tower_weights.values()
        assert whole - partial == sum(weight.nbytes for weight in tower)
        os.kill(world.of(0), signal.SIGKILL)
        until(lambda: world.served.stats().reduce()["engine/restarts"] == 1, 60)
        until(lambda: not world.servers[0].withdrawn and world.versions() == [2], 60)
        sent = world.carried()[0]["weights"]
        assert isinstance(sent, dict) and sorted(sent.values()) == sorted(world.weights().values())
        assert world.publish(3).reduce()["publish_bytes"] == partial


def test_a_server_that_does_not_abort_its_answers_stays_stopped(two: World) -> None:
    """Otherwise it would continue them with weights that arrived in part."""
    every = range(REPLICAS)
    two.be({"pace": 0.2}, *every)
    with ThreadPoolExecutor() as pool:
        pending = pool.submit(two.served.generate_all, [ids([1])], [SamplingParams(max_tokens=40)])
        until(lambda: any(server.active_requests and server.new_tokens for server in two.servers))
        (busy,) = (place for place in every if two.servers[place].active_requests)
        two.be({"poor": True, "deaf": True, "pace": 5.0}, busy)
        two.be({"pace": 0.0}, *(place for place in every if place != busy))
        assert two.publish(8).reduce()["publish_failed_replicas"] == 1
        (completion,) = pending.result(30)
    assert completion.ids.tolist() == answers(two, 8, 40)[0][0] and set(completion.version.tolist()) == {8}
    until(lambda: two.servers[busy].is_up)
    assert [state["paused"] for state in two.get("/state")] == [place == busy for place in every]
    two.be({"poor": False, "deaf": False, "pace": 0.0}, busy)
    two.publish(9)
    assert [state["paused"] for state in two.get("/state")] == [False] * REPLICAS and ask(two) == answers(two, 9)


@dispatch_mode()
def move_on(worker: PolicyWorker) -> None:
    """Change the weights as an update does."""
    worker._learner._version += 1


def shared() -> set[str]:
    """Return the files in shared memory that this process has made."""
    return {file.name for file in Path("/dev/shm").iterdir() if file.name.startswith(f"torch_{os.getpid()}_")}


def test_a_restarted_server_waits_for_the_next_publish_if_the_weights_have_changed(tmp_path: Path) -> None:
    before = shared()
    with world_of(tmp_path, **{"rollout.replicas": 2}) as world:
        world.publish(1)
        world.crew.call(move_on)
        os.kill(world.of(0), signal.SIGKILL)
        until(lambda: world.versions() == [0, 1] and not world.servers[0].withdrawn, 60)
        assert ask(world) == answers(world, 1) and not any(server.withdrawn for server in world.servers)
        world.publish(2)
        assert ask(world) == answers(world, 2) and world.versions() == [2, 2]
        world.crew.close()
        with pytest.raises(AssertionError, match="this crew was closed"):
            world.publish(3)
        assert all(server.withdrawn for server in world.servers)  # the weights that they compute with are unknown
    assert shared() <= before


def test_a_joined_server_that_its_owner_restarts_gets_the_newest_weights(tmp_path: Path) -> None:
    with theirs(tmp_path) as server, world_of(tmp_path, **{"rollout.url": f"[{server.url}]"}) as world:
        world.publish(1)
        server.end()
        until(lambda: not world.servers[0].is_up)
        server.begin()
        assert ask(world) == answers(world, 1)
        assert world.carried()[0]["weights"] == world.weights()


def test_a_server_that_was_away_gets_the_weights_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.rollout.replica.MAX_FAILED_CHECKS", 1000)
    with world_of(tmp_path, **{"rollout.replicas": 2}) as world:
        first = world.servers[0]
        be(first.url, ill=True)
        first.is_up = False  # as after an answer that broke off
        assert world.publish(1).reduce()["publish_failed_replicas"] == 1 and world.versions() == [0, 1]
        be(first.url, ill=False)
        until(lambda: world.versions() == [1, 1])
        assert world.carried()[0]["weights"] == world.weights() and ask(world) == answers(world, 1)


def weights(count: int, ends: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield this many weights, and then raise an error, if one is given."""
    for number in range(count):
        yield f"layer.{number}.weight", torch.full((512, 512), float(number))
    if ends:
        raise OSError(ends)


def test_ranks_take_turns_at_the_servers_of_a_run() -> None:
    addresses = {number: ServerAddress(str(number), VllmBackend(), 1, 0) for number in (0, 1, 2, 4)}
    plan = SendPlan(SyncConfig(), (1, 3), untied=False)
    assert [[address.url for address in plan.share(addresses, rank)] for rank in range(4)] == [
        [],
        ["0", "2", "4"],
        [],
        ["1"],
    ]
    assert SendPlan(SyncConfig(), (), untied=False).share(addresses, 0) == [], "servers load files themselves"


def make_sender(transport: TransportName, **options: object) -> WeightSender:
    """Create the weight sender of a rank on the CPU."""
    return WeightSender(SyncConfig.model_validate({"weight_transport": transport, **options}), torch.device("cpu"))


@pytest.mark.parametrize("count", [0, 3])
def test_weights_that_fail_leave_a_server_unchanged_or_out_of_rotation(count: int, tmp_path: Path) -> None:
    with served(tmp_path) as engine, closing(make_sender("shm", bucket_mib=1)) as sender:
        address = engine.servers[0].address
        (result,) = sender.send([address], weights(count, "a disk is gone"), 3).servers
        assert (result.updated, result.started) == (False, count > 0) and "a disk is gone" in result.error
        whole = sender.send([address], weights(4), 3)
        assert whole.servers[0].updated and whole.metrics["publish_bytes"] == 4 * 512 * 512 * 4


def test_a_transport_within_one_machine_needs_a_rank_there(two: World, monkeypatch: pytest.MonkeyPatch) -> None:
    config = two.run.rollout
    assert isinstance(config, ServerConfig)
    assert build_send_plan(config, two.crew, untied=True, alone=False).ranks == [0, 1]
    monkeypatch.setattr("etude.recipes.servers.server_weights.machine_id", lambda: "another")
    assert build_send_plan(config, two.crew, untied=True, alone=True).ranks == [0, 1], "on any machine"
    for changes in (
        {},
        {"weight_transport": "gloo"},
        {"weight_transport": "gloo", "url": ("http://127.0.0.1:9",), "python": None},
    ):
        near = config.model_copy(update=changes)
        with pytest.raises(ConfigError, match=r"needs a rank on this machine.*all 2 ranks seem to be on others"):
            build_send_plan(near, two.crew, untied=True, alone=False)
    for module in ("servers.server_weights", "workers.policy_worker"):
        monkeypatch.setattr(f"etude.recipes.{module}.machine_id", lambda: "")
    with pytest.raises(ConfigError, match="all 1 ranks seem to be on others"):
        build_send_plan(config, LocalCrew(object()), untied=True, alone=False)
    chosen = {"address": "10.1.1.2", "running": "finish", "update_timeout": 7.0}
    far = config.model_copy(update={"weight_transport": "gloo", "url": ("http://10.1.1.1:9",), **chosen})
    result = build_send_plan(far, two.crew, untied=True, alone=False)
    assert result.ranks == [0, 1] and not result.untied, "a server that takes weights brings a tied head up to date"
    assert build_send_plan(
        config.model_copy(update={"weight_transport": "files"}), two.crew, untied=True, alone=False
    ).untied
    assert (result.sync.address, result.sync.running, result.sync.timeout) == ("10.1.1.2", "finish", 7.0)


@pytest.mark.parametrize("running", ["continue", "finish"])
def test_running_answers_continue_or_are_waited_for(running: str, tmp_path: Path) -> None:
    """A server where it takes too long is left out."""
    patience = {"rollout.replicas": 1, "rollout.running": running, "rollout.server_args": '["--pace=0.05"]'}
    with world_of(tmp_path, **patience, **{"rollout.update_timeout": 20}) as world, ThreadPoolExecutor() as pool:
        world.publish(1)
        pending = pool.submit(ask, world, 20)
        until(lambda: world.servers[0].new_tokens > 4)
        world.publish(2)
        assert world.versions() == [2]
        assert all(versions == {1 if running == "finish" else 2} for _, versions in pending.result(60))


def test_a_server_that_does_not_finish_in_time_is_left_out(tmp_path: Path) -> None:
    patience = {"rollout.running": "finish", "rollout.update_timeout": 0.5, "rollout.server_args": '["--pace=0.2"]'}
    with world_of(tmp_path, **patience, **{"rollout.replicas": 2}) as world, ThreadPoolExecutor() as pool:
        world.publish(1)
        pending = pool.submit(world.served.generate_all, [ids([1])], [SamplingParams(max_tokens=40)])
        until(lambda: any(server.new_tokens for server in world.servers))
        (busy,) = (server for server in world.servers if server.active_requests)
        assert world.publish(2).reduce()["publish_failed_replicas"] == 1
        assert busy.withdrawn and sorted(world.versions()) == [1, 2]
        pending.cancel()


@dispatch_mode()
def change(worker: PolicyWorker) -> None:
    """Set weights unlike those that the servers began with."""
    with torch.no_grad():
        for _, weight in worker._learner.model.named_weights():
            weight.mul_(4 if weight.ndim == 2 else 1)


def greedy(world: World) -> tuple[list[int], list[float], set[int]]:
    """Return a server's greedy answer, its log-probs and its versions."""
    (completions,) = world.served.generate_all([ids([5, 6, 7, 8])], [SamplingParams(max_tokens=12, temperature=0.0)])
    assert completions.raw_logp is not None
    return completions.ids.tolist(), completions.raw_logp.tolist(), set(completions.version.tolist())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "weight_transport"),
    [pytest.param(*each, marks=on(each[0])) for each in (("vllm", "shm"), ("vllm", "gloo"), ("sglang", "shm"))],
)
def test_a_real_server_that_is_killed_comes_back_with_the_newest_weights(
    kind: str, weight_transport: str, tmp_path: Path
) -> None:
    options = {f"rollout.{name}": value for name, value in options_of(kind, tmp_path).items()}
    with world_of(
        tmp_path, **options | {"rollout": kind, "rollout.weight_transport": weight_transport, "rollout.replicas": 1}
    ) as world:
        _, first, _ = greedy(world)
        world.crew.call(change)
        world.publish(1)
        wanted_ids, wanted, _ = greedy(world)
        assert not np.allclose(first, wanted, atol=1e-2)
        (replica,) = world.served.replicas
        assert replica._process.process is not None
        os.kill(replica._process.process.pid, signal.SIGKILL)
        until(lambda: replica.restart_count == 1 and not replica.server.withdrawn and replica.server.version == 1, 400)
        found_ids, result, versions = greedy(world)
        assert found_ids == wanted_ids and np.allclose(result, wanted, atol=1e-4) and versions == {1}


def test_ranks_gather_weights_together_even_if_a_server_fails(tmp_path: Path) -> None:
    """One rank has no server, and the other's server fails once: neither waits for the other."""
    with world_of(tmp_path, ranks=2, **{"rollout.replicas": 1}) as world:
        world.publish(1)
        assert all(state["weights"] == world.weights() for state in world.carried())
        assert ask(world) == answers(world, 1)
        world.be({"poor": True}, 0)
        with pytest.raises(EngineError, match="the weights do not fit"):
            world.publish(2)
        world.be({"poor": False}, 0)
        world.publish(3)
        assert all(state["weights"] == world.weights() for state in world.carried())
        assert world.versions() == [3] and ask(world) == answers(world, 3)
