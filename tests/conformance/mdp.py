"""A decision process (MDP) so small that each expectation is a sum over all trajectories.

It has two prompts, three tokens, one of which stops, and at most three actions. So each prompt has 15 trajectories, and
the policy is a tabular softmax of 14 states × 3 logits. A sampled estimator runs on *every* group of n trajectories at
once, each weighted by its probability. The result is the exact expectation of its gradient, up to rounding in float64.

The batches are as irregular as those of a run. The prompt is context, where every column is NaN. Under the second
prompt each action is in its own row, after a tool's answer. So a rollout has one row under the first prompt, and up to
three under the second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.batch import Batch
from etude.batch.columns import Column, ColumnKind

TOKENS, STOP, HORIZON, PROMPTS = 3, 2, 3, 2
PATHS = [
    path
    for length in range(1, HORIZON + 1)
    for path in itertools.product(range(TOKENS), repeat=length)
    if STOP not in path[:-1] and (path[-1] == STOP or length == HORIZON)
]
"""The 15 trajectories: those that stop early, and those that the horizon cuts off."""
PREFIXES = sorted({path[:t] for path in PATHS for t in range(len(path))})
STATES = PROMPTS * len(PREFIXES)
NAN = float("nan")
EXACT = 1e-9
"""The largest allowed difference between an exact expectation and the claimed gradient."""


def state_of(prompt: int, prefix: tuple[int, ...]) -> int:
    return prompt * len(PREFIXES) + PREFIXES.index(prefix)


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Return standard normal numbers, which are the same for the same seed."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def all_trajectories() -> Batch:
    """Return a batch of each of the 30 trajectories once: those of prompt 0, then those of prompt 1.

    The extra column `state` is the state in which a token was chosen: the row of the policy's table.
    """
    ids: list[int] = []
    action: list[bool] = []
    state: list[int] = []
    turn: list[int] = []
    lengths: list[int] = []
    unit: list[int] = []
    for prompt, path in itertools.product(range(PROMPTS), PATHS):
        rollout = len({*unit})
        for t, token in enumerate(path):
            if t == 0 or prompt == 1:
                ids, action, state, turn = [*ids, 9], [*action, False], [*state, 0], [*turn, 0]
                lengths, unit = [*lengths, 1], [*unit, rollout]
            ids, action, turn = [*ids, token], [*action, True], [*turn, t]
            state = [*state, state_of(prompt, path[:t])]
            lengths[-1] += 1
    chosen = torch.tensor(action)
    return Batch(
        offsets=torch.tensor([0, *itertools.accumulate(lengths)]),
        unit=torch.tensor(unit),
        group=torch.arange(PROMPTS * len(PATHS)),
        ids=torch.tensor(ids, dtype=torch.int32),
        action=chosen,
        observation=~chosen,
        turn=torch.tensor(turn, dtype=torch.int32),
        rollout_id=torch.arange(PROMPTS * len(PATHS)),
        extra={"state": Column(ColumnKind.TOKEN, torch.tensor(state))},
    )


@cache
def groups(n: int) -> tuple[Batch, Tensor, Tensor]:
    """Return every group of n trajectories of one prompt, as the groups of one batch.

    Also return the trajectory [C, n] of each member, and the number of orders [C] of each group. Groups that differ
    only in the order of their members are one group here, which keeps n = 4 small.
    """
    multisets = list(itertools.combinations_with_replacement(range(len(PATHS)), n))
    orders = [math.factorial(n) // math.prod(math.factorial(m.count(x)) for x in set(m)) for m in multisets]
    one = torch.tensor(multisets)
    members = torch.cat([one + prompt * len(PATHS) for prompt in range(PROMPTS)])
    batch = all_trajectories().select(members.flatten())
    batch = batch.replace(
        group=torch.arange(len(members)).repeat_interleave(n), rollout_id=torch.arange(members.numel())
    )
    return batch, members, torch.tensor(orders, dtype=torch.float64).repeat(PROMPTS)


def column(table: Tensor, batch: Batch) -> Tensor:
    """[S, 3] → [T]: look up the table's entry of each action token; NaN in the context."""
    entries = table[batch.extra["state"].tensor, batch.ids.long().clamp(max=TOKENS - 1)]
    return torch.where(batch.action, entries, NAN)


