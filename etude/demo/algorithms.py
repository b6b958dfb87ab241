"""The whole loop on one screen: collect, score, estimate, update, publish; and the run that configures it.

A table of logits is trained on a world of thirty answers, by any advantage, loss, KL and correction that Etude has. All
of it is real: groups are sampled, advantages estimated from them, gradients taken on micro-batches, steps made by Adam.
Only the judge is better than in life: J(θ), the expected reward, is a sum over all answers and therefore exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field, model_validator

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, View
from etude.batch import Batch
from etude.demo.enumerated_mdp import WANTED, EnumeratedMDP
from etude.demo.tabular import TabularPolicy
from etude.errors import ConfigError
from etude.observe import Last, Mean, Metrics, ObserveConfig, RunLog

__all__ = ["DemoRun", "Progress", "train"]


class DemoRun(AlgorithmConfig):
    """An algorithm, and a tabular policy to train by it."""

    seed: int = Field(0, ge=0, lt=2**63, description="what all chance in the run is derived from")
    steps: int = Field(32, ge=1, description="how often rollouts are collected and trained on")
    groups: int = Field(8, ge=1, description="groups a step; the prompts take turns")
    group_size: int = Field(8, ge=1, description="rollouts in a group, all of one prompt")
    mini_batches: int = Field(
        6, ge=1, description="optimizer steps a step; from the second on, the policy is off its data"
    )
    micro_batches: int = Field(2, ge=1, description="parts that an update is computed in; they change nothing")
    learning_rate: float = Field(0.1, gt=0, description="of Adam")
    lag: int = Field(0, ge=0, description="how many steps older than the trainer's the sampler's policy is")
    noise: float = Field(0.0, ge=0, description="standard deviation of an error in the sampler's logits")
    observe: ObserveConfig = Field(ObserveConfig(), description="what is shown, and where numbers go")
    directory: Path = Field(Path("runs/demo"), description="the folder in which each run makes a folder of its own")

    @model_validator(mode="after")
    def _rollouts_suffice(self) -> DemoRun:
        rollouts, parts = self.groups * self.group_size, self.mini_batches * self.micro_batches
        if rollouts < parts:
            raise ConfigError(
                f"A step has {rollouts} rollouts, fewer than `mini_batches` × `micro_batches` = {parts} parts. "
                f"Raise `groups` or `group_size`, or lower `mini_batches` or `micro_batches`."
            )
        return self


@dataclass(frozen=True)
class Progress:
    """How far a run is: after `step` steps the policy expects the reward `expected`."""

    step: int
    expected_reward: float
    optimum: float


def train(run: DemoRun, log: RunLog) -> Iterator[Progress]:
    """Collect, score, estimate, update, publish, until the steps are done."""
    policy = TabularPolicy(EnumeratedMDP(), run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    optimizer = torch.optim.Adam([policy.table], lr=run.learning_rate)
    published, state = [policy.logp().detach()], AlgorithmState()
    optimum = policy.mdp.optimum
    yield Progress(0, policy.expected_reward(), optimum)
    for step in range(1, run.steps + 1):
        with log.step(step) as recorder:
            batch = collect(run, policy, published, generator)
            batch = policy.annotate(batch, run.required_columns())
            estimate = run.estimate(batch, state, seed=run.seed, step=step)
            recorder.add(estimate.metrics)
            for part in estimate.batch.split(run.mini_batches, by=run.loss.split_unit):
                recorder.add(update(run, policy, optimizer, part, estimate.state))
                _refuse_nonfinite(run, policy, step)
            state = estimate.next_state
            published.append(policy.logp().detach())
            recorder.add(_step_metrics(batch, policy, optimum))
        yield Progress(step, policy.expected_reward(), optimum)


def collect(run: DemoRun, policy: TabularPolicy, published: list[torch.Tensor], generator: torch.Generator) -> Batch:
    """Groups of rollouts, sampled and scored. The sampler may be some versions old, and compute a little wrongly."""
    version = max(len(published) - 1 - run.lag, 0)
    error = torch.randn(published[0].shape, dtype=torch.float64, generator=generator)
    sampler = (published[version] + run.noise * error).log_softmax(-1)
    group = torch.arange(run.groups).repeat_interleave(run.group_size)
    batch = policy.sample(sampler, group % len(WANTED), generator)
    versions = torch.full((batch.num_tokens,), version, dtype=torch.int32)
    first = (len(published) - 1) * batch.num_rollouts
    return batch.replace(group=group, version=versions, rollout_id=torch.arange(first, first + batch.num_rollouts))


def update(
    run: DemoRun, policy: TabularPolicy, optimizer: torch.optim.Optimizer, batch: Batch, state: AlgorithmState
) -> Metrics:
    """One optimizer step: the gradient of the update batch, added up over its micro-batches."""
    whole, metrics = Denominators.from_view(View(batch)), Metrics()
    optimizer.zero_grad()
    for part in batch.split(run.micro_batches, by=run.loss.split_unit):
        value = run.compute_loss(part, policy.forward(part, run.forward_outputs()), whole, state)
        value.loss.backward()  # type: ignore[no-untyped-call]
        metrics.merge(value.metrics)
        metrics.add("loss", Mean.over(value.loss.detach(), len(part.group) / len(batch.group)))
    assert policy.table.grad is not None
    metrics.add("gradient", Mean.of(policy.table.grad.norm()))
    optimizer.step()
    return metrics


def _refuse_nonfinite(run: DemoRun, policy: TabularPolicy, step: int) -> None:
    """Nothing can be sampled from logits that have left the numbers."""
    if not bool(policy.logp().detach().isfinite().all()):
        raise ConfigError(
            f"At step {step} the policy's logits grew beyond what a number can hold. Lower `learning_rate`, which is "
            f"{run.learning_rate:g}, or the coefficients of what is added to the loss."
        )


def _step_metrics(batch: Batch, policy: TabularPolicy, optimum: float) -> Metrics:
    earned = batch.require("metric")
    return Metrics(
        {
            "expected_reward": Last.of(policy.expected_reward()),
            "optimum": Last.of(optimum),
            "reward": Mean.over(earned.sum(), len(earned)),
        }
    )
