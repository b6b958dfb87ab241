"""The placement of a run's models: shared and separate ones, its report, and impossible layouts.

Sampling on a second GPU has not been run; the layout is tested on machines that claim to have GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from etude.errors import ConfigError
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.builders.placement_report import describe_placement
from etude.recipes.run.loop import run_loop
from etude.recipes.run.machine.placement import PlacementConfig, gpus_of, gpus_of_servers, role_device
from etude.recipes.run.rules import checks
from etude.recipes.run.rules.placement import check_placement
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.rollout import ServerConfig
from tests.recipes.runs import Captured, refused_run, run_of, same, step_metrics, train, weights

SPLIT = {"placement.layout": "split"}
IPC = {"rollout": "vllm", "rollout.weight_transport": "ipc", "train.offload": "true"}


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that reports eight GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_an_engine_with_a_copy_of_the_weights_samples_the_same_and_is_logged(
    world: Path, whole: Path, tmp_path: Path, capsys: Captured
) -> None:
    apart = train(world, tmp_path / "apart", **SPLIT)
    message = capsys.readouterr()
    assert "On cpu: the policy, the engine, with its own weights." in message.err + message.out
    assert same(weights(whole, 2), weights(apart))
    written = [[line["publish_bytes"] for line in step_metrics(run)] for run in (whole, apart)]
    assert set(written[0]) == {0.0} and all(number > 0 for number in written[1])


def test_split_placement_has_separate_weights(world: Path, tmp_path: Path) -> None:
    for layout, is_shared in (("colocated", True), ("split", False)):
        with build(run_of(world, directory=tmp_path / layout, steps=1, **{"placement.layout": layout})) as parts:
            worker = parts.learners.crew._worker  # type: ignore[attr-defined]
            assert isinstance(worker, PolicyWorker)
            mine = {weight.data_ptr() for _, weight in worker.weights()}
            theirs = {weight.data_ptr() for _, weight in worker._sampling_engine.model.named_weights()}
            assert (mine == theirs) is is_shared and (mine.isdisjoint(theirs)) is not is_shared
            run_loop(parts)


def test_a_run_logs_the_placement_of_its_models(world: Path, tmp_path: Path, capsys: Captured) -> None:
    train(world, tmp_path / "one", steps=1, kl="reverse")
    message = capsys.readouterr()
    assert "On cpu: the policy and its engine, with the same weights, the reference." in message.err + message.out


def test_each_model_is_where_it_is_placed(eight_gpus: None, world: Path) -> None:
    run = run_of(
        world,
        **{**SPLIT, "kl": "reverse", "advantage": "gae"},
        **{"placement.reference": "cuda:6", "placement.critic": "engine"},
    )
    checks.check_run(run)
    assert run.engine_device() == torch.device("cuda", 1) and gpus_of(run.placement, run.ranks) == 7
    ends = {"policy": torch.device("cuda", 0), "engine": run.engine_device()}
    assert role_device(run.placement, "critic", **ends) == torch.device("cuda", 1)
    assert describe_placement(run, run.active_roles()) == [
        "On cuda:0: the policy.",
        "On cuda:1: the engine, with its own weights, the critic.",
        "On cuda:6: the reference.",
    ]


def test_sharded_models_are_placed_with_the_policy(eight_gpus: None, world: Path) -> None:
    run = run_of(world, **{"ranks": 2, "kl": "reverse"})
    assert describe_placement(run, run.active_roles()) == [
        "On cuda:0: the policy and its engine, with a copy of all weights, the reference. On each of 2 ranks; "
        "these are the devices of rank 0."
    ]
    with pytest.raises(ConfigError, match=r"`placement.reference=cpu`: `train.engine=fsdp` shards every model"):
        checks.check_run(run_of(world, **{"ranks": 2, "kl": "reverse", "placement.reference": "cpu"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**SPLIT, "ranks": 5}, r"wants 10 GPUs, and torch sees 8: `ranks=5` that train on one each, 5 more for their"),
        ({"kl": "reverse", "placement.reference": "cuda:8"}, "wants 9 GPUs, and torch sees 8: .*placement.reference"),
        ({**SPLIT, "train.offload": "true"}, "each has its own"),
        (
            {"rollout": "vllm", "ranks": 2, "rollout.replicas": 4, "rollout.tensor_parallel": 2},
            r"wants 10 GPUs, and torch sees 8: `ranks=2` .*GPU numbers up to 9 for servers, 8 from number 2 on "
            r"\(`rollout\.replicas=4`, 2 each\)\. Lower `ranks`, or `rollout\.replicas`; have servers share GPUs",
        ),
        ({"rollout": "vllm", "rollout.devices": "[8]"}, r"wants 9 GPUs.*for servers \(`rollout\.devices`\)"),
        (
            {"rollout": "vllm", "cluster": "ray"},
            r"this process does not know which GPUs the ranks have.*`rollout\.devices`",
        ),
        (
            {"rollout": "vllm", "rollout.weight_transport": "ipc", "ranks": 2, "rollout.replicas": 2},
            "of GPUs, server 0 is on 2 and gets weights from the rank on 0. .* `train.offload`",
        ),
        (
            {**IPC, "ranks": 2, "rollout.replicas": 3, "rollout.devices": "[0, 1, 1]"},
            "of GPUs, server 2 is on 1 and gets weights from the rank on 0",
        ),
        ({**IPC, "rollout.tensor_parallel": 2}, "server 0 is on 0 and 1 and gets weights from the rank on 0"),
        (
            {**IPC, "rollout.weight_transport": "nccl"},
            "goes from one GPU to another, and of GPUs, server 0 is on 0 and gets",
        ),
        ({**SPLIT, "cluster": "ray"}, "over Ray each rank has one"),
        ({"kl": "reverse", "placement.reference": "cuda:1", "cluster": "ray"}, "over Ray each rank has one"),
    ],
)
def test_impossible_layouts_are_refused_with_the_sum(
    eight_gpus: None, options: dict[str, Any], message: str, world: Path
) -> None:
    run = run_of(world, **options)
    with pytest.raises(ConfigError, match=message):
        check_placement(run)


def test_servers_get_the_gpus_after_those_of_the_ranks(eight_gpus: None, world: Path) -> None:
    def placed_on(**options: Any) -> tuple[int, ...]:
        run = run_of(world, rollout="vllm", **options)
        check_placement(run)
        assert isinstance(run.rollout, ServerConfig)
        return gpus_of_servers(run.rollout, run.own_gpus)

    assert placed_on() == (1,)
    assert placed_on(ranks=2, **{"rollout.replicas": 3, "rollout.tensor_parallel": 2}) == (2, 3, 4, 5, 6, 7)
    assert placed_on(ranks=2, **{"rollout.nodes": 2, "rollout.tensor_parallel": 4}) == (2, 3)
    assert placed_on(ranks=8, **{"rollout.replicas": 2, "train.offload": "true"}) == (0, 1)
    assert placed_on(ranks=8, **{"rollout.devices": "[7]"}) == (7,)
    shared = {"rollout.weight_transport": "ipc", "train.offload": "true"}
    assert placed_on(ranks=2, **{"rollout.replicas": 2, **shared}) == (0, 1)
    assert placed_on(ranks=1, **{"rollout.replicas": 2, "rollout.weight_transport": "nccl"}) == (1, 2)
    assert placed_on(ranks=8, **{"rollout.url": "http://127.0.0.1:1"}) == ()
    assert placed_on(cluster="ray", **{"rollout.devices": "[0]"}) == (0,)
    lines = describe_placement(run_of(world, rollout="vllm", **{"rollout.replicas": 2}), frozenset())
    assert lines[-1] == "Servers sample on cuda:1, cuda:2, in separate processes."


def test_gpus_over_ray_are_not_counted_at_the_controller(eight_gpus: None, world: Path) -> None:
    check_placement(run_of(world, ranks=16, cluster="ray"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement.teacher": "cpu"}, "places the teacher, and this run has none"),
        ({"placement.reward": "engine"}, "places the reward model, and this run has none"),
        ({"kl": "reverse", "placement.reference": "cuda:0"}, "this run computes on the processor"),
        ({"kl": "full", "placement.reference": "cpu"}, "must be where the policy is"),
        ({"kl": "reverse", "lora.rank": 2, "placement.reference": "cpu"}, "the policy without its adapters"),
        ({"kl": "reverse", "placement.reference": "moon"}, "placement.reference"),
        ({"rollout": "vllm", "rollout.devices": "[0]"}, "`rollout.devices` names GPUs for servers"),
    ],
)
def test_placements_without_a_meaning_are_refused(
    options: dict[str, Any], message: str, world: Path, tmp_path: Path, capsys: Captured
) -> None:
    if torch.cuda.is_available():
        options |= {"device": "cpu"}
    assert message in refused_run(capsys, world, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_nothing_is_placed_by_default() -> None:
    assert PlacementConfig() == PlacementConfig(layout="colocated", reference="policy", critic="policy")
