"""The optimizer: AdamW over full-precision weights, for any precision of the model.

A model in half precision is a *compute copy*: forward passes read it, and an engine in the same process samples from
it. The master weights are in float32 and start from the values in the model's files. Gradients accumulate in float32
too. The reason: half precision cannot represent a step of 1e-6 of a weight, so every such step would be lost. After a
step, the optimizer refreshes the copy in place.

    backward ──► gradient (half) ──added──► gradient (float32) ──AdamW──► master (float32) ──cast──► copy (half)

A model in float32 or float64 is its own master, and there is no copy. So is a weight of a half-precision model that
stays in float32. Sharded weights are always float32, and FSDP2 casts the weights that it gathers.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from etude.algorithms.view import Ranks
from etude.errors import TrainingError
from etude.train.config import TrainConfig

PRECISIONS: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

GradientWatcher: TypeAlias = Callable[[Mapping[str, Tensor], float], None]
"""Called in each step with the gradient by the weights' names, before it is clipped, and a factor that removes the loss
scale. The tensors are the optimizer's own."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The tensors that AdamW keeps for each weight, in the weight's shape."""
FIRST_SCALE = 2.0**16
LARGEST_SCALE = 2.0**24
GROW_AFTER = 500
"""fp16: the first and the largest loss scale, and the number of good steps in a row after which it doubles."""


def ignore_gradient(gradient: Mapping[str, Tensor], factor: float) -> None:
    """Watch nothing."""


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds: all of it, or a shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_decayed(name: str, weight: Tensor) -> bool:
    """Return true for a matrix. The biases of a mixture's experts have two dimensions too, and are none."""
    return weight.ndim >= 2 and not name.endswith("bias")


def compute_learning_rate(config: TrainConfig, update: int, updates: int | None) -> float:
    """Return the learning rate of an update, counted from 0. updates: the number of all; a constant rate needs none."""
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.lr_scheduler == "constant":
        return config.learning_rate
    assert updates is not None, "a decaying schedule needs the number of updates"
    done = min((update - config.warmup_steps) / max(updates - config.warmup_steps, 1), 1.0)
    left = 1 - done if config.lr_scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * left


@dataclass(frozen=True)
class StepResult:
    """The result of a step."""

    norm: float
    """The norm of the gradient, before clipping."""
    skipped: bool = False
    """fp16: the scaled gradient was not finite, so the step lowered the scale and left the weights unchanged."""


class WeightOptimizer:
    """AdamW over weights. It clips gradients, refuses those that are not finite, and keeps fp16's loss scale."""

    def __init__(self, weights: dict[str, Tensor], config: TrainConfig, *, option: str = "train") -> None:
        """weights: the tensors that a step changes. option: the name of the configuration in errors."""
        self._weights = weights
        self._config = config
        self._option = option
        self.scale = torch.tensor(FIRST_SCALE if config.precision == "fp16" else 1.0, dtype=torch.float64)
        self._good_steps = torch.tensor(0)
        self.watch: GradientWatcher = ignore_gradient
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for name, weight in weights.items():  # AdamW takes no DTensors together with others
            groups.setdefault((_is_decayed(name, weight), isinstance(weight, DTensor)), []).append(weight)
        self._adam = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": config.weight_decay if is_decayed else 0.0}
                for (is_decayed, _), group in groups.items()
            ],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )
        for weight in weights.values():
            moments = {name: torch.zeros_like(weight, requires_grad=False) for name in MOMENTS}
            self._adam.state[weight] = {"step": torch.zeros((), device=weight.device), **moments}

    def zero_grad(self) -> None:
        """Drop every gradient, so that an update starts from none even after one that failed halfway."""
        for tensor in self._weights.values():
            tensor.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients by name, of this rank's rows only. A weight without one is left out."""
        return {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}

    def step(self, learning_rate: float) -> StepResult:
        """Clip the gradient and update the weights. A gradient that is not finite changes no weight."""
        gradients = [local_part(gradient) for gradient in self.gradients().values()]
        norm = self._norm() / float(self.scale)
        if not math.isfinite(norm):
            return self._handle_overflow(norm)
        factor = 1 / float(self.scale)
        self.watch(self.gradients(), factor)
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            factor *= limit / (norm + 1e-6)
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.zero_grad()
        self.refresh_copy()
        self._grow_scale()
        return StepResult(norm)

    def refresh_copy(self) -> None:
        """Copy the weights into the compute copy, if there is one."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state that a step depends on, as the tensors themselves and not as copies.

        Reading a checkpoint into them restores it. After a write to them, call `refresh_copy`.
        """
        moments = {
            kind: {name: self._adam.state[weight][kind] for name, weight in self._weights.items()} for kind in MOMENTS
        }
        weights = {name: weight.detach() for name, weight in self._weights.items()}
        step = {name: self._adam.state[weight]["step"] for name, weight in self._weights.items()}
        scaling = {"scale": self.scale, "good_steps": self._good_steps}
        return {"weights": weights, **moments, "step": step, "scaling": scaling}

    def offloadable_tensors(self) -> list[Tensor]:
        """Return the tensors that only a step needs: the moments."""
        return [self._adam.state[weight][kind] for weight in self._weights.values() for kind in MOMENTS]

    def _norm(self) -> float:
        """Return the norm of the whole gradient."""
        return float(get_total_norm(list(self.gradients().values())))

    def _on_any_rank(self, names: set[str]) -> set[str]:
        """Return the names that at least one rank has."""
        return names

    def _handle_overflow(self, norm: float) -> StepResult:
        gradients = self.gradients().items()
        bad = self._on_any_rank({name for name, grad in gradients if not bool(torch.isfinite(local_part(grad)).all())})
        names = [name for name in self._weights if name in bad]
        self.zero_grad()
        if self._config.precision == "fp16" and float(self.scale) > 1:
            self.scale.div_(2)
            self._good_steps.zero_()
            return StepResult(norm, skipped=True)
        where = (
            f"in {len(names)} weights, `{names[0]}` first" if names else "in its norm, though each weight's gradient is"
        )
        raise TrainingError(
            f"The gradient is not finite {where}: this update was skipped, and the weights are unchanged. Look at the "
            f"log-probs, advantages and returns of the batch, or lower `{self._option}.learning_rate`."
        )

    def _grow_scale(self) -> None:
        """fp16: double the scale after many good steps, to keep smaller gradients from underflow."""
        if self._config.precision == "fp16":
            self._good_steps.add_(1)
            if int(self._good_steps) == GROW_AFTER:
                self.scale.mul_(2).clamp_(max=LARGEST_SCALE)
                self._good_steps.zero_()


