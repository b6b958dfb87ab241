"""Whole runs whose ranks divide the weights, by the command: they are those of ranks that hold them whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.errors import EngineError
from tests.recipes.runs import Captured, options, refused, same, step_metrics, train, weights
from tests.recipes.supervised_runs import learned, loaded
from tests.recipes.test_ranks_run import children, drawn
from tests.recipes.test_ray_run import PATIENT
from tests.recipes.workers.test_weight_sender import answers, ask, world_of

TOLD = ("loss", "grad_norm", "eval/loss")
DIVIDED: dict[str, Any] = {"ranks": 2, "train__weights": "divided"}


def test_a_run_is_that_of_whole_weights_bit_for_bit(world: Path, tmp_path: Path) -> None:
    """Its engines sample from whole weights, and its updates are made of layers."""
    whole = train(world, tmp_path / "whole", ranks=2, steps=2)
    run = train(world, tmp_path / "run", steps=2, **DIVIDED)
    assert not children()
    assert same(weights(run), weights(whole)) and drawn(run, 2) == drawn(whole, 2)
    for mine, theirs in zip(step_metrics(run), step_metrics(whole), strict=True):
        assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])
        assert mine["publish_bytes"] == 0 and mine["mismatch/largest_gap"] < 1e-5
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_what_cannot_be_divided_is_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    for changes, sentence in (
        ({"train.weights": "divided"}, "`train.weights=divided` has each of several ranks keep its rows"),
        ({"critic.train.weights": "divided", "advantage": "gae"}, "`critic.train.weights=divided` has each of several"),
        ({"train.weights": "divided", "ranks": 2, "lora.rank": 4}, "with `lora` these are a few adapters"),
    ):
        given = {"directory": tmp_path / "run", **changes}
        assert sentence in refused(capsys, "train", *options(world, **given))
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_others_go_on_with_it(world: Path, tmp_path: Path, capsys: Captured) -> None:
    run = train(world, tmp_path / "run", steps=1, **DIVIDED)
    message = refused(capsys, "train", "--resume", str(run), "ranks=1", "steps=2")
    assert "Set `ranks`, or `train.weights=whole`" in message
    assert main(["train", "--resume", str(run), "ranks=3", "steps=2"]) == 0
    assert main(["train", "--resume", str(run), "ranks=1", "train.weights=whole", "steps=3"]) == 0
    assert [step["step"] for step in step_metrics(run)] == [1, 2, 3]


@pytest.mark.soak
def test_a_critic_is_divided_by_itself(world: Path, tmp_path: Path) -> None:
    given = {"ranks": 2, "steps": 2, "advantage": "gae", "critic__train__precision": "fp32"}
    whole = train(world, tmp_path / "whole", **given)
    run = train(world, tmp_path / "run", critic__train__weights="divided", **given)
    assert same(weights(run), weights(whole))
    assert [step["critic/loss"] for step in step_metrics(run)] == [step["critic/loss"] for step in step_metrics(whole)]


@pytest.mark.soak
def test_supervised_learning_divides_too(supervised_world: Path, tmp_path: Path) -> None:
    """With a loss on held-out examples, which nothing is learned from."""
    result = []
    for weights_are in ("whole", "divided"):
        changes: dict[str, Any] = {
            "data__val": f"[{supervised_world / 'held_out_pairs.jsonl'}]",
            "train__weights": weights_are,
        }
        run = learned("dpo", supervised_world, tmp_path / weights_are, steps=2, ranks=2, **changes)
        model = {name: weight.detach() for name, weight in loaded(run).named_weights()}
        result.append((model, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]))
    assert same(result[0][0], result[1][0])
    for mine, theirs in zip(result[0][1], result[1][1], strict=True):
        assert [mine.get(name) for name in TOLD] == [theirs.get(name) for name in TOLD]
    assert any("eval/loss" in line for line in result[1][1])


@pytest.mark.soak
@pytest.mark.usefixtures("a_ray")
@pytest.mark.xdist_group("ray")
def test_actors_divide_as_processes_do(world: Path, tmp_path: Path) -> None:
    run = train(world, tmp_path / "run", steps=2, cluster="ray", **PATIENT, **DIVIDED)
    assert same(weights(run), weights(train(world, tmp_path / "whole", ranks=2, steps=2)))


@pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_ranks_bring_divided_weights_to_servers_together(servers: int, tmp_path: Path) -> None:
    """Also a rank that has no server, and one whose server takes none."""
    given: dict[str, Any] = {"train.weights": "divided", "rollout.replicas": servers}
    with world_of(tmp_path, ranks=2, **given) as world:
        world.publish(1)
        assert all(each["weights"] == world.weights() for each in world.carried())
        assert ask(world) == answers(world, 1)
        world.be({"poor": True}, 0)
        if servers == 1:
            with pytest.raises(EngineError, match="the weights do not fit"):
                world.publish(2)
        else:
            assert world.publish(2).reduce()["publish_failed_replicas"] == 1
        world.be({"poor": False}, 0)
        world.publish(3)
        assert all(each["weights"] == world.weights() for each in world.carried())
        assert world.versions() == [3] * servers and ask(world) == answers(world, 3)
