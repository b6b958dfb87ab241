"""Servers that keep a model's weights, and receive only the trained adapters."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import etude
from etude.agents import LLM
from etude.chat import Tokenizer
from etude.checkpoint import export_adapter
from etude.envs import Observation
from etude.errors import EngineError
from etude.models import LoraAdapterConfig, Model, adapt, adapter_config, load
from etude.recipes.run.directory import read_metrics
from etude.records import SamplingParams, Task
from etude.rollout import ServerPool
from etude.rollout.held_adapters import AdapterSpec
from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig
from etude.store import AttemptEnded, open_store
from etude.store.journal.events import PolicyPublished
from tests.recipes.partners import Echo
from tests.recipes.players import say, share
from tests.recipes.runs import step_metrics, train
from tests.rollout.test_server_pool import until
from tests.served import joined, on, options_of, started
from tests.worlds import make_tasks

KINDS = [pytest.param(kind, marks=on(kind)) for kind in ("vllm", "sglang")]
PROMPTS = [np.array([5, 6, 7, first], np.int32) for first in range(8, 14)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
MODULES = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
Said = tuple[list[int], list[float]]


@dataclass
class World:
    """A server of a model, which takes adapters."""

    kind: str
    server: ServerPool
    model: Path

    def says(self, version: int | None = None) -> Said:
        return _said(self.server, version)


@pytest.fixture(scope="module", params=KINDS)
def world(
    served_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[World]:
    adapters = AdapterSpec(held=3, rank=4, modules=MODULES)
    directory = tmp_path_factory.mktemp("adapters")
    with started(request.param, served_models[0], directory, adapters=adapters) as server:
        yield World(request.param, server, served_models[0])


def adapted(model: Path, seed: int) -> Model:
    """Return the model with adapters that change its output."""
    made = adapt(load(model, dtype=torch.float32), LoraAdapterConfig(rank=4, alpha=8), seed=seed)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.adapter_weights().values():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=chance))
    return made


def embedded(model: Model, directory: Path) -> Said:
    with TorchEngine(model, Tokenizer.load(directory), TorchEngineConfig(kv_gib=0.01)) as engine:
        return _said(engine)


def _said(engine: ServerPool | TorchEngine, version: int | None = None) -> Said:
    completions = engine.generate_all(PROMPTS, [replace(GREEDY, version=version)] * len(PROMPTS))
    assert all(completion.raw_logp is not None for completion in completions)
    return (
        [token for completion in completions for token in completion.ids.tolist()],
        [
            logp
            for completion in completions
            for logp in ([] if completion.raw_logp is None else completion.raw_logp.tolist())
        ],
    )


def publish(world: World, version: int, directory: Path) -> Model:
    """Write the adapter of a version, have the server load it, and return the model with it."""
    model = adapted(world.model, version)
    written = export_adapter(model.adapter_weights(), adapter_config(model, world.model), directory / str(version))
    asyncio.run(world.server.load(written, version))
    return model


def test_a_server_draws_by_each_adapter_that_it_holds(world: World, tmp_path: Path) -> None:
    """The server reuses nothing of another adapter: the prompt is the same. It holds three, and forgets the oldest."""
    wanted: dict[int | None, Said] = {}
    for version in (1, 2, 3):
        wanted[version] = wanted[None] = embedded(publish(world, version, tmp_path), world.model)
        for named, (ids, logp) in wanted.items():
            said = world.says(named)
            assert len(ids) > 12 and said[0] == ids and np.allclose(said[1], logp, atol=2e-3)
        assert {server.version for server in world.server.servers} == {version}
    assert not np.allclose(wanted[1][1][:6], wanted[2][1][:6], atol=1e-2), "the adapters differ"
    publish(world, 4, tmp_path)
    with pytest.raises(EngineError, match=r"Policy version 1 was asked for, and the server at .* holds these: 2, 3, 4"):
        world.says(1)


def test_a_run_publishes_only_its_adapters(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's answers are sampled with its adapters: the trainer's log-probs equal the server's."""
    shutil.copytree(world.model, tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    options = {"rollout": world.kind, "rollout.max_num_seqs": 32, **joined(world.server, monkeypatch)}
    options |= {"rollout.adapters": "only", "lora.rank": 4, "train.learning_rate": 0.1}
    lines = step_metrics(train(tmp_path, tmp_path / "run", **options, steps=3))
    whole = (tmp_path / "model" / "model.safetensors").stat().st_size
    for line in lines:
        assert line["mismatch/k3"] < 1e-5 and 0 < line["publish_bytes"] < whole / 4
    assert not (tmp_path / "run" / "published").exists()


def test_a_run_is_scored_by_a_kept_adapter_while_it_trains(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(world.model, tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    options = {"rollout": world.kind, "rollout.max_num_seqs": 32, **joined(world.server, monkeypatch)}
    options |= {"rollout.adapters": "only", "lora.rank": 4, "train.learning_rate": 0.1, "max_staleness": 1}
    options |= {"correction.weight": "truncate", "data.val": f"[{tmp_path / 'tasks.jsonl'}]"}
    options |= {"evaluate.when": "beside", "evaluate.every": 2, "checkpoint.every": 2}
    run = train(tmp_path, tmp_path / "run", **options, steps=5)
    lines = read_metrics(run)
    assert [line["step"] for line in lines if "eval/mean@1" in line] == [2, 4, 5]
    assert all("trained_tokens" in line for line in lines) and lines[0]["mismatch/k3"] < 1e-5
    for step in (0, 2, 4, 5):
        answers = (run / "evaluations" / f"step-{step:08d}.jsonl").read_text().splitlines()
        assert {json.loads(answer)["version"] for answer in answers} == {step} and len(answers) == 20


class Slow(Echo):
    """An environment that takes a while for each answer."""

    def play(self, answer: str) -> Observation:
        time.sleep(0.3)
        return super().play(answer)


@etude.agent
async def slow_agent(task: Task, llm: LLM) -> float:
    """Call the model three times, with a pause after each call."""
    text = str(task["prompt"])
    for _ in range(3):
        text += await say(llm, text)
        await asyncio.sleep(0.3)
    return share(text)


@pytest.mark.parametrize("player", [{"env.path": f"{__name__}:Slow"}, {"agent.path": f"{__name__}:slow_agent"}])
def test_rollouts_keep_their_adapter_while_the_policy_trains(
    player: dict[str, str], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout of several turns has one version, though newer ones are published before it ends."""
    shutil.copytree(world.model, tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    options = {"rollout": world.kind, "rollout.max_num_seqs": 32, **joined(world.server, monkeypatch)}
    options |= {"rollout.adapters": "only", "lora.rank": 4, "train.learning_rate": 0.1, "reward.path": None}
    options |= {"max_staleness": 1, "correction.weight": "truncate", "steps": 5, "reward": "environment", **player}
    run = train(tmp_path, tmp_path / "run", **options)
    assert [line["staleness/max"] for line in step_metrics(run)] == [0, 1, 1, 1, 1]
    published, outlived, ended = -1, 0, 0
    with closing(open_store(run / "journal.sqlite", read_only=True)) as store:
        for _, event in store.read():
            if isinstance(event, PolicyPublished):
                published = event.version
            elif isinstance(event, AttemptEnded):
                turns = store.turns(event.rollout)
                (version,) = {version for turn in turns for version in turn.completion.version.tolist()}
                ended, outlived = ended + (len(turns) == 3), outlived + (version < published)
    assert ended == 5 * 12 and outlived > 12, "newer versions came while rollouts went on"


@pytest.mark.soak
def test_a_restarted_server_has_the_newest_adapter(world: World, tmp_path: Path) -> None:
    model = adapted(world.model, 7)
    written = export_adapter(model.adapter_weights(), adapter_config(model, world.model), tmp_path / "7")
    asyncio.run(world.server.load(written, 7))
    replica = world.server.replicas[0]
    assert replica._process.process is not None
    os.kill(replica._process.process.pid, signal.SIGKILL)
    until(lambda: replica.restart_count == 1 and replica.server.is_up and replica.server.version == 7, 300)
    ids, logp = world.says()
    wanted_ids, wanted = embedded(model, world.model)
    assert ids == wanted_ids and np.allclose(logp, wanted, atol=2e-3)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_a_server_that_takes_its_adapters(
    kind: str, served_models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two ranks train. The server's first weights are kept for as long as it may be restarted."""
    shutil.copytree(served_models[0], tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    options = {f"rollout.{name}": value for name, value in options_of(kind, tmp_path).items()}
    options |= {"rollout": kind, "rollout.adapters": "only", "lora.rank": 9, "train.learning_rate": 0.1, "ranks": 2}
    for line in step_metrics(train(tmp_path, tmp_path / "run", **options, steps=4)):
        assert line["mismatch/k3"] < 1e-5 and line["publish_bytes"] > 0
