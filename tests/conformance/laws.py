"""What the property tests of the laws share: every algorithm there is, and how its gradient is taken.

A gradient here is the derivative of the loss by what the model said of each token (log-prob, entropy, value …), token
by token: the finest thing a loss can be wrong about. The batches are off-policy, with NaN wherever nothing is known.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from etude.algorithms import (
    ADVANTAGES,
    KLS,
    LOSSES,
    AlgorithmConfig,
    AlgorithmState,
    Denominators,
    EstimatedBatch,
    Outputs,
    View,
)
from etude.algorithms.corrections import CorrectionConfig, RejectionRule
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.kl import AdaptiveKLController
from etude.algorithms.overlong import OverlongPenalty
from etude.batch import Batch, Column, ColumnKind
from tests.batches import random_batch
from tests.sweeps import Test, sweep

few = settings(max_examples=2)
"""Random batches for each algorithm: there are seventy algorithms, so a law is tried a hundred and forty times."""

LENGTHS = (4, 2, 3, 5)
"""Group sizes of the fixture: no group of one, so that every estimator accepts it."""


WIDE: dict[str, dict[str, float]] = {"flash_reinforce": {"threshold": 0.08}}
"""Limits of losses that would drop every rollout of the fixture by their defaults."""


def fixture(seed: int = 0, sizes: Sequence[int] = LENGTHS, **options: object) -> Batch:
    """An off-policy batch that every algorithm accepts, with each token's number in the plug-in column `where`.

    One rollout of it chose nothing, unless `idle` is false.
    """
    return _fixture(seed, tuple(sizes), **options)


@cache  # every algorithm is tried on the same few batches, which no test changes
def _fixture(seed: int, sizes: tuple[int, ...], **options: object) -> Batch:
    batch = random_batch(seed, sizes, **options)  # type: ignore[arg-type]
    if options.get("idle", True):
        quiet = torch.arange(batch.num_rollouts) == seed % batch.num_rollouts
        batch = batch.replace(
            action=batch.action & ~torch.repeat_interleave(quiet, torch.diff(batch.rollout_token_offsets))
        )
    return batch.replace(
        reward=batch.require("reward").abs(),  # maxrl refuses negative rewards
        token_reward=torch.where(batch.action, batch.require("token_reward").abs(), torch.nan),
        anchor=torch.where(batch.action, batch.ids.long() % 3, 0),
        final_value=torch.linspace(-1, 1, batch.num_rollouts, dtype=torch.float64),
        trainer_version=torch.full((batch.num_rollouts,), 6),
        extra={"where": Column(ColumnKind.TOKEN, torch.arange(batch.num_tokens))},
    )


def said(batch: Batch, seed: int = 1, drift: float = 0.4) -> dict[str, Tensor]:
    """What a model might say of the batch: leaves that take gradients, NaN at every context token but for the log-prob
    of what was observed."""
    rng = torch.Generator().manual_seed(seed)

    def near(values: Tensor, scale: float) -> Tensor:
        moved = values + scale * torch.randn(values.shape, generator=rng, dtype=values.dtype)
        return torch.where(batch.action, moved, torch.nan)

    logp = near(batch.require("old_logp"), drift)
    guess = -torch.rand(batch.num_tokens, generator=rng, dtype=logp.dtype)
    return {
        "logp": torch.where(observed(batch), guess, logp).requires_grad_(),
        "entropy": near(batch.require("entropy"), 0.1).requires_grad_(),
        "full_kl": near(batch.require("entropy"), 0.1).requires_grad_(),
    }


def observed(batch: Batch) -> Tensor:
    """[T] bool: what ECHO learns from."""
    return batch.require("observation") & ~batch.action


def taught(algorithm: AlgorithmConfig, batch: Batch) -> Tensor:
    """[T] bool: the tokens that may have a gradient: what was chosen, and under ECHO what was observed."""
    return batch.action | observed(batch) if algorithm.echo else batch.action


def shown(leaves: dict[str, Tensor], part: Batch) -> Outputs:
    """The forward pass over a part of the batch."""
    where = part.extra["where"].tensor
    return Outputs(**{name: leaf[where] for name, leaf in leaves.items()})


@dataclass(frozen=True)
class Found:
    """A loss and its gradient by every number the model said."""

    loss: Tensor
    grads: dict[str, Tensor]

    def close_to(self, other: Found, tolerance: float) -> bool:
        """Whether loss and gradients agree, in units of the larger gradient's size."""
        scale = 1 + max(float(g.abs().max()) for g in other.grads.values())
        near = torch.allclose(self.loss, other.loss, rtol=tolerance, atol=tolerance)
        return near and all(
            torch.allclose(self.grads[name], g, rtol=tolerance, atol=tolerance * scale)
            for name, g in other.grads.items()
        )


