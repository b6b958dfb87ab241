"""The contract of every weight transport, with real servers of both kinds.

A server's answers are compared with those of a server that was started from the exported weights, and for other weights
with those of the embedded engine. The model's output head is tied to its embedding, and a server on a CPU computes with
another layout of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.errors import EngineError
from etude.models import Model, create, save, tiny_config
from etude.protocols import RunningPolicy
from etude.records import SamplingParams
from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig
from etude.sync import ReplicaWeightSync, WeightTransport
from etude.sync.broadcast import BroadcastTransport
from etude.sync.disk import DiskTransport
from etude.sync.shm import ShmTransport
from tests.served import on
from tests.servers import Served, serving
from tests.worlds import ALPHABET, make_tokenizer

PROMPT = (5, 6, 7, 8, 9)
COUNT = 12
BUCKET = 1 << 16
"""The size of a bucket in bytes: the model needs several."""
VOCABULARY = len(ALPHABET) + 2
LAST = "model.layers.1.mlp.down_proj.weight"
Weights = dict[str, Tensor]


@dataclass
class World:
    """A server that runs, and the models that are published to it."""

    server: Served
    fresh: tuple[list[int], list[float], list[int]]
    """The answer of a server that had just started from the first model's files."""
    directory: Path
    version: int = 0

    def fleet(
        self, name: str, *more: Served, running: RunningPolicy = "continue", delta: bool = False
    ) -> ReplicaWeightSync:
        made: dict[str, Callable[[], WeightTransport]] = {
            "shm": lambda: ShmTransport(BUCKET),
            "disk": lambda: DiskTransport(self.directory / "published", BUCKET, delta=delta),
            "gloo": lambda: BroadcastTransport("gloo", BUCKET, timeout=30),
        }
        return ReplicaWeightSync([self.server, *more], made[name](), running=running, timeout=30)

    def publish(self, fleet: ReplicaWeightSync, weights: Weights) -> dict[str, float]:
        self.version += 1
        return asyncio.run(fleet.publish(weights.items(), self.version)).reduce()

    def assert_computes_with(self, weights: Weights) -> None:
        """Assert that the server computes with these weights, and labels its answers with their version."""
        ids, logp, versions = self.server.says(PROMPT, COUNT)
        wanted_ids, wanted = embedded(weights)
        assert ids == wanted_ids
        assert np.allclose(logp, wanted, atol=2e-3)
        assert set(versions) == {self.version} == {self.server.version} and not self.server.withdrawn


def model_of(seed: int) -> Model:
    """Return a model with a tied output head, whose next token depends strongly on its context."""
    model = create(tiny_config(VOCABULARY, layers=2, hidden=64, heads=2, kv_heads=1, context=2048), seed=seed)
    with torch.no_grad():
        for _, weight in model.named_weights():
            weight.mul_(4 if weight.ndim == 2 else 1)
    return model


def weights_of(seed: int) -> Weights:
    """Return the weights of such a model."""
    return {name: weight.detach() for name, weight in model_of(seed).named_weights()}


def embedded(weights: Weights) -> tuple[list[int], list[float]]:
    """Return the answer of the embedded engine with these weights."""
    model = model_of(0)
    with torch.no_grad():
        for name, weight in model.named_weights():
            weight.copy_(weights[name])
    with TorchEngine(model, None, TorchEngineConfig(kv_gib=0.01)) as engine:
        (completion,) = engine.generate_all(
            [np.array(PROMPT, np.int32)], [SamplingParams(max_tokens=COUNT, temperature=0.0)]
        )
    return completion.ids.tolist(), completion.raw_logp.tolist()


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=on(kind)) for kind in ("vllm", "sglang")])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp(request.param)
    make_tokenizer(directory / "model")
    save(model_of(1), directory / "model")
    with serving(request.param, directory / "model", directory) as server:
        yield World(server, server.says(PROMPT, COUNT), directory)


FIRST, SECOND = weights_of(1), weights_of(2)


@pytest.mark.parametrize("name", ["shm", "disk", "gloo"])
def test_after_publish_a_server_computes_with_the_trainers_weights(world: World, name: str) -> None:
    fleet = world.fleet(name)
    metrics = world.publish(fleet, SECOND)
    assert metrics["publish_bytes"] == sum(weight.nbytes for weight in SECOND.values())
    assert metrics["publish_failed_replicas"] == 0 and metrics["publish_ms"] >= metrics["publish_pause_ms"] > 0
    world.assert_computes_with(SECOND)
    world.publish(fleet, FIRST)
    world.assert_computes_with(FIRST)
    ids, logp, _ = world.server.says(PROMPT, COUNT)
    assert ids == world.fresh[0] and np.allclose(logp, world.fresh[1], atol=1e-5)
    for changed in ("model.embed_tokens.weight", LAST):  # one tensor that was left as it was would be noticed
        other = FIRST | {changed: FIRST[changed] * 1.5}
        world.publish(fleet, other)
        assert not np.allclose(world.server.says(PROMPT, COUNT)[1], world.fresh[1], atol=1e-3)
        world.assert_computes_with(other)


