"""The whole RL loop on one screen: collect, score, estimate, update, publish; and its options.

A table of logits is trained on a problem with thirty answers, with any advantage, loss, KL term and correction of
Etude. The loop is a real one: it samples groups, estimates advantages, computes gradients on micro-batches, and steps
Adam. Only the evaluation is exact, unlike in real training: the expected reward J(θ) is a sum over all answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field, model_validator

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, View
from etude.batch import Batch
from etude.demo.tabular.enumerated_mdp import WANTED, EnumeratedMDP
from etude.demo.tabular.policy import TabularPolicy
from etude.errors import ConfigError
from etude.observe import Last, Mean, Metrics, ObserveConfig, RunLog


class DemoRun(AlgorithmConfig):
    """The options of an algorithm, and of a tabular policy to train with it."""

    seed: int = Field(0, ge=0, lt=2**63, description="seed of all random numbers of the run")
    steps: int = Field(32, ge=1, description="training steps; each collects rollouts and trains on them")
    groups: int = Field(
        8, ge=1, description="groups of a step, over the prompts in turn; more give a less noisy gradient"
    )
    group_size: int = Field(8, ge=1, description="rollouts of a group, all of one prompt; more give better baselines")
    mini_batches: int = Field(
        6, ge=1, description="optimizer steps per training step; from the second on the data is off-policy"
    )
    micro_batches: int = Field(2, ge=1, description="micro-batches of an update; the number does not change the result")
    learning_rate: float = Field(0.1, gt=0, description="learning rate of Adam; larger learns faster and less stably")
    lag: int = Field(
        0,
        ge=0,
        description="steps by which the sampling policy is older than the trained one; larger is more off-policy",
    )
    noise: float = Field(
        0.0, ge=0, description="standard deviation of noise in the sampler's logits; larger is more off-policy"
    )
    observe: ObserveConfig = Field(ObserveConfig(), description="console, log level and metric trackers")
    directory: Path = Field(Path("runs/demo"), description="directory in which each run creates its own directory")

    @model_validator(mode="after")
    def _rollouts_suffice(self) -> DemoRun:
        rollouts, parts = self.groups * self.group_size, self.mini_batches * self.micro_batches
        if rollouts < parts:
            raise ConfigError(
                f"A step has {rollouts} rollouts, fewer than `mini_batches` × `micro_batches` = {parts} parts. "
                f"Raise `groups` or `group_size`, or lower `mini_batches` or `micro_batches`."
            )
        if self.observe.rollouts:
            raise ConfigError("`observe.rollouts` shows text, and a table of logits writes none. Leave it out.")
        return self


@dataclass(frozen=True)
class Progress:
    """The progress of a run: the exact expected reward after a step."""

    step: int
    expected_reward: float
    optimum: float


def train(run: DemoRun, log: RunLog) -> Iterator[Progress]:
    """Run all steps: collect, score, estimate, update, publish."""
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
    """Sample and score groups of rollouts. The sampler may be older (`lag`) and inexact (`noise`)."""
    version = max(len(published) - 1 - run.lag, 0)
    error = torch.randn(published[0].shape, dtype=torch.float64, generator=generator)
    sampler = (published[version] + run.noise * error).log_softmax(-1)
    group = torch.arange(run.groups).repeat_interleave(run.group_size)
    batch = policy.sample(sampler, group % len(WANTED), generator)
    versions = torch.full((batch.num_tokens,), version, dtype=torch.int32)
    trainer = len(published) - 1
    ids = torch.arange(batch.num_rollouts) + trainer * batch.num_rollouts
    trainers = torch.full((batch.num_rollouts,), trainer)
    return batch.replace(group=group, version=versions, trainer_version=trainers, rollout_id=ids)


def update(
    run: DemoRun, policy: TabularPolicy, optimizer: torch.optim.Optimizer, batch: Batch, state: AlgorithmState
) -> Metrics:
    """Take one optimizer step, with the gradient of the update batch accumulated over its micro-batches."""
    whole, metrics = Denominators.from_view(View(batch)), Metrics()
    optimizer.zero_grad()
    for part in batch.split(run.micro_batches, by=run.loss.split_unit):
        value = run.compute_loss(part, policy.forward(part, run.forward_outputs()), whole, state)
        value.loss.backward()  # type: ignore[no-untyped-call]
        metrics.merge(value.metrics)
        metrics.add("loss", Mean.over(value.loss.detach(), len(part.group) / len(batch.group)))
    assert policy.table.grad is not None
    metrics.add("gradient", Mean.of(policy.table.grad.norm()))
    scale = run.correction.step_scale(View(batch))
    for group in optimizer.param_groups:
        group["lr"] = scale * run.learning_rate
    optimizer.step()
    return metrics


def _refuse_nonfinite(run: DemoRun, policy: TabularPolicy, step: int) -> None:
    """Refuse logits that are not finite, because no answer can be sampled from them."""
    if not bool(policy.logp().detach().isfinite().all()):
        raise ConfigError(
            f"At step {step} the policy's logits are not finite. Lower `learning_rate`, which is "
            f"{run.learning_rate:g}, or the coefficients of the terms that are added to the loss."
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
