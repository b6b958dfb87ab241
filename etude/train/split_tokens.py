"""The ranks that compute the same packs: between the products of layers, each has an equal part of the tokens.

    pack ──► own tokens ──embedding, layers, final norm──► own hidden states ──gathered──► all ──► own rows of the head

Along `tensor` the layers gather tokens for their products, along `context` for their attention. Embedding, final norm
and head are not split: a rank embeds its own tokens, and judges its own rows of the gathered hidden states. Nothing is
computed twice, so gradients of weights that every rank has whole are sums over ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from etude.batch import Pack
from etude.errors import BatchError
from etude.models import Model, PackedAttention
from etude.models.backbone import AttentionFn
from etude.models.routes import Routes, use_routes
from etude.train.context_parallel import SplitHeads
from etude.train.device_mesh import ShardMeshes
from etude.train.forward import SharedPacks


class SplitTokens(SharedPacks):
    """One rank of those that compute the same packs. All of them are given the same packs in the same order."""

    def __init__(self, model: Model, meshes: ShardMeshes) -> None:
        """model: its layers are split along `tensor` already."""
        assert meshes.tokens is not None, "several ranks compute the same packs"
        self._model = model
        self._mesh = meshes.tokens
        self._context = meshes.context
        self._rank = self._mesh.get_local_rank()
        self._count = self._mesh.size()

    def hidden(self, pack: Pack, routes: Routes | None = None) -> Tensor:
        """[P, H]: compute the final hidden states of the whole pack, on every rank; differentiable.

        routes: those of the pack's tokens. The routers of each rank choose for its own tokens.
        """
        if pack.images is not None:
            raise BatchError(
                "The rows show images, and `mesh.tensor` and `mesh.context` do not split a model with a vision tower. "
                "Set both to 1, or give rows without images."
            )
        padded = _padded(pack, self._count)
        own = padded.ids[self.own_rows(len(padded.ids))]
        own_routes = None if routes is None else self._own_routes(routes, len(padded.ids))
        attend: AttentionFn = PackedAttention(padded)
        positions = padded.positions  # of the tokens that ranks along `tensor` gather
        if self._context is not None:
            attend = SplitHeads(attend, self._context)
            positions = positions.chunk(self._context.size())[self._context.get_local_rank()]
        with use_routes(own_routes):
            part = self._model.hidden(own, positions, attend)
        if routes is not None and own_routes is not None and routes.records:
            routes.record_all(self._gathered(own_routes.recorded(), Replicate())[: len(pack.ids)])
        # each rank does something else with the hidden states: their gradients are added up
        return self._gathered(part, Partial())[: len(pack.ids)]

    def _own_routes(self, routes: Routes, padded: int) -> Routes:
        """Return the routes of this rank's tokens of a pack with so many tokens, where padding has none."""
        if routes.given is None:
            return Routes(routes.shape, records=routes.records)
        unused = routes.shape.blank(padded - len(routes.given), routes.given.device)
        own = self.own_rows(padded)
        balance = None if routes.balance is None else routes.balance.of_tokens(own, padded)
        given = torch.cat([routes.given, unused])[own]
        return Routes(routes.shape, given, records=routes.records, balance=balance)

    def own_rows(self, rows: int) -> slice:
        """Return which of so many rows this rank judges; the last ranks may have fewer, or none."""
        share = -(-rows // self._count)
        return slice(min(self._rank * share, rows), min((self._rank + 1) * share, rows))

    def gather_rows(self, values: Tensor, rows: int) -> Tensor:
        """[own rows, …] of each rank → [rows, …], the same on all of them, which then do the same with it."""
        missing = -(-rows // self._count) - len(values)
        values = torch.cat([values, values.new_zeros((missing, *values.shape[1:]))])
        return self._gathered(values, Replicate())[:rows]

    def _gathered(self, part: Tensor, gradient: Partial | Replicate) -> Tensor:
        """[n, …] of each rank → [ranks · n, …]. gradient: how the ranks' gradients of the result belong together."""
        sharded = DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False)
        return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def _padded(pack: Pack, multiple: int) -> Pack:
    """Return the pack with a last root segment of unused tokens, which makes the parts of all ranks equal."""
    short = -len(pack.ids) % multiple
    if not short:
        return pack
    unused = torch.arange(short, device=pack.positions.device)
    return replace(
        pack,
        ids=torch.cat([pack.ids, torch.zeros_like(unused).to(pack.ids)]),
        positions=torch.cat([pack.positions, unused.to(pack.positions)]),
        offsets=torch.cat([pack.offsets, pack.offsets[-1:] + short]),
        parent=torch.cat([pack.parent, torch.full_like(pack.parent[:1], -1)]),
    )
