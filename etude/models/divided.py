"""A model whose packs several ranks compute together: some of the tokens each, and some of every layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from etude.batch import Pack
from etude.errors import ConfigError
from etude.models.model import Model
from etude.models.strand import Side, StrandAttention, gathered, own, told

__all__ = ["Divided"]


class Divided:
    """One rank of those that share a model's packs. All are given the same packs in the same order.

    `tensor` are the ranks that have parts of each layer, and `sequence` those that attend by exchange of heads. A pack
    is cut into as many strands as there are of both: between the layers' products each rank has one. For the products
    themselves, ranks along `tensor` bring their strands together, and what they make of them is added up strand by
    strand.
    """

    def __init__(self, model: Model, tensor: Side, sequence: Side, both: Side) -> None:
        """`both`: all ranks that share a pack, those along `tensor` next to each other."""
        heads = model.query_heads // tensor.count
        self._body = model.parted(tensor)
        if heads % sequence.count:
            of = "" if tensor.count == 1 else f" that `mesh.tensor={tensor.count}` leaves each rank"
            fit = max(n for n in range(1, sequence.count) if heads % n == 0)
            raise ConfigError(
                f"`mesh.sequence={sequence.count}` deals the query heads out while ranks attend, and the {heads}{of} "
                f"over {sequence.count} ranks are {heads / sequence.count:.4g} each. Choose a number that divides "
                f"them, such as {fit}."
            )
        self._model, self._tensor, self._sequence, self._both = model, tensor, sequence, both

    def hidden(self, pack: Pack) -> Tensor:
        """[P, H]: the final hidden states of the whole pack, on every rank; differentiable."""
        tokens, count = len(pack.ids), self._both.count
        short = -tokens % count
        ids, positions = pad(pack.ids, (0, short)), pad(pack.positions, (0, short))
        attend = StrandAttention(pack, self._sequence, tokens + short)
        strand = self._body(
            ids[own(len(ids), self._both)],
            positions[own(len(ids), self._sequence)],
            attend,
            checkpoint=self._model.activation_checkpointing and torch.is_grad_enabled(),
            visits=self._model.visits,
        )
        return gathered(strand, self._both)[:tokens]

    def own(self, rows: int) -> slice:
        """Which of so many rows of hidden states this rank says something of, so that logits are made once."""
        return own(rows, self._both)

    def told(self, values: Tensor, rows: int) -> Tensor:
        """[own rows, …] of each rank → [rows, …] on all of them."""
        return told(values, rows, self._both)
