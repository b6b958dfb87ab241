"""Helpers for the property tests of the laws: every algorithm, and its gradient.

A gradient here is the derivative of the loss by the model's outputs for each token (log-prob, entropy, value …). The
batches are off-policy, with NaN at every entry that has no meaning.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
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

few_examples = settings(max_examples=2)
"""Two random batches for each algorithm. There are seventy algorithms, so a law is tried 140 times."""

LENGTHS = (4, 2, 3, 5)
"""Group sizes of the fixture. No group has one rollout, so every estimator accepts it."""


WIDE: dict[str, dict[str, float]] = {"flash_reinforce": {"threshold": 0.08}}
"""Limits of losses whose default would drop every rollout of the fixture."""


def fixture(seed: int = 0, sizes: Sequence[int] = LENGTHS, **options: object) -> Batch:
    """Return an off-policy batch that every algorithm accepts.

    The plug-in column `where` has the index of each token. With `idle`, one rollout has no action token.
    """
    return _fixture(seed, tuple(sizes), **options)


@cache  # all algorithms are tried on the same few batches, which no test changes
def _fixture(seed: int, sizes: tuple[int, ...], **options: object) -> Batch:
    batch = random_batch(seed, sizes, **options)  # type: ignore[arg-type]
    if options.get("idle", True):
        is_idle = torch.arange(batch.num_rollouts) == seed % batch.num_rollouts
        batch = batch.replace(
            action=batch.action & ~torch.repeat_interleave(is_idle, torch.diff(batch.rollout_token_offsets))
        )
    return batch.replace(
        reward=batch.require("reward").abs(),  # maxrl refuses negative rewards
        token_reward=torch.where(batch.action, batch.require("token_reward").abs(), torch.nan),
        anchor=torch.where(batch.action, batch.ids.long() % 3, 0),
        final_value=torch.linspace(-1, 1, batch.num_rollouts, dtype=torch.float64),
        trainer_version=torch.full((batch.num_rollouts,), 6),
        extra={"where": Column(ColumnKind.TOKEN, torch.arange(batch.num_tokens))},
    )


def model_outputs(batch: Batch, seed: int = 1, drift: float = 0.4) -> dict[str, Tensor]:
    """Return random outputs of a model for the batch, as leaves with gradients.

    They are NaN at context tokens, except the log-probs of observations.
    """
    rng = torch.Generator().manual_seed(seed)

    def noisy(values: Tensor, scale: float) -> Tensor:
        moved = values + scale * torch.randn(values.shape, generator=rng, dtype=values.dtype)
        return torch.where(batch.action, moved, torch.nan)

    logp = noisy(batch.require("old_logp"), drift)
    observed_logp = -torch.rand(batch.num_tokens, generator=rng, dtype=logp.dtype)
    return {
        "logp": torch.where(observed(batch), observed_logp, logp).requires_grad_(),
        "entropy": noisy(batch.require("entropy"), 0.1).requires_grad_(),
        "full_kl": noisy(batch.require("entropy"), 0.1).requires_grad_(),
    }


def observed(batch: Batch) -> Tensor:
    """[T] bool: return the observed tokens, which ECHO trains on."""
    return batch.require("observation") & ~batch.action


def trained_tokens(algorithm: AlgorithmConfig, batch: Batch) -> Tensor:
    """[T] bool: return the tokens that may have a gradient: the actions, and with ECHO the observations."""
    return batch.action | observed(batch) if algorithm.echo else batch.action


def outputs_of(leaves: dict[str, Tensor], part: Batch) -> Outputs:
    """Return the outputs of the forward pass over a part of the batch."""
    where = part.extra["where"].tensor
    return Outputs(**{name: leaf[where] for name, leaf in leaves.items()})


@dataclass(frozen=True)
class LossAndGradient:
    """A loss, and its gradient by each output of the model."""

    loss: Tensor
    grads: dict[str, Tensor]

    def close_to(self, other: LossAndGradient, tolerance: float) -> bool:
        """Return True if loss and gradients agree, relative to the size of the largest gradient."""
        scale = 1 + max(float(g.abs().max()) for g in other.grads.values())
        losses_agree = torch.allclose(self.loss, other.loss, rtol=tolerance, atol=tolerance)
        return losses_agree and all(
            torch.allclose(self.grads[name], g, rtol=tolerance, atol=tolerance * scale)
            for name, g in other.grads.items()
        )


def gradient(
    algorithm: AlgorithmConfig,
    ready: EstimatedBatch,
    leaves: dict[str, Tensor],
    parts: Sequence[Sequence[int]] | None = None,
) -> LossAndGradient:
    """Return the loss of an update batch and its gradient, over these micro-batches of rollouts (default: one)."""
    batch = ready.batch
    denominators = Denominators.from_view(View(batch))
    pieces = [batch] if parts is None else [batch.select(list(part)) for part in parts]
    fresh_leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in leaves.items()}
    losses = [
        algorithm.compute_loss(piece, outputs_of(fresh_leaves, piece), denominators, ready.state).loss
        for piece in pieces
    ]
    total = torch.stack(losses).sum()
    if total.requires_grad:
        total.backward()
    grads = {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in fresh_leaves.items()}
    return LossAndGradient(total.detach(), grads)


def estimate_and_differentiate(algorithm: AlgorithmConfig, batch: Batch, seed: int = 1) -> LossAndGradient:
    """Estimate over the whole batch, then compute the loss and gradient in one micro-batch."""
    return gradient(algorithm, algorithm.estimate(batch, AlgorithmState()), model_outputs(batch, seed))


def every_algorithm() -> dict[str, AlgorithmConfig]:
    """Return one algorithm for each choice, with ordinary other parts."""
    algorithms: dict[str, AlgorithmConfig] = {}
    for name, loss in LOSSES.items():
        algorithms[f"loss={name}"] = AlgorithmConfig(loss=loss(**WIDE.get(name, {})), advantage=ADVANTAGES["rloo"]())
    for name, advantage in ADVANTAGES.items():
        algorithms[f"advantage={name}"] = AlgorithmConfig(advantage=advantage())
    for name, kl in KLS.items():
        algorithms[f"kl={name}"] = AlgorithmConfig(
            kl=kl(coefficient=0.3), loss=LOSSES["ppo"](reduction="seq-mean-token-sum")
        )
    algorithms["correction=tis"] = AlgorithmConfig(correction=CorrectionConfig(weight="truncate"))
    algorithms["correction=sequence"] = AlgorithmConfig(
        correction=CorrectionConfig(weight="truncate", level="sequence")
    )
    algorithms["correction=icepop"] = AlgorithmConfig(correction=CorrectionConfig(weight="mask"))
    algorithms["correction=opsm"] = AlgorithmConfig(correction=CorrectionConfig(opsm_delta=0.01))
    rules = (RejectionRule(over="seq_mean", low=0.7, high=1.4), RejectionRule(statistic="k3", high=0.2))
    algorithms["correction=reject"] = AlgorithmConfig(correction=CorrectionConfig(reject=rules))
    for over in ("tokens", "rollouts"):
        algorithms[f"normalize={over}"] = AlgorithmConfig(
            correction=CorrectionConfig(weight="truncate", normalize=over)
        )
    algorithms["correction=two"] = AlgorithmConfig(correction=CorrectionConfig(policies="two"))
    algorithms["entropy=bonus"] = AlgorithmConfig(entropy=EntropyConfig(coefficient=0.1))
    algorithms["entropy=top"] = AlgorithmConfig(entropy=EntropyConfig(top_share=0.3))
    algorithms["overlong"] = AlgorithmConfig(overlong=OverlongPenalty(max_length=12, buffer=6))
    adaptive = AdaptiveKLController(target=0.05, horizon=30)
    for name in ("reverse", "in_reward"):
        algorithms[f"adaptive={name}"] = AlgorithmConfig(kl=KLS[name](coefficient=0.3, controller=adaptive))
    for name in ("reverse", "weighted_reverse", "sequence"):
        term = KLS[name](coefficient=0.3, off_policy=True)
        algorithms[f"off_policy={name}"] = AlgorithmConfig(kl=term, loss=LOSSES["ppo"](reduction="seq-mean-token-sum"))
    algorithms["gae=white"] = AlgorithmConfig(
        advantage=ADVANTAGES["gae"](whiten=True, lam=0.9, bootstrap_truncated=True)
    )
    algorithms["decoupled=log_linear"] = AlgorithmConfig(loss=LOSSES["decoupled_ppo"](prox="log_linear"))
    algorithms["mask_truncated"] = AlgorithmConfig(mask_truncated=True)
    algorithms["echo"] = AlgorithmConfig(echo=0.5)
    reductions = ("token-sum", "seq-mean-token-mean", "seq-mean-token-sum")
    for how in reductions:
        algorithms[f"reduction={how}"] = AlgorithmConfig(loss=LOSSES["ppo"](reduction=how))
    algorithms["reduction=norm"] = AlgorithmConfig(
        loss=LOSSES["ppo"](reduction="seq-mean-token-sum-norm", norm_length=50)
    )
    masked = CorrectionConfig(opsm_delta=0.01)
    by_turn = LOSSES["ppo"](unit="turn", reduction="seq-mean-token-mean")
    algorithms["unit=turn,opsm"] = AlgorithmConfig(correction=masked, loss=by_turn, advantage=ADVANTAGES["rloo"]())
    for unit in ("ppo", "gspo"):
        of_turns = LOSSES[unit](unit="turn", reduction="seq-mean-token-mean")
        algorithms[f"unit=turn,loss={unit}"] = AlgorithmConfig(loss=of_turns, advantage=ADVANTAGES["rloo"]())
    return algorithms


KINDS = (
    *("loss=ppo", "loss=gspo", "loss=kl_cov", "loss=decoupled_ppo", "loss=m2po"),
    *("loss=flash_reinforce", "advantage=batch_mean", "advantage=opob"),
    *("advantage=gae", "advantage=grpo", "advantage=batch_std", "advantage=reinforce++", "advantage=pkpo"),
    *("advantage=token_baseline", "advantage=turn_baseline", "advantage=gigpo", "advantage=rae"),
    *("advantage=distillation", "kl=full", "kl=sequence", "kl=in_reward", "adaptive=in_reward"),
    *("correction=sequence", "correction=reject", "normalize=tokens", "entropy=top"),
    *("mask_truncated", "echo", "reduction=seq-mean-token-mean", "unit=turn,loss=gspo"),
)
"""One algorithm of each kind of formula: over tokens, rollouts, turns, groups or the whole batch, and formulas that
pick tokens, drop tokens or keep a state."""


def of_every_algorithm(test: Test) -> Test:
    """Run a law for `KINDS`, and in `make test` for all other algorithms too. The law gets each as `name`."""
    others = [name for name in every_algorithm() if name not in KINDS]
    sweeps = {"kinds": sweep("name", KINDS)(test), "others": sweep("name", others)(test)}

    def run_tier(*args: Any, **kwargs: Any) -> None:
        if args or "name" in kwargs:  # one algorithm, chosen by the caller
            return test(*args, **kwargs)
        return sweeps[kwargs.pop("algorithms")](**kwargs)

    signature = inspect.signature(sweeps["kinds"])
    chosen = inspect.Parameter("algorithms", inspect.Parameter.KEYWORD_ONLY)
    run_tier.__signature__ = signature.replace(parameters=[*signature.parameters.values(), chosen])  # type: ignore[attr-defined]
    run_tier.swept = test  # type: ignore[attr-defined]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(run_tier, name, getattr(test, name))
    tiers = ["kinds", pytest.param("others", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("algorithms", tiers)(run_tier)
