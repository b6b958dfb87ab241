"""Runs on a GPU, with each option that has another path there. In float32 they learn what a run on a CPU learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.runs import step_metrics, train, weights

pytestmark = pytest.mark.gpu
STEPS = 4
SAME = {
    "local": {},
    "fsdp": {"train.engine": "fsdp"},
    "compiled": {"train.compile": "true"},
    "compiled fsdp": {"train.engine": "fsdp", "train.compile": "true"},
    "recomputed": {"train.activation_checkpointing": "full"},
    "activations in CPU memory": {"train.activation_checkpointing": "offload"},
    "optimizer in CPU memory": {"train.offload": "true"},
    "optimizer in CPU memory, fsdp": {"train.offload": "true", "train.engine": "fsdp"},
    "saved in the background": {"checkpoint.async_save": "true", "checkpoint.every": "1"},
}
"""Options that change where or when something is computed, and not what."""
OTHERS = {
    "reference": {"kl": "reverse"},
    "reference on the CPU": {"kl": "reverse", "placement.reference": "cpu"},
    "critic": {"advantage": "gae", "critic.train.precision": "fp32"},
    "adapters": {"lora.rank": 4},
    "adapters, fsdp": {"lora.rank": 4, "train.engine": "fsdp"},
}


def on_gpu(world: Path, directory: Path, **options: Any) -> Path:
    return train(world, directory, **{"steps": STEPS, "device": "cuda", **options})


@pytest.fixture(scope="module")
def on_cpu(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(world, tmp_path_factory.mktemp("cpu") / "run", steps=STEPS, device="cpu")


@pytest.mark.parametrize("name", SAME)
def test_a_run_on_a_gpu_learns_as_on_a_cpu(name: str, world: Path, on_cpu: Path, tmp_path: Path) -> None:
    run = on_gpu(world, tmp_path / "run", **SAME[name])
    for line, expected in zip(step_metrics(run), step_metrics(on_cpu), strict=True):
        assert line["reward"] == expected["reward"], line["step"]
        assert line["mismatch/k3"] < 1e-9
    expected_weights = weights(on_cpu)
    for weight_name, weight in weights(run).items():
        torch.testing.assert_close(weight.cpu(), expected_weights[weight_name], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", OTHERS)
def test_every_model_of_a_run_may_be_on_a_gpu(name: str, world: Path, tmp_path: Path) -> None:
    gpu, cpu = (
        step_metrics(train(world, tmp_path / device, device=device, **{"steps": STEPS, **OTHERS[name]}))
        for device in ("cuda", "cpu")
    )
    assert [line["reward"] for line in gpu] == [line["reward"] for line in cpu]
    assert max(line["mismatch/k3"] for line in gpu) < 1e-9


@pytest.mark.parametrize("engine", ["local", "fsdp"])
def test_sampler_and_trainer_agree_in_half_precision(engine: str, world: Path, tmp_path: Path) -> None:
    run = on_gpu(world, tmp_path / "run", **{"train.precision": "bf16", "train.engine": engine})
    assert max(line["mismatch/k3"] for line in step_metrics(run)) < 1e-3


def test_a_resumed_run_ends_in_the_same_weights_up_to_rounding(world: Path, tmp_path: Path) -> None:
    expected = weights(on_gpu(world, tmp_path / "whole"))
    on_gpu(world, tmp_path / "run", steps=2)
    for name, weight in weights(on_gpu(world, tmp_path / "run")).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
