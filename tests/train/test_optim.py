"""The optimizer compared with torch's, and the schedules compared with their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from etude.algorithms.view import SingleRank
from etude.train import TrainConfig
from etude.train.optim import MixedPrecisionOptimizer, ShardedOptimizer, compute_learning_rate

SHAPES = {"matrix": (5, 3), "bias": (5,), "embedding": (7, 3), "experts.down_proj_bias": (4, 3)}


def leaves(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in made.items()}


def loss_of(parameters: dict[str, nn.Parameter], step: int) -> torch.Tensor:
    """Return a loss whose gradient changes from step to step, so that some steps are clipped and others are not."""
    generator = torch.Generator().manual_seed(step)
    total = torch.zeros(())
    for parameter in parameters.values():
        target = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        total = total + (parameter * target).sum() * (0.1 if step % 2 else 2.0)
    return total


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"), [("fp64", torch.float64, 1e-12), ("fp32", torch.float32, 1e-6)]
)
@pytest.mark.parametrize("max_grad_norm", [None, 1.5])
def test_steps_are_those_of_torchs_adamw(
    precision: str, dtype: torch.dtype, tolerance: float, max_grad_norm: float | None
) -> None:
    config = TrainConfig(
        precision=precision, learning_rate=0.05, weight_decay=0.1, betas=(0.8, 0.95), max_grad_norm=max_grad_norm
    )
    ours, theirs = leaves(dtype), leaves(dtype)
    optimizer = MixedPrecisionOptimizer(ours.items(), config)
    decayed = [theirs["matrix"], theirs["embedding"]]
    undecayed = [theirs["bias"], theirs["experts.down_proj_bias"]]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}],
        lr=0.05,
        betas=(0.8, 0.95),
        fused=False,
        foreach=False,
    )
    for step in range(8):
        optimizer.zero_grad()
        loss_of(ours, step).backward()
        result = optimizer.step(compute_learning_rate(config, step, 8))
        adam.zero_grad()
        loss_of(theirs, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), max_grad_norm if max_grad_norm is not None else math.inf)
        adam.step()
        assert result.norm == pytest.approx(float(norm), rel=1e-6)
        for name, parameter in ours.items():
            assert torch.allclose(parameter, theirs[name], rtol=0, atol=tolerance)


def test_half_precision_steps_are_those_of_float32_on_the_same_gradients() -> None:
    """The masters of bf16 take exactly the steps of fp32 if the gradients are the same numbers."""
    half, full = (
        leaves(torch.bfloat16),
        {name: nn.Parameter(leaf.float()) for name, leaf in leaves(torch.bfloat16).items()},
    )
    optimizers = {
        "bf16": MixedPrecisionOptimizer(half.items(), TrainConfig(precision="bf16", learning_rate=1e-3)),
        "fp32": MixedPrecisionOptimizer(full.items(), TrainConfig(precision="fp32", learning_rate=1e-3)),
    }
    for step in range(5):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for name, parameter in half.items():
            generator = torch.Generator().manual_seed(step)
            target = torch.randn(parameter.shape, generator=generator).bfloat16()
            for _ in range(2):  # accumulated over two micro-batches
                (parameter * target).sum().backward()
                (full[name] * target.float()).sum().backward()
        norms = {optimizer.step(1e-3).norm for optimizer in optimizers.values()}
        assert len(norms) == 1
        for name, weight in optimizers["bf16"].state()["weights"].items():
            assert torch.equal(weight, full[name])
            assert torch.equal(half[name], weight.bfloat16())


def test_masters_start_from_the_weights_before_rounding() -> None:
    exact, half = {name: leaf.detach() for name, leaf in leaves(torch.float32).items()}, leaves(torch.bfloat16)
    with torch.no_grad():
        half["bias"].add_(1)  # changed since it was rounded
    del exact["embedding"]
    masters = MixedPrecisionOptimizer(half.items(), TrainConfig(precision="bf16"), exact).state()["weights"]
    assert masters["matrix"].data_ptr() == exact["matrix"].data_ptr()
    assert not torch.equal(masters["matrix"], half["matrix"].float())
    for name in ("bias", "embedding"):
        assert masters[name].dtype == torch.float32 and torch.equal(masters[name], half[name].float())


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_a_step_without_a_gradient_changes_nothing(precision: str, dtype: torch.dtype) -> None:
    parameters = leaves(dtype)
    before = {name: leaf.detach().clone() for name, leaf in parameters.items()}
    optimizer = MixedPrecisionOptimizer(parameters.items(), TrainConfig(precision=precision, weight_decay=0.1))
    optimizer.zero_grad()
    assert optimizer.step(0.1).norm == 0
    assert all(torch.equal(leaf, before[name]) for name, leaf in parameters.items())


def test_ranks_without_any_loss_move_no_weight_by_the_momentum_of_earlier_steps() -> None:
    """Weights that no rank holds a shard of get their gradient by a sum, which would be zero and not missing."""
    weights = leaves(torch.float32)

    def sum_gradients() -> None:
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad

    ranks = SingleRank()
    optimizer = ShardedOptimizer(
        dict(weights), TrainConfig(weight_decay=0.1), ranks, rollout_ranks=ranks, sum_gradients=sum_gradients
    )
    optimizer.zero_grad()
    loss_of(weights, 0).backward()
    optimizer.losses += 1
    optimizer.step(0.1)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer.zero_grad()
    optimizer.step(0.1)
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())


def test_the_scale_of_fp16_grows_after_many_good_steps() -> None:
    parameters = leaves(torch.float16)
    optimizer = MixedPrecisionOptimizer(parameters.items(), TrainConfig(precision="fp16", learning_rate=1e-6))
    first_scale = float(optimizer.scale)
    for step in range(500):
        assert float(optimizer.scale) == first_scale
        optimizer.zero_grad()
        (loss_of(parameters, step) * 1e-3).backward()
        optimizer.step(1e-6)
    assert float(optimizer.scale) == 2 * first_scale


def test_small_gradients_do_not_underflow_in_fp16() -> None:
    """1e-9 is zero in half precision. Multiplied by the scale it is not, and the step divides by the scale."""
    parameters = leaves(torch.float16)
    optimizer = MixedPrecisionOptimizer(parameters.items(), TrainConfig(precision="fp16", learning_rate=1e-3))
    loss = torch.zeros(())
    for parameter in parameters.values():
        loss = loss + parameter.float().sum() * 1e-9
    optimizer.zero_grad()
    (loss * float(optimizer.scale)).backward()
    count = sum(parameter.numel() for parameter in parameters.values())
    assert optimizer.step(1e-3).norm == pytest.approx(1e-9 * math.sqrt(count), rel=1e-2)


def test_schedules() -> None:
    def rates(**options: object) -> list[float]:
        config = TrainConfig(learning_rate=1.0, **options)
        return [round(compute_learning_rate(config, update, 10), 6) for update in range(11)]

    assert rates() == [1.0] * 11
    assert rates(warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 8
    assert rates(lr_scheduler="linear", warmup_steps=2) == [0.5] + [
        round(1 - i / 8, 6) for i in (-0, 0, 1, 2, 3, 4, 5, 6, 7, 8)
    ]
    cosine = [round(0.5 * (1 + math.cos(math.pi * i / 10)), 6) for i in range(11)]
    assert rates(lr_scheduler="cosine") == cosine
    assert rates(lr_scheduler="linear")[-1] == 0