class ShardedOptimizer(WeightOptimizer):
    """An optimizer for weights that are DTensors: each rank steps its shards. Other weights each rank has whole."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        config: TrainConfig,
        ranks: Ranks,
        *,
        rollout_ranks: Ranks,
        sum_gradients: Callable[[], None],
        option: str = "train",
    ) -> None:
        """ranks: the ranks that hold the shards. rollout_ranks: those that hold other rollouts. sum_gradients:
        completes the gradients, of which this rank may have a part."""
        super().__init__(weights, config, option=option)
        self._ranks = ranks
        self._rollout_ranks = rollout_ranks
        self._sum_gradients = sum_gradients
        self.losses = 0
        """The losses since `zero_grad` that had a gradient."""

    def zero_grad(self) -> None:
        self.losses = 0
        super().zero_grad()

    def step(self, learning_rate: float) -> StepResult:
        """Clip the gradient and update the weights. Without a loss on any rank the gradient is none, not zero: weight
        decay and AdamW's moments do not act then."""
        if self._rollout_ranks.all_max(self.losses):
            self._sum_gradients()
        else:
            self.zero_grad()
        return super().step(learning_rate)

    def offloadable_tensors(self) -> list[Tensor]:
        with torch.no_grad():  # else they are views, and the shards stay where they are
            return [local_part(moment) for moment in super().offloadable_tensors()]

    def _norm(self) -> float:
        by_mesh: dict[object, list[Tensor]] = {}
        for gradient in self.gradients().values():
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(gradient)
        norms = [get_total_norm(gradients) for gradients in by_mesh.values()]
        squares = [float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2 for norm in norms]
        return math.sqrt(sum(squares))

    def _on_any_rank(self, names: set[str]) -> set[str]:
        all_names = list(self._weights)
        counts = self._ranks.all_reduce(torch.tensor([name in names for name in all_names], dtype=torch.int64))
        return {name for name, count in zip(all_names, counts.tolist(), strict=True) if count}


class MixedPrecisionOptimizer(WeightOptimizer):
    """An optimizer for weights on one device, with the half-precision copy that forward passes read.

    In half precision, a hook on each weight of the copy adds its gradient to the float32 weight's. It does so as soon
    as the backward pass has computed the gradient.
    """

    def __init__(
        self,
        leaves: Iterable[tuple[str, Tensor]],
        config: TrainConfig,
        exact: Mapping[str, Tensor] | None = None,
        *,
        option: str = "train",
    ) -> None:
        """leaves: the tensors that a backward pass gives gradients to. exact: the float32 weights that some leaves
        were rounded from. The optimizer steps these, unless the leaf has been given another value since."""
        self._copies = dict(leaves)
        self.half = config.precision in ("bf16", "fp16")
        exact = exact or {}
        weights = {
            name: _make_master(leaf.detach(), exact.get(name)) if self.half else leaf
            for name, leaf in self._copies.items()
        }
        super().__init__(weights, config, option=option)
        self._rounded = [name for name, leaf in self._copies.items() if leaf.dtype != weights[name].dtype]
        if self.half:
            hooks = [
                leaf.register_post_accumulate_grad_hook(_accumulate_into(weights[name]))  # type: ignore[no-untyped-call]
                for name, leaf in self._copies.items()
            ]
            # The model may outlive its learner, and then get another.
            weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def zero_grad(self) -> None:
        super().zero_grad()
        for tensor in self._copies.values():
            tensor.grad = None

    @torch.no_grad()
    def refresh_copy(self) -> None:
        if self._rounded:
            copies, weights = ([held[name] for name in self._rounded] for held in (self._copies, self._weights))
            torch._foreach_copy_(copies, weights)

    def offloadable_tensors(self) -> list[Tensor]:
        """Return the tensors that only a step needs: the moments, and the float32 weights of a half-precision copy."""
        return [*super().offloadable_tensors(), *(self._weights[name] for name in self._rounded)]


def _make_master(leaf: Tensor, exact: Tensor | None) -> Tensor:
    if exact is not None and torch.equal(exact.to(leaf.dtype), leaf):
        return exact
    return leaf.float()


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that moves a gradient from the copy to the master as soon as it is computed."""

    def accumulate(leaf: Tensor) -> None:
        assert leaf.grad is not None, "another learner of this model, still alive, took the gradient"
        if master.grad is None:
            master.grad = leaf.grad.float()
        else:
            master.grad.add_(leaf.grad)
        leaf.grad = None

    return accumulate
