"""The optimizer: AdamW over full-precision weights, whatever precision the model computes in.

A model in half precision is a *compute copy*: what forward passes read, and what an engine in the same process samples
from. Beside it stand the masters, in float32, begun from the weights as their files have them, and the gradient is
gathered there too: a step of 1e-6 of a weight is far below what half precision can hold, and would be lost every time.
After a step the copy is refreshed in place.

    backward ──► gradient (half) ──added──► gradient (float32) ──AdamW──► master (float32) ──cast──► copy (half)

A model in float32 or float64 is its own master, and there is no copy.

Where several ranks train together, each computes with the whole copy and keeps its rows of the masters, of their
gradient and of AdamW's moments: see `Shards`. One rank keeps all of them, and exchanges nothing. Where weights are
divided too, there is no copy but of what is computed with just now, cast from the masters as it is brought: see
`Sections`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from etude.algorithms.view import Ranks
from etude.errors import ConfigError, TrainingError
from etude.train.config import Precision, TrainConfig
from etude.train.ranks import DistributedRanks
from etude.train.sections import Sections, sections
from etude.train.shards import BUCKET, Shards, kept

__all__ = [
    "PRECISIONS",
    "MixedPrecisionOptimizer",
    "ShardedOptimizer",
    "StepResult",
    "WeightOptimizer",
    "compute_learning_rate",
]

PRECISIONS: dict[Precision, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "fp64": torch.float64,
}

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each weight, in its size."""
FIRST_SCALE, LARGEST_SCALE, GROW_AFTER = 2.0**16, 2.0**24, 500
"""fp16: what the loss is multiplied by at first and at most, and after how many good steps in a row it is doubled."""


def compute_learning_rate(config: TrainConfig, update: int, updates: int | None) -> float:
    """The learning rate of an update, counted from 0, out of so many; a constant one need not know how many."""
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.lr_scheduler == "constant":
        return config.learning_rate
    assert updates is not None, "a schedule that falls has to know where it ends"
    done = min((update - config.warmup_steps) / max(updates - config.warmup_steps, 1), 1.0)
    left = 1 - done if config.lr_scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * left


@dataclass(frozen=True)
class StepResult:
    """What came of a step."""

    norm: float
    """Of the gradient, before clipping."""
    skipped: bool = False
    """fp16: the scaled gradient was not finite, the scale was lowered and the weights were left alone."""


