"""A model that is asked and never trained: the reference that a policy is held to, the teacher that it imitates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from etude.batch import Batch, ColumnKind, Pack
from etude.data.pack import pack_prefix_tree
from etude.models import Model, PackedAttention
from etude.train.forward import ForwardPass, iterate_micro_batches
from etude.train.mesh import Mesh

__all__ = ["FrozenModel"]


class FrozenModel:
    """Tells what it thinks of others' tokens, by weights that stay as they were loaded."""

    def __init__(
        self,
        model: Model,
        max_tokens_per_micro_batch: int,
        *,
        temperature: float = 1.0,
        pack: Callable[[Batch], Pack] = pack_prefix_tree,
        disable_adapters: bool = False,
        compute_device: torch.device | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """temperature: the sampler's, under which the policy's own log-probs are taken too. unadapted: the model is
        another's, who trains its adapters; it is asked without them. home: where it computes, if it rests elsewhere:
        a copy goes there for each question. mesh: the ranks that ask it the same, and answer together."""
        if not disable_adapters:
            for weight in model.parameters():
                weight.requires_grad_(False)
        self.model, self._max_tokens_per_micro_batch = model, max_tokens_per_micro_batch
        self._adapter_context = model.without_adapters if disable_adapters else nullcontext
        self._pack, self._temperature, self._compute_device, self._mesh = (
            pack,
            temperature,
            compute_device,
            mesh or Mesh(),
        )
        self._divided = self._mesh.over(model) if compute_device is None else None

    def logp(self, batch: Batch) -> Tensor:
        """[T]: the log-prob of each action token, NaN elsewhere."""
        model, forward = self._on_compute_device()
        found = torch.full((batch.num_tokens,), torch.nan, dtype=torch.promote_types(self.model.dtype, torch.float32))
        for micro, at in iterate_micro_batches(batch, self._max_tokens_per_micro_batch, "rollout", model.device):
            with torch.no_grad(), self._adapter_context():
                found[at[ColumnKind.TOKEN]] = forward(micro, frozenset({"logp"})).columns["logp"].to(found)
        return found.to(batch.device)

    def top_tokens(self, batch: Batch, count: int, among: int) -> tuple[Tensor, Tensor]:
        """[T, k] of each: what it thinks likeliest at every action token, of the first `among` of its vocabulary."""
        model, forward = self._on_compute_device()
        ids = torch.zeros((batch.num_tokens, count), dtype=torch.int64)
        logp = torch.full(
            (batch.num_tokens, count), torch.nan, dtype=torch.promote_types(self.model.dtype, torch.float32)
        )
        for micro, at in iterate_micro_batches(batch, self._max_tokens_per_micro_batch, "rollout", model.device):
            with torch.no_grad(), self._adapter_context():
                found, told = forward.top_tokens(micro, count, among)
            ids[at[ColumnKind.TOKEN]], logp[at[ColumnKind.TOKEN]] = found.to(ids), told.to(logp)
        return ids.to(batch.device), logp.to(batch.device)

    def hidden(self, pack: Pack) -> Tensor:
        """[P, H]: the hidden states that its `logits` are made of, of a model that is where it computes."""
        assert self._compute_device is None, (
            "what rests is asked for log-probs: one copy for all of a batch, none for each pack"
        )
        with torch.no_grad(), self._adapter_context():
            if self._divided is not None:
                return self._divided.hidden(pack)
            return self.model.hidden(pack.ids, pack.positions, PackedAttention(pack))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, V]."""
        with torch.no_grad():
            return self.model.logits(hidden)

    def _on_compute_device(self) -> tuple[Model, ForwardPass]:
        """The model where it computes, and how it is run there."""
        if self._compute_device is None:
            return self.model, ForwardPass(self.model, self._pack, self._temperature, divided=self._divided)
        model = self.model.copy(device=self._compute_device)
        return model, ForwardPass(model, self._pack, self._temperature, divided=self._mesh.over(model))
