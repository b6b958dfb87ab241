"""Small models, batches with shared prompts, and objectives, for the tests of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Loss, LossValue, Outputs, View
from etude.batch import Batch
from etude.models import Model, create, tiny_config
from etude.records import Rollout, Sample
from etude.train import Learner, TrainConfig
from etude.train.optim import PRECISIONS

VOCABULARY = 61


def model(precision: str = "fp64", family: str = "qwen3", seed: int = 0, **more: Any) -> Model:
    sizes = {"layers": 2, "hidden": 32, **more}
    return create(tiny_config(VOCABULARY, family=family, **sizes), seed=seed, dtype=PRECISIONS[precision])


def learner(
    precision: str = "fp64", *, family: str = "qwen3", seed: int = 0, steps: int = 10, **options: object
) -> Learner:
    """Return a learner of a new model. The learning rate is high enough to see its effect."""
    settings = {"learning_rate": 1e-2, **options}
    return Learner(model(precision, family, seed), TrainConfig(precision=precision, **settings), steps=steps)


def rollouts(seed: int = 0, groups: int = 3, size: int = 4, *, turns: int = 2, longest: int = 7) -> Batch:
    """Return groups that share a prompt. Each rollout is one row, with tool output between turns; one has no row."""
    rng = np.random.default_rng(seed)
    samples = list[Sample]()
    records = list[Rollout]()
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(3, 9)))
        for _ in range(size):
            ids, action, turn = [prompt], [np.zeros(len(prompt), bool)], [np.zeros(len(prompt), int)]
            for index in range(int(rng.integers(1, turns + 1))):
                for acts in (True, False) if index == 0 else (True,):
                    count = int(rng.integers(1, longest))
                    ids.append(rng.integers(0, VOCABULARY, count))
                    action.append(np.full(count, acts))
                    turn.append(np.full(count, index))
            row = np.concatenate(ids)
            rollout = len(records)
            records.append(Rollout(rollout, group, group, float(rng.normal())))
            if (group, len(records)) != (1, size + 1):
                samples.append(
                    Sample(
                        row.astype(np.int32),
                        np.concatenate(action),
                        -rng.gamma(2, 1, len(row)).astype(np.float32),
                        np.zeros(len(row), np.int32),
                        np.concatenate(turn).astype(np.int32),
                        rollout,
                    )
                )
    batch = Batch.from_records(samples, records)
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[batch.offsets[:-1]] = True
    return batch.replace(observation=~batch.action & ~first)


def answered(*groups: tuple[int, Sequence[int]]) -> Batch:
    """Return groups of these lengths: of the prompt, and of each answer to it."""
    rng, samples, records = np.random.default_rng(0), list[Sample](), list[Rollout]()
    for group, (prompt, answers) in enumerate(groups):
        prompt_ids = rng.integers(0, VOCABULARY, prompt)
        for answer in answers:
            ids = np.concatenate([prompt_ids, rng.integers(0, VOCABULARY, answer)]).astype(np.int32)
            zeros, rollout = np.zeros(len(ids), np.int32), len(records)
            logp = np.full(len(ids), -1, np.float32)
            samples.append(Sample(ids, np.arange(len(ids)) >= prompt, logp, zeros, zeros, rollout))
            records.append(Rollout(rollout, group, group, float(rng.normal())))
    return Batch.from_records(samples, records)


@dataclass
class Improve:
    """An algorithm as an objective."""

    algorithm: AlgorithmConfig

    @property
    def split_unit(self) -> Literal["rollout", "group"]:
        return self.algorithm.loss.split_unit

    def required_columns(self) -> frozenset[str]:
        return self.algorithm.required_columns()

    def forward_outputs(self) -> frozenset[str]:
        return self.algorithm.forward_outputs()

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        return self.algorithm.compute_loss(batch, outputs, whole, AlgorithmState())


@dataclass
class Imitate:
    """A supervised loss as an objective. It records the micro-batches that it receives."""

    wrapped: Loss
    split_unit: Literal["rollout", "group"] = "rollout"
    seen: tuple[Batch, ...] = ()

    def required_columns(self) -> frozenset[str]:
        return self.wrapped.required_columns()

    def forward_outputs(self) -> frozenset[str]:
        return self.wrapped.forward_outputs()

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        self.seen += (batch,)
        return self.wrapped(View(batch, outputs), whole)


def ready(trainer: Learner, algorithm: AlgorithmConfig, batch: Batch) -> Batch:
    """Return the batch with columns and estimates. It is off-policy enough for ratios to matter."""
    batch = trainer.annotate(batch, frozenset({"old_logp"}))
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    old_logp = batch.require("old_logp")
    batch = batch.replace(old_logp=old_logp + 0.1 * noise.to(old_logp))
    return algorithm.estimate(batch, AlgorithmState()).batch


def gradient(trainer: Learner) -> dict[str, Tensor]:
    """Return the gradient of the first update without clipping, from AdamW's first moment."""
    return {name: moment / (1 - 0.9) for name, moment in state_tensors(trainer, "exp_avg").items()}


def state_tensors(trainer: Learner, kind: str) -> dict[str, Tensor]:
    """Return the tensors of one kind of a learner's state, such as `weights`, by weight."""
    tensors = trainer.state()[kind]
    assert isinstance(tensors, Mapping)
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def weights(trainer: Learner) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.weights()}