class WeightOptimizer:
    """AdamW over weights, with clipping, a refusal of gradients that are not finite, and fp16's loss scale."""

    def __init__(self, weights: dict[str, Tensor], config: TrainConfig, *, option: str = "train") -> None:
        """weights: the tensors that a step changes. option: the name of the configuration in errors."""
        self._weights, self._config, self._option = weights, config, option
        self.scale = torch.tensor(FIRST_SCALE if config.precision == "fp16" else 1.0, dtype=torch.float64)
        self._good_steps = torch.tensor(0)
        decayed = [weight for weight in weights.values() if weight.ndim >= 2]
        plain = [weight for weight in weights.values() if weight.ndim < 2]
        self._adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=config.betas,
            fused=True,
        )
        for weight in weights.values():
            moments = {name: torch.zeros_like(weight, requires_grad=False) for name in MOMENTS}
            self._adam.state[weight] = {"step": torch.zeros((), device=weight.device), **moments}

    def zero_grad(self) -> None:
        """Drop every gradient: an update starts anew, also after one that failed halfway."""
        for tensor in self._weights.values():
            tensor.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The gradient so far, by name, of the rows that this rank keeps. A weight without one is left out."""
        return {name: weight.grad for name, weight in self._weights.items() if weight.grad is not None}

    def step(self, learning_rate: float) -> StepResult:
        """Clip the gradient and update the weights. A gradient that is not finite changes no weight."""
        gradients = [kept(gradient) for gradient in self.gradients().values()]
        norm = self._norm() / float(self.scale)
        if not math.isfinite(norm):
            return self._handle_overflow(norm)
        factor = 1 / float(self.scale)
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
        """Make what forward passes read follow the weights, where that is a copy of them."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return what a step depends on, as the tensors themselves: reading a checkpoint into them restores it.

        After a write to them, call `refresh_copy`.
        """
        moments = {
            kind: {name: self._named(name, self._adam.state[weight][kind]) for name, weight in self._weights.items()}
            for kind in MOMENTS
        }
        weights = {name: self._named(name, weight.detach()) for name, weight in self._weights.items()}
        step = {name: self._adam.state[weight]["step"] for name, weight in self._weights.items()}
        scaling = {"scale": self.scale, "good_steps": self._good_steps}
        return {"weights": weights, **moments, "step": step, "scaling": scaling}

    def offloadable_tensors(self) -> list[Tensor]:
        """The tensors that only a step needs: the moments."""
        return [self._adam.state[weight][kind] for weight in self._weights.values() for kind in MOMENTS]

    def _norm(self) -> float:
        """Return the norm of the whole gradient."""
        return float(get_total_norm(list(self.gradients().values())))

    def _on_any_rank(self, names: set[str]) -> set[str]:
        """The names that any rank has."""
        return names

    def _named(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as a checkpoint stores it."""
        del name
        return tensor

    def _handle_overflow(self, norm: float) -> StepResult:
        gradients = self.gradients().items()
        bad = self._on_any_rank({name for name, grad in gradients if not bool(torch.isfinite(kept(grad)).all())})
        names = [name for name in self._weights if name in bad]
        self.zero_grad()
        if self._config.precision == "fp16" and float(self.scale) > 1:
            self.scale.div_(2)
            self._good_steps.zero_()
            return StepResult(norm, skipped=True)
        where = f"in {len(names)} weights, `{names[0]}` first" if names else "in its norm, though each weight's is"
        raise TrainingError(
            f"The gradient is not finite {where}: this update was not made, and the weights are as they were. Look at "
            f"the log-probs, advantages and returns of the batch, or lower `{self._option}.learning_rate`."
        )

    def _grow_scale(self) -> None:
        """fp16: after many good steps, double the scale, which keeps smaller gradients from vanishing."""
        if self._config.precision == "fp16":
            self._good_steps.add_(1)
            if int(self._good_steps) == GROW_AFTER:
                self.scale.mul_(2).clamp_(max=LARGEST_SCALE)
                self._good_steps.zero_()


