"""A decision problem small enough to know everything about: each expectation is a sum over all that can happen.

Two prompts; three tokens, of which one stops; at most three actions. That makes 15 trajectories a prompt, and a tabular
softmax policy of 14 states × 3 logits. A sampled estimator is proven exact by running it on *every* group of n
trajectories at once and weighing each group by its probability: what comes out is the expectation of its gradient, to
the last digits of float64.

The batches are real ones, and as awkward as a real run's: the prompt is context and every column is NaN there; under
the second prompt each action stands in a row of its own, after a tool's answer, so that a rollout is one row under the
first prompt and up to three under the second.
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
"""The 15 trajectories: those that stop early, and those cut at the horizon."""
PREFIXES = sorted({path[:t] for path in PATHS for t in range(len(path))})
STATES = PROMPTS * len(PREFIXES)
NAN = float("nan")
EXACT = 1e-9
"""How far an expectation over everything may be from the gradient it claims to be."""


def state_of(prompt: int, prefix: tuple[int, ...]) -> int:
    return prompt * len(PREFIXES) + PREFIXES.index(prefix)


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Numbers of a standard normal distribution, the same ones for the same seed."""
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@cache
def everything() -> Batch:
    """Each of the 30 trajectories once: prompt 0's, then prompt 1's; the extra column `state` says where a token was
    chosen, for the policy's table."""
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
    """Every group of n tries at one prompt, each a group of one batch.

    With the trajectory [C, n] of each member, and in how many orders [C] it can have come about: groups that differ
    only in the order of their members are one group here, which is what keeps n = 4 small.
    """
    multisets = list(itertools.combinations_with_replacement(range(len(PATHS)), n))
    orders = [math.factorial(n) // math.prod(math.factorial(m.count(x)) for x in set(m)) for m in multisets]
    one = torch.tensor(multisets)
    members = torch.cat([one + prompt * len(PATHS) for prompt in range(PROMPTS)])
    batch = everything().select(members.flatten())
    batch = batch.replace(
        group=torch.arange(len(members)).repeat_interleave(n), rollout_id=torch.arange(members.numel())
    )
    return batch, members, torch.tensor(orders, dtype=torch.float64).repeat(PROMPTS)


def column(table: Tensor, batch: Batch) -> Tensor:
    """[S, 3] → [T]: what the table says of each token chosen; NaN in the context."""
    found = table[batch.extra["state"].tensor, batch.ids.long().clamp(max=TOKENS - 1)]
    return torch.where(batch.action, found, NAN)


def by_state(values: Tensor, batch: Batch) -> Tensor:
    """[S] → [T]: what holds of the state that each token was chosen in; NaN in the context."""
    return torch.where(batch.action, values[batch.extra["state"].tensor], NAN)


def along(table: Tensor) -> Tensor:
    """[S, 3] → [30]: the table's entries added up along each trajectory."""
    return torch.stack(
        [
            torch.stack([table[state_of(prompt, path[:t]), token] for t, token in enumerate(path)]).sum()
            for prompt, path in itertools.product(range(PROMPTS), PATHS)
        ]
    )


def logp(theta: Tensor) -> Tensor:
    """[S, 3]: the log-probs of a tabular softmax policy."""
    return theta.log_softmax(-1)


def probability(theta: Tensor) -> Tensor:
    """[30]: of each trajectory, given its prompt."""
    return along(logp(theta)).exp()


def expected(theta: Tensor, values: Tensor) -> Tensor:
    """J(θ): the mean over both prompts of the expected value of a trajectory; values [30]."""
    return (probability(theta) * values).sum() / PROMPTS


def gradient(objective: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(objective, theta)[0]


def true_gradient(theta: Tensor, values: Tensor) -> Tensor:
    """∇J."""
    theta = theta.detach().requires_grad_()
    return gradient(expected(theta, values), theta)


def visits(theta: Tensor) -> Tensor:
    """[S]: how likely each state is to be met, given its prompt."""
    chance = probability(theta).detach()
    met = torch.zeros(STATES, dtype=torch.float64)
    for i, (prompt, path) in enumerate(itertools.product(range(PROMPTS), PATHS)):
        for t in range(len(path)):
            met[state_of(prompt, path[:t])] += chance[i]
    return met


def over_states(theta: Tensor, sampler: Tensor, per_state: Callable[[Tensor], Tensor]) -> Tensor:
    """The gradient of Σ_s visits(s) · f_s(θ), f: [S, 3] → [S], with the visited states held fixed: the sampler's."""
    theta = theta.detach().requires_grad_()
    return gradient((visits(sampler) * per_state(theta)).sum() / PROMPTS, theta)


def true_value(theta: Tensor, values: Tensor) -> Tensor:
    """[S]: V^π, the expected value of the trajectories through a state."""
    chance = probability(theta).detach()
    total = torch.zeros(STATES, dtype=torch.float64)
    for i, (prompt, path) in enumerate(itertools.product(range(PROMPTS), PATHS)):
        for t in range(len(path)):
            total[state_of(prompt, path[:t])] += chance[i] * values[i]
    return total / visits(theta)


def greedy(theta: Tensor, values: Tensor) -> Tensor:
    """[30]: the value of the greedy answer to each trajectory's prompt."""
    best = []
    for prompt in range(PROMPTS):
        path: tuple[int, ...] = ()
        while path not in PATHS:
            path = (*path, int(theta[state_of(prompt, path)].argmax()))
        best.append(values[prompt * len(PATHS) + PATHS.index(path)])
    return torch.stack(best).repeat_interleave(len(PATHS))


def close(found: Tensor, wanted: Tensor, tolerance: float = EXACT) -> None:
    """Equal to the last digits, and not because both are nothing."""
    assert wanted.abs().max() > 1e-3, "the gradient asked for is zero: the check would show nothing"
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@dataclass(frozen=True)
class World:
    """A policy, a sampler, a reference, and what a trajectory earns."""

    theta: Tensor  # [S, 3] π_θ
    mu: Tensor  # [S, 3] the sampler
    reference: Tensor  # [S, 3]
    reward: Tensor  # [30]
    token_reward: Tensor | None = None  # [S, 3]
    old: Tensor | None = None  # [S, 3] π_old; π_θ where it is not given

    def batch(self, n: int) -> tuple[Batch, Tensor]:
        """All groups of n, with every column known of them, and how likely [C] the sampler makes each one."""
        batch, members, orders = groups(n)
        old = self.theta if self.old is None else self.old
        table = logp(old).detach()
        chance = orders * probability(self.mu).detach()[members].prod(1) / PROMPTS
        each = members.flatten()
        columns: dict[str, Any] = {
            "behavior_logp": column(logp(self.mu).detach(), batch),
            "old_logp": column(table, batch),
            "ref_logp": column(logp(self.reference), batch),
            "teacher_logp": column(logp(self.reference), batch),
            "sum_pi_squared": by_state((2 * table).exp().sum(-1), batch),
            "entropy": by_state(-(table.exp() * table).sum(-1), batch),
            "reward": self.reward[each],
            "greedy_reward": greedy(old, self.reward)[each],
            "role": torch.zeros(batch.num_rollouts, dtype=torch.int64),
        }
        if self.token_reward is not None:
            columns["token_reward"] = column(self.token_reward, batch)
        return batch.replace(**columns), chance

    def outputs(self, batch: Batch, theta: Tensor) -> Outputs:
        """What the policy says of the batch, differentiable in θ."""
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
        """Σ over groups of n of P(group) · ∇loss(group), where an update batch is one group.

        `columns` replace or add columns of the batch; a tensor [S] or [S, 3] is looked up token by token.
        """
        batch, chance = self.batch(n)
        batch = batch.replace(**{name: _looked_up(values, batch) for name, values in columns.items()})
        estimated = algorithm.estimate(batch, state or AlgorithmState())
        return self.weighed_gradient(algorithm, estimated.batch, chance, estimated.state)

    def weighed_gradient(
        self, algorithm: AlgorithmConfig, batch: Batch, chance: Tensor, state: AlgorithmState
    ) -> Tensor:
        """The gradient of the objective with each group counting as much as it is likely.

        All groups are one batch, whose loss divides by how many there are; the column that weighs tokens undoes that
        and puts the group's probability instead.
        """
        per_group = (chance * len(chance))[batch.group]
        per_token = per_group.repeat_interleave(batch.rollout_token_offsets.diff())
        batch = batch.replace(weight=per_token if batch.weight is None else batch.weight * per_token)
        theta = self.theta.detach().clone().requires_grad_()
        whole = Denominators.from_view(View(batch))
        return gradient(algorithm.compute_loss(batch, self.outputs(batch, theta), whole, state).loss, theta)


def _looked_up(values: Any, batch: Batch) -> Any:
    if isinstance(values, Tensor) and values.shape == (STATES,):
        return by_state(values, batch)
    if isinstance(values, Tensor) and values.shape == (STATES, TOKENS):
        return column(values, batch)
    return values


def world(**changes: Any) -> World:
    """The world most checks are made in: sampled on-policy, rewards of both signs."""
    theta = draw(1, STATES, TOKENS)
    parts = {"theta": theta, "mu": theta, "reference": draw(2, STATES, TOKENS), "reward": draw(3, PROMPTS * len(PATHS))}
    return World(**{**parts, **changes})