def gradient(
    algorithm: AlgorithmConfig,
    ready: EstimatedBatch,
    leaves: dict[str, Tensor],
    parts: Sequence[Sequence[int]] | None = None,
) -> Found:
    """The loss of an update batch, taken in these micro-batches of rollouts (or in one), and its gradient."""
    batch = ready.batch
    whole = Denominators.from_view(View(batch))
    pieces = [batch] if parts is None else [batch.select(list(part)) for part in parts]
    fresh = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    losses = [algorithm.compute_loss(piece, shown(fresh, piece), whole, ready.state).loss for piece in pieces]
    total = torch.stack(losses).sum()
    if total.requires_grad:
        total.backward()
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in fresh.items()}
    return Found(total.detach(), grads)


def through(algorithm: AlgorithmConfig, batch: Batch, seed: int = 1) -> Found:
    """Estimate over the whole batch, then the objective in one piece."""
    return gradient(algorithm, algorithm.estimate(batch, AlgorithmState()), said(batch, seed))


def every_algorithm() -> dict[str, AlgorithmConfig]:
    """One algorithm for each choice there is, the other parts being ordinary."""
    found: dict[str, AlgorithmConfig] = {}
    for name, loss in LOSSES.items():
        found[f"loss={name}"] = AlgorithmConfig(loss=loss(**WIDE.get(name, {})), advantage=ADVANTAGES["rloo"]())
    for name, advantage in ADVANTAGES.items():
        found[f"advantage={name}"] = AlgorithmConfig(advantage=advantage())
    for name, kl in KLS.items():
        found[f"kl={name}"] = AlgorithmConfig(
            kl=kl(coefficient=0.3), loss=LOSSES["ppo"](reduction="seq-mean-token-sum")
        )
    found["correction=tis"] = AlgorithmConfig(correction=CorrectionConfig(weight="truncate"))
    found["correction=sequence"] = AlgorithmConfig(correction=CorrectionConfig(weight="truncate", level="sequence"))
    found["correction=icepop"] = AlgorithmConfig(correction=CorrectionConfig(weight="mask"))
    found["correction=opsm"] = AlgorithmConfig(correction=CorrectionConfig(opsm_delta=0.01))
    rules = (RejectionRule(over="seq_mean", low=0.7, high=1.4), RejectionRule(statistic="k3", high=0.2))
    found["correction=reject"] = AlgorithmConfig(correction=CorrectionConfig(reject=rules))
    for over in ("tokens", "rollouts"):
        found[f"normalize={over}"] = AlgorithmConfig(correction=CorrectionConfig(weight="truncate", normalize=over))
    found["correction=two"] = AlgorithmConfig(correction=CorrectionConfig(policies="two"))
    found["entropy=bonus"] = AlgorithmConfig(entropy=EntropyConfig(coefficient=0.1))
    found["entropy=top"] = AlgorithmConfig(entropy=EntropyConfig(top_share=0.3))
    found["overlong"] = AlgorithmConfig(overlong=OverlongPenalty(max_length=12, buffer=6))
    adaptive = AdaptiveKLController(target=0.05, horizon=30)
    for name in ("reverse", "in_reward"):
        found[f"adaptive={name}"] = AlgorithmConfig(kl=KLS[name](coefficient=0.3, controller=adaptive))
    for name in ("reverse", "weighted_reverse", "sequence"):
        kl = KLS[name](coefficient=0.3, off_policy=True)
        found[f"off_policy={name}"] = AlgorithmConfig(kl=kl, loss=LOSSES["ppo"](reduction="seq-mean-token-sum"))
    found["gae=white"] = AlgorithmConfig(advantage=ADVANTAGES["gae"](whiten=True, lam=0.9, bootstrap_truncated=True))
    found["decoupled=log_linear"] = AlgorithmConfig(loss=LOSSES["decoupled_ppo"](prox="log_linear"))
    found["mask_truncated"] = AlgorithmConfig(mask_truncated=True)
    found["echo"] = AlgorithmConfig(echo=0.5)
    reductions = ("token-sum", "seq-mean-token-mean", "seq-mean-token-sum")
    for how in reductions:
        found[f"reduction={how}"] = AlgorithmConfig(loss=LOSSES["ppo"](reduction=how))
    found["reduction=norm"] = AlgorithmConfig(loss=LOSSES["ppo"](reduction="seq-mean-token-sum-norm", norm_length=50))
    masked = CorrectionConfig(opsm_delta=0.01)
    by_turn = LOSSES["ppo"](unit="turn", reduction="seq-mean-token-mean")
    found["unit=turn,opsm"] = AlgorithmConfig(correction=masked, loss=by_turn, advantage=ADVANTAGES["rloo"]())
    for unit in ("ppo", "gspo"):
        loss = LOSSES[unit](unit="turn", reduction="seq-mean-token-mean")
        found[f"unit=turn,loss={unit}"] = AlgorithmConfig(loss=loss, advantage=ADVANTAGES["rloo"]())
    return found