class ShardedOptimizer(WeightOptimizer):
    """The optimizer of weights that are DTensors: each rank steps its shards."""

    def __init__(self, weights: dict[str, Tensor], config: TrainConfig, ranks: Ranks, *, option: str = "train") -> None:
        """ranks: the ranks that hold the shards."""
        super().__init__(weights, config, option=option)
        self._ranks = ranks

    def _norm(self) -> float:
        by_mesh: dict[object, list[Tensor]] = {}
        for gradient in self.gradients().values():
            assert isinstance(gradient, DTensor), "sharded weights have sharded gradients"
            by_mesh.setdefault(gradient.device_mesh, []).append(gradient)
        norms = [get_total_norm(gradients) for gradients in by_mesh.values()]
        squares = [float(norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2 for norm in norms]
        return math.sqrt(sum(squares))

    def _on_any_rank(self, names: set[str]) -> set[str]:
        every = list(self._weights)
        counts = self._ranks.all_reduce(torch.tensor([name in names for name in every], dtype=torch.int64))
        return {name for name, count in zip(every, counts.tolist(), strict=True) if count}


class MixedPrecisionOptimizer(WeightOptimizer):
    """Full-precision weights with their gradient, their AdamW, and the half-precision copy that they keep up to date.

    `leaves` are the tensors that a backward pass gives gradients to, by name. `exact` are float32 weights that some of
    them were rounded from: they become the masters themselves, unless their leaf was given another value since.
    """

    def __init__(
        self,
        leaves: Iterable[tuple[str, Tensor]],
        config: TrainConfig,
        exact: Mapping[str, Tensor] | None = None,
        *,
        ranks: Ranks | None = None,
        bucket: int = BUCKET,
        layers: Sequence[Collection[str]] = (),
        option: str = "train",
    ) -> None:
        """`ranks`: who trains the same leaves; each exchange among them takes buckets of so many bytes. `layers`: the
        leaves of each, where weights are divided. `option`: what errors call the configuration."""
        self._copies = dict(leaves)
        self.half = config.precision in ("bf16", "fp16")
        self._shards: Shards | None = None
        self._apart = config.weights == "divided"
        if isinstance(ranks, DistributedRanks):
            names = sections(self._copies, layers) if self._apart else ()
            self._shards = Shards(self._copies, ranks, widen=self.half, bucket=bucket, sections=names)
        elif self._apart:
            raise ConfigError(
                f"`{option}.weights=divided` has each of several ranks keep its rows of the weights, and there is one. "
                f"Set `ranks`, or `{option}.weights=whole`."
            )
        given = exact or {}
        weights = {name: self._owned(leaf, given.get(name), name) for name, leaf in self._copies.items()}
        self.sections: Sections | None = None
        """Where weights are divided: which of them are there."""
        if self._shards is not None:
            self._shards.owned(weights)
            if self._apart:
                self.sections = Sections(self._shards, self._copies, names)
                self.sections.disperse()
        super().__init__(weights, config, option=option)
        if self.half or self._shards is not None:
            hooks = [
                leaf.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                for name, leaf in self._copies.items()
            ]
            # The model may outlive its learner, and have another.
            weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def zero_grad(self) -> None:
        """Drop every gradient: an update starts anew, also after one that failed halfway."""
        super().zero_grad()
        for tensor in self._copies.values():
            tensor.grad = None
        if self._shards is not None:
            self._shards.begin()

    def played(self, *, backward: bool) -> AbstractContextManager[None]:
        """Within, a micro-batch may be computed, which every rank has as many of, be it nothing to this one."""
        return nullcontext() if self.sections is None else self.sections.played(backward=backward)

    def gather(self) -> None:
        """End a micro-batch, of which every rank has as many in an update: add up its gradients over the ranks."""
        if self._shards is not None:
            self._shards.finish()

    def step(self, learning_rate: float) -> StepResult:
        """Clip, step and refresh the copy; a gradient that is not finite changes no weight."""
        if self._shards is not None:
            self._shards.leave_unmoved()
        return super().step(learning_rate)

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Bring the copy to the masters, in place, on every rank."""
        if self.sections is not None:
            if self.sections.assembled:
                self.sections.assemble()
        elif self._shards is not None:
            self._shards.publish()
        elif self.half:
            torch._foreach_copy_(list(self._copies.values()), list(self._weights.values()))

    def whole(self, name: str) -> Tensor:
        """A weight as it is computed with. Where it is divided, all ranks ask together, and it is theirs to keep."""
        if self.sections is None or self.sections.assembled:
            return self._copies[name].detach()
        assert self._shards is not None, "what is divided has shards"
        return self._shards.gathered(name)

    def waited(self) -> float:
        """Seconds that exchanges with other ranks were waited for since this was last asked."""
        return 0.0 if self._shards is None else self._shards.waited()

    def offloadable_tensors(self) -> list[Tensor]:
        """What is needed for a step alone: the moments, and the masters where the model computes with a copy. (What is
        divided is brought from wherever the masters are.)"""
        return [*super().offloadable_tensors(), *(self._weights.values() if self.half or self._apart else ())]

    def _owned(self, leaf: Tensor, exact: Tensor | None, name: str) -> Tensor:
        """The rows of a leaf that are kept here in full precision; those of all rows, where there is one rank."""
        if self._shards is None:
            return _make_master(leaf.detach(), exact) if self.half else leaf
        part = self._shards.part(name, leaf.detach())
        if not self.half:
            return part.clone() if self._apart else part
        return _make_master(part, None if exact is None else self._shards.part(name, exact).clone())

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        """What takes a leaf's gradient as soon as it is there."""
        return _accumulate_into(self._weights[name]) if self._shards is None else self._shards.hook(name)

    def _named(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if self._shards is None else self._shards.named(name, tensor)

    def _norm(self) -> float:
        return super()._norm() if self._shards is None else self._shards.norm(self.gradients())

    def _on_any_rank(self, names: set[str]) -> set[str]:
        return names if self._shards is None else self._shards.anywhere(names)


def _make_master(leaf: Tensor, exact: Tensor | None) -> Tensor:
    if exact is not None and torch.equal(exact.to(leaf.dtype), leaf):
        return exact
    return leaf.float()


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    """What takes a gradient from the copy as soon as it is there, and adds it to the master's."""

    def take(leaf: Tensor) -> None:
        assert leaf.grad is not None, "another learner of this model, still alive, has taken its gradient"
        if master.grad is None:
            master.grad = leaf.grad.float()
        else:
            master.grad.add_(leaf.grad)
        leaf.grad = None

    return take
