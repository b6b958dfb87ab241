"""The smallest language model: a table with one row of three logits for every state of an `EnumeratedMDP`.

It has the methods of a large model's engine (sample, annotate, forward). All columns of the algorithms are exact:
values are V^π itself, entropies and divergences are sums over the vocabulary of three.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from etude.algorithms import Outputs
from etude.algorithms.logits import topk_logp_with_tail
from etude.batch import Batch
from etude.demo.tabular.enumerated_mdp import TEACHER_TEMPERATURE, TOKENS, WANTED, EnumeratedMDP
from etude.errors import ConfigError

TEACHER_TOP = 2
"""The number of the teacher's tokens in top-k distillation, of three."""


class TabularPolicy:
    """A softmax table [N, 3] in float64, with its reference (the first table) and a teacher that knows the answers."""

    def __init__(self, mdp: EnumeratedMDP, seed: int) -> None:
        start = 0.1 * torch.randn(
            mdp.states, len(TOKENS), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        self.mdp = mdp
        self.table = start.clone().requires_grad_()
        self.reference = start.log_softmax(-1)
        self.teacher = (mdp.best_return / TEACHER_TEMPERATURE).log_softmax(-1)

    def logp(self) -> Tensor:
        """Return [N, 3]: log π_θ of every token at every state, with gradient."""
        return self.table.log_softmax(-1)

    def expected_reward(self) -> float:
        """Return the exact J(θ)."""
        return self.mdp.expected_reward(self.logp().detach())

    def sample(self, logp: Tensor, prompts: Tensor, generator: torch.Generator) -> Batch:
        """Sample one rollout for each prompt [n] from log-probs [N, 3], which are recorded as μ."""
        probabilities = logp.exp()
        episodes = self.mdp.run_episodes(
            prompts, lambda s: torch.multinomial(probabilities[s], 1, generator=generator)[:, 0]
        )
        batch = self.mdp.all_episodes.select(episodes)
        return batch.replace(behavior_logp=_token_logp(logp, batch))

    def annotate(self, batch: Batch, needs: frozenset[str]) -> Batch:
        """Return the batch with the columns that an algorithm needs, of the policy, the reference and the teacher."""
        logp = self.logp().detach()
        state = batch.require("state")
        top = self.teacher.topk(TEACHER_TOP, dim=-1)
        columns: dict[str, Callable[[], Tensor]] = {
            "old_logp": lambda: _token_logp(logp, batch),
            "ref_logp": lambda: _token_logp(self.reference, batch),
            "teacher_logp": lambda: _token_logp(self.teacher, batch),
            "teacher_topk_ids": lambda: top.indices[state],
            "teacher_topk_logp": lambda: top.values[state],
            "entropy": lambda: _entropy(logp)[state],
            "sum_pi_squared": lambda: (2 * logp).exp().sum(-1)[state],
            "value": lambda: self.mdp.values(logp)[state],
            "greedy_reward": lambda: self._greedy(logp)[batch.require("role")],
        }
        return batch.replace(**{name: columns[name]() for name in sorted(needs & columns.keys())})

    def forward(self, batch: Batch, names: frozenset[str]) -> Outputs:
        """Return the outputs of a forward pass for a loss, with gradient."""
        logp, state = self.logp(), batch.require("state")
        outputs: dict[str, Callable[[], Tensor]] = {
            "logp": lambda: _token_logp(logp, batch),
            "entropy": lambda: _entropy(logp)[state],
            "full_kl": lambda: (logp.exp() * (logp - self.reference)).sum(-1)[state],
            "topk_logp": lambda: topk_logp_with_tail(logp[state], batch.require("teacher_topk_ids")),
        }
        unknown = sorted(names - outputs.keys())
        if unknown:
            raise ConfigError(
                f"The loss needs the model's `{unknown[0]}`, which a table of logits does not have; it has "
                f"{', '.join(outputs)}. Choose another loss for this demonstration."
            )
        return Outputs(**{name: outputs[name]() for name in names})

    def _greedy(self, logp: Tensor) -> Tensor:
        """Return [P]: the reward of the greedy answer to each prompt."""
        episodes = self.mdp.run_episodes(torch.arange(len(WANTED)), lambda state: logp[state].argmax(-1))
        return self.mdp.rewards[episodes]


def _token_logp(logp: Tensor, batch: Batch) -> Tensor:
    """Return [T], the log-prob of each token of a batch, from logp [N, 3]."""
    return logp[batch.require("state"), batch.ids.long()]


def _entropy(logp: Tensor) -> Tensor:
    return -(logp.exp() * logp).sum(-1)