def by_state(values: Tensor, batch: Batch) -> Tensor:
    """[S] → [T]: look up the value of the state in which each token was chosen; NaN in the context."""
    return torch.where(batch.action, values[batch.extra["state"].tensor], NAN)


def sum_along_paths(table: Tensor) -> Tensor:
    """[S, 3] → [30]: add up the table's entries along each trajectory."""
    return torch.stack(
        [
            torch.stack([table[state_of(prompt, path[:t]), token] for t, token in enumerate(path)]).sum()
            for prompt, path in itertools.product(range(PROMPTS), PATHS)
        ]
    )


def logp(theta: Tensor) -> Tensor:
    """[S, 3]: return the log-probs of a tabular softmax policy."""
    return theta.log_softmax(-1)


def probability(theta: Tensor) -> Tensor:
    """[30]: return the probability of each trajectory, given its prompt."""
    return sum_along_paths(logp(theta)).exp()


def expected_value(theta: Tensor, values: Tensor) -> Tensor:
    """Return J(θ): the expected value of a trajectory, averaged over both prompts; values [30]."""
    return (probability(theta) * values).sum() / PROMPTS


def gradient(objective: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(objective, theta)[0]


def true_gradient(theta: Tensor, values: Tensor) -> Tensor:
    """Return ∇J."""
    theta = theta.detach().requires_grad_()
    return gradient(expected_value(theta, values), theta)


def visits(theta: Tensor) -> Tensor:
    """[S]: return the probability that each state is visited, given its prompt."""
    probabilities = probability(theta).detach()
    visited = torch.zeros(STATES, dtype=torch.float64)
    for i, (prompt, path) in enumerate(itertools.product(range(PROMPTS), PATHS)):
        for t in range(len(path)):
            visited[state_of(prompt, path[:t])] += probabilities[i]
    return visited


def over_states(theta: Tensor, sampler: Tensor, per_state: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of Σ_s visits(s) · f_s(θ) for f: [S, 3] → [S]. The visits are the sampler's and constant."""
    theta = theta.detach().requires_grad_()
    return gradient((visits(sampler) * per_state(theta)).sum() / PROMPTS, theta)


def true_value(theta: Tensor, values: Tensor) -> Tensor:
    """[S]: return V^π, the expected value of the trajectories through a state."""
    probabilities = probability(theta).detach()
    total = torch.zeros(STATES, dtype=torch.float64)
    for i, (prompt, path) in enumerate(itertools.product(range(PROMPTS), PATHS)):
        for t in range(len(path)):
            total[state_of(prompt, path[:t])] += probabilities[i] * values[i]
    return total / visits(theta)


def greedy(theta: Tensor, values: Tensor) -> Tensor:
    """[30]: return the value of the greedy answer to each trajectory's prompt."""
    best = []
    for prompt in range(PROMPTS):
        path: tuple[int, ...] = ()
        while path not in PATHS:
            path = (*path, int(theta[state_of(prompt, path)].argmax()))
        best.append(values[prompt * len(PATHS) + PATHS.index(path)])
    return torch.stack(best).repeat_interleave(len(PATHS))


def close(entries: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    """Check that two gradients are equal up to rounding, and that they are not zero."""
    assert expected.abs().max() > 1e-3, "the expected gradient is zero: the check would show nothing"
    torch.testing.assert_close(entries, expected, rtol=0, atol=tolerance)


@dataclass(frozen=True)
class MDP:
    """A policy, a sampler, a reference model, and the reward of each trajectory."""

    theta: Tensor  # [S, 3] π_θ
    mu: Tensor  # [S, 3] the sampler
    reference: Tensor  # [S, 3]
    reward: Tensor  # [30]
    token_reward: Tensor | None = None  # [S, 3]
    old: Tensor | None = None  # [S, 3] π_old; π_θ by default

    def batch(self, n: int) -> tuple[Batch, Tensor]:
        """Return all groups of n with all their columns, and the probability [C] that the sampler produces each."""
        batch, members, orders = groups(n)
        old = self.theta if self.old is None else self.old
        table = logp(old).detach()
        probabilities = orders * probability(self.mu).detach()[members].prod(1) / PROMPTS
        trajectories = members.flatten()
        columns: dict[str, Any] = {
            "behavior_logp": column(logp(self.mu).detach(), batch),
            "old_logp": column(table, batch),
            "ref_logp": column(logp(self.reference), batch),
            "teacher_logp": column(logp(self.reference), batch),
            "sum_pi_squared": by_state((2 * table).exp().sum(-1), batch),
            "entropy": by_state(-(table.exp() * table).sum(-1), batch),
            "reward": self.reward[trajectories],
            "greedy_reward": greedy(old, self.reward)[trajectories],
            "role": torch.zeros(batch.num_rollouts, dtype=torch.int64),
        }
        if self.token_reward is not None:
            columns["token_reward"] = column(self.token_reward, batch)
        return batch.replace(**columns), probabilities

    def outputs(self, batch: Batch, theta: Tensor) -> Outputs:
        """Return the policy's outputs for the batch, differentiable in θ."""
        table = logp(theta)
        kl = (table.exp() * (table - logp(self.reference))).sum(-1)
        return Outputs(
            logp=column(table, batch),
            entropy=by_state(-(table.exp() * table).sum(-1), batch),
            full_kl=by_state(kl, batch),
        )

    def expected_gradient(
        self, algorithm: AlgorithmConfig, n: int, state: AlgorithmState | None = None, **columns: Any
    ) -> Tensor:
        """Return Σ P(group) · ∇loss(group) over groups of n, where an update batch is one group.

        `columns` replace or add columns of the batch. A tensor [S] or [S, 3] is looked up for each token.
        """
        batch, group_probability = self.batch(n)
        batch = batch.replace(**{name: _looked_up(values, batch) for name, values in columns.items()})
        estimated = algorithm.estimate(batch, state or AlgorithmState())
        return self.weighted_gradient(algorithm, estimated.batch, group_probability, estimated.state)

    def weighted_gradient(
        self, algorithm: AlgorithmConfig, batch: Batch, group_probability: Tensor, state: AlgorithmState
    ) -> Tensor:
        """Return the gradient of the objective, with each group weighted by its probability.

        All groups are one batch, whose loss divides by their number. The column `weight` replaces that factor by the
        group's probability.
        """
        per_group = (group_probability * len(group_probability))[batch.group]
        per_token = per_group.repeat_interleave(batch.rollout_token_offsets.diff())
        batch = batch.replace(weight=per_token if batch.weight is None else batch.weight * per_token)
        theta = self.theta.detach().clone().requires_grad_()
        denominators = Denominators.from_view(View(batch))
        return gradient(algorithm.compute_loss(batch, self.outputs(batch, theta), denominators, state).loss, theta)


def _looked_up(values: Any, batch: Batch) -> Any:
    if isinstance(values, Tensor) and values.shape == (STATES,):
        return by_state(values, batch)
    if isinstance(values, Tensor) and values.shape == (STATES, TOKENS):
        return column(values, batch)
    return values


def make_mdp(**changes: Any) -> MDP:
    """Return the MDP of most checks: sampled on-policy, with rewards of both signs."""
    theta = draw(1, STATES, TOKENS)
    parts = {"theta": theta, "mu": theta, "reference": draw(2, STATES, TOKENS), "reward": draw(3, PROMPTS * len(PATHS))}
    return MDP(**{**parts, **changes})