KINDS = (
    *("loss=ppo", "loss=gspo", "loss=kl_cov", "loss=decoupled_ppo", "loss=m2po"),
    *("loss=flash_reinforce", "advantage=batch_mean", "advantage=opob"),
    *("advantage=gae", "advantage=grpo", "advantage=batch_std", "advantage=reinforce++", "advantage=pkpo"),
    *("advantage=token_baseline", "advantage=turn_baseline", "advantage=gigpo", "advantage=rae"),
    *("advantage=distillation", "kl=full", "kl=sequence", "kl=in_reward", "adaptive=in_reward"),
    *("correction=sequence", "correction=reject", "normalize=tokens", "entropy=top"),
    *("mask_truncated", "echo", "reduction=seq-mean-token-mean", "unit=turn,loss=gspo"),
)
"""One algorithm of each kind of formula: of a token, a rollout, a turn, a group or the whole batch; that picks, drops
or carries something on."""


def of_every_algorithm(test: Test) -> Test:
    """Have a law tried of `KINDS`, and in `make test` of all other algorithms too. Each is given as `name`."""
    others = [name for name in every_algorithm() if name not in KINDS]
    sweeps = {"kinds": sweep("name", KINDS)(test), "others": sweep("name", others)(test)}

    def swept(*args: Any, **kwargs: Any) -> None:
        if args or "name" in kwargs:  # one algorithm, which its caller chose
            return test(*args, **kwargs)
        return sweeps[kwargs.pop("algorithms")](**kwargs)

    asked = inspect.signature(sweeps["kinds"])
    chosen = inspect.Parameter("algorithms", inspect.Parameter.KEYWORD_ONLY)
    swept.__signature__ = asked.replace(parameters=[*asked.parameters.values(), chosen])  # type: ignore[attr-defined]
    swept.swept = test  # type: ignore[attr-defined]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(swept, name, getattr(test, name))
    tiers = ["kinds", pytest.param("others", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("algorithms", tiers)(swept)


class _Seat:
    """One rank of a `Table`."""

    def __init__(self, table: Table, place: int) -> None:
        self.table, self.place = table, place

    def all_reduce(self, values: Tensor) -> Tensor:
        return torch.stack(self.table.exchange(self.place, values)).sum(0)

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self.table.exchange(self.place, values))


class Table:
    """Ranks as threads that meet at a barrier: real collectives, in one process, that a lost rank cannot hang."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.values: list[Tensor] = [torch.empty(0)] * ranks
        self.ranks = ranks

    def exchange(self, place: int, values: Tensor) -> list[Tensor]:
        self.values[place] = values
        self.barrier.wait()
        seen = list(self.values)
        self.barrier.wait()
        return seen

    def run(self, work: Callable[[int, _Seat], EstimatedBatch]) -> list[EstimatedBatch]:
        """`work(rank, seat)` on every rank at once; the first error of any of them is raised."""
        found: list[EstimatedBatch | None] = [None] * self.ranks
        errors: list[BaseException] = []

        def sit(place: int) -> None:
            try:
                found[place] = work(place, _Seat(self, place))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=sit, args=(place,), daemon=True) for place in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
        if first:
            raise first[0]
        return [estimated for estimated in found if estimated is not None]
