"""The observer of a replayed step: the part of each token in the loss, and the gradient of the first update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Outputs
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.view import View, flatnonzero
from etude.batch import Batch, Column, ColumnKind
from etude.observe import Metrics
from etude.tools.replay.files import STATES

TRAINED, CLIPPED, MASKED, LEVEL = range(len(STATES))
TOKEN_OF_STEP = "_token_of_step"
"""The index of a token in the step's batch."""


class StepObserver:
    """Sees the updates of one step.

    The weight of a token is −∂loss/∂log π of that token, summed over the step's updates: how hard the step pushes the
    token's log-prob up. It is computed beside the update, from the same numbers, so the update stays as it was.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self._policy = algorithm.model_copy(update={"kl": None, "entropy": EntropyConfig(), "echo": 0.0})
        self.gradient: dict[str, Tensor] = {}
        """The gradient of the first update, before it is clipped."""
        self.updates = 0

    def begin(self, batch: Batch, start: Batch) -> Batch:
        """Return the estimated batch of the step, in which each token has an index.

        start: the same batch with the log-prob and the entropy of each token at the weights that the step begins with.
        """
        self.batch = batch
        self._start = start
        self._logp, self._old_logp = torch.full((2, batch.num_tokens), torch.nan)
        self._weight = torch.zeros(batch.num_tokens, dtype=torch.float64)
        self._state = torch.full((batch.num_tokens,), LEVEL, dtype=torch.uint8)
        index = Column(ColumnKind.TOKEN, torch.arange(batch.num_tokens, device=batch.device))
        return batch.replace(extra={**batch.extra, TOKEN_OF_STEP: index})

    @property
    def action_index(self) -> Tensor:
        """[A]: the indices of the action tokens in the step's batch."""
        return flatnonzero(self.batch.action.cpu())

    @property
    def weight(self) -> Tensor:
        """[A]: the weight of each action token."""
        return self._weight[self.action_index]

    @property
    def state(self) -> Tensor:
        """[A]: the state of each action token. It is masked if any update masked it, else clipped if any did."""
        return self._state[self.action_index]

    def signals(self) -> dict[str, Tensor]:
        """Return columns [A] of the action tokens, without those that the step does not have."""
        return self._of_actions({"advantage": self.batch.advantage, "logp": self._logp, "old_logp": self._old_logp})

    def start_signals(self) -> dict[str, Tensor]:
        """Return columns [A] of the action tokens at the weights that the step began with."""
        start = self._start
        return self._of_actions({"start_logp": start.old_logp, "entropy": start.entropy, "ref_logp": start.ref_logp})

    def _of_actions(self, columns: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        index = self.action_index
        return {name: column.cpu()[index].float() for name, column in columns.items() if column is not None}

    def see_loss(self, batch: Batch, outputs: Outputs, whole: Denominators, state: AlgorithmState) -> None:
        """Add the weights of a micro-batch's tokens."""
        weight = _weights(self._algorithm, batch, outputs, whole, state)
        policy = weight if self._policy == self._algorithm else _weights(self._policy, batch, outputs, whole, state)
        at = batch.extra[TOKEN_OF_STEP].tensor.cpu()
        self._weight.index_add_(0, at, weight)
        for seen, column in ((self._logp, outputs.logp), (self._old_logp, batch.old_logp)):
            if column is not None:
                seen[at] = column.detach().cpu().to(seen)
        found = torch.full_like(at, CLIPPED, dtype=torch.uint8)
        found[policy != 0] = TRAINED
        if batch.advantage is not None:
            found[(policy == 0) & (batch.advantage.cpu() == 0)] = LEVEL
        if batch.weight is not None:
            found[batch.weight.cpu() == 0] = MASKED
        kept = self._algorithm.apply_sequence_mask(View(batch, outputs), Metrics()).batch.keep
        if kept is not None:
            found[~kept.cpu()] = MASKED
        before = self._state[at]
        self._state[at] = torch.where((found < before) & (before != LEVEL), before, found)

    def see_gradient(self, gradient: Mapping[str, Tensor], factor: float) -> None:
        """Keep the gradient of the first update."""
        self.updates += 1
        if self.updates == 1:
            self.gradient = {name: (value.detach().cpu() * factor) for name, value in gradient.items()}


def _weights(
    algorithm: AlgorithmConfig, batch: Batch, outputs: Outputs, whole: Denominators, state: AlgorithmState
) -> Tensor:
    """[T]: return −∂loss/∂log π of each token of a micro-batch. Terms that do not read log π have no part."""
    fixed = {name: None if value is None else value.detach() for name, value in outputs.__dict__.items()}
    none = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if fixed["logp"] is None:
        return none
    logp = fixed["logp"].clone().requires_grad_()
    with torch.enable_grad():
        loss = algorithm.compute_loss(batch, replace(outputs, **{**fixed, "logp": logp}), whole, state).loss
        if not loss.requires_grad:
            return none
        (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
    return none if gradient is None else -gradient.double().cpu()