def test_only_changed_weights_are_sent_with_that_option(world: World) -> None:
    fleet = world.fleet("disk", delta=True)
    world.publish(fleet, FIRST)
    other = FIRST | {LAST: FIRST[LAST] * 2}
    metrics = world.publish(fleet, other)
    assert 0 < metrics["publish_bytes"] < sum(weight.nbytes for weight in FIRST.values()) / 2
    world.assert_computes_with(other)
    assert world.publish(fleet, other)["publish_bytes"] == 0
    world.assert_computes_with(other)


@pytest.mark.parametrize("running", ["continue", "finish"])
def test_running_answers_continue_or_are_waited_for(world: World, running: RunningPolicy) -> None:
    fleet = world.fleet("shm", running=running)
    world.publish(fleet, FIRST)

    lengths = (300, 270, 240, 210)  # different lengths, so that the answers do not all end at the same moment
    most = 20 if running == "continue" else 1  # publishes, until one met an answer under way
    before = world.version
    answers: list[tuple[list[int], list[float], list[int]]] = []

    async def published() -> dict[str, Tensor]:
        started, over = [asyncio.Event() for _ in lengths], asyncio.Event()

        async def asking(at: int) -> None:
            answers.append(await world.server.generate((5, 6, at), lengths[at], started[at]))
            while running == "continue" and not over.is_set():
                answers.append(await world.server.generate((5, 6, at), lengths[at], started[at]))

        tasks = [asyncio.create_task(asking(at)) for at in range(len(lengths))]
        await asyncio.gather(*(event.wait() for event in started))
        for weights in islice(cycle((SECOND, FIRST)), most):
            world.version += 1
            await fleet.publish(weights.items(), world.version)
            if any(len(set(versions)) > 1 for _, _, versions in answers):
                break
        over.set()
        await asyncio.gather(*tasks)
        return weights

    last = asyncio.run(published())
    for ids, _, versions in answers:
        assert len(ids) == len(versions) and len(ids) in lengths
        assert versions == sorted(versions), "a version follows the one before it"
    seen = [set(versions) for _, _, versions in answers]
    assert all(versions <= set(range(before, world.version + 1)) for versions in seen)
    assert (
        all(versions == {before} for versions in seen)
        if running == "finish"
        else any(len(versions) > 1 for versions in seen)
    )
    world.assert_computes_with(last)


def test_weights_that_fail_leave_the_old_ones_in_use(world: World) -> None:
    fleet = world.fleet("shm")
    world.publish(fleet, FIRST)

    def none() -> Iterator[tuple[str, Tensor]]:
        raise OSError("a rank is gone")
        yield "", torch.empty(0)

    with pytest.raises(OSError, match="a rank is gone"):
        asyncio.run(fleet.publish(none(), 99))
    world.assert_computes_with(FIRST)


@pytest.mark.parametrize("name", ["shm", "disk"])
def test_a_failure_in_the_middle_takes_a_server_out_until_the_next_publish(world: World, name: str) -> None:
    fleet = world.fleet(name, delta=name == "disk")
    world.publish(fleet, FIRST)
    world.server.breaks = ("/update_weights", 1 if name == "shm" else 0)
    with pytest.raises(EngineError, match="No engine got the new weights"):
        world.publish(fleet, SECOND)
    world.server.breaks = None
    assert world.server.withdrawn
    world.publish(fleet, SECOND)
    world.assert_computes_with(SECOND)


def test_weights_that_end_half_way_take_a_server_out_until_the_next_publish(world: World) -> None:
    fleet = world.fleet("shm")

    def half() -> Iterator[tuple[str, Tensor]]:
        yield from list(SECOND.items())[:-6]
        raise OSError("a rank is gone")

    with pytest.raises(OSError, match="a rank is gone"):
        asyncio.run(fleet.publish(half(), 99))
    assert world.server.withdrawn
    world.publish(fleet, FIRST)
    world.assert_computes_with(FIRST)


def test_a_lost_server_does_not_keep_others_from_their_weights(world: World) -> None:
    gone = Served(world.server.backend.name, "http://127.0.0.1:9", None, world.directory)
    metrics = world.publish(world.fleet("shm", gone), SECOND)
    assert metrics["publish_failed_replicas"] == 1 and gone.withdrawn
    world.assert_computes_with(SECOND)
