"""Expert parallelism: ranks divide the experts of each layer, and send each token to the ranks of its experts.

    own rows, by expert ──all to all──► rows of all ranks, by own expert ──products──► ──all to all──► own rows

Every rank has other rollouts, or other tokens of them, so nothing is computed twice. The gradient of an expert is a sum
over the tokens of all ranks, complete on the rank that has it. No token is left out, however uneven the loads are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from etude.errors import ConfigError
from etude.models import Model
from etude.models.experts import ComputeRows, Exchange, find_experts, host_counts, restore_order, to_expert_order
from etude.train.device_mesh import ShardMeshes


class ExpertExchange(Exchange):
    """One rank of those that hold the experts of a layer together."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """mesh: the `expert` dimension."""
        self._group = mesh.get_group()
        self._count = mesh.size()

    def __call__(self, tokens: Tensor, order: Tensor, counts: Tensor, compute: ComputeRows) -> Tensor:
        """See `Exchange`. No name holds rows, so those that the backward pass does not need are released at once."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._group)
        per_rank = theirs.view(self._count, -1)  # [rank, own expert]
        sent, received = host_counts(counts.view(self._count, -1).sum(1), per_rank.sum(1), total=len(order))
        own = torch.arange(per_rank.shape[1], device=tokens.device).repeat(self._count)
        expert, by_expert = torch.repeat_interleave(own, theirs, output_size=sum(received)).sort(stable=True)

        def receive() -> Tensor:
            return exchange_rows(to_expert_order(tokens, order, len(order) // len(tokens)), sent, received, self._group)

        def compute_received() -> Tensor:
            return compute(to_expert_order(receive(), by_expert, 1), expert, per_rank.sum(0).cumsum(0))

        return exchange_rows(restore_order(compute_received(), by_expert), received, sent, self._group)


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """[Σ sent, H] → [Σ received, H]: send consecutive rows to each rank; gradients go the same way back."""
    out: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes = sent, received
        ctx.group = group
        return _send(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.sizes
        return _send(grads[0], received, sent, ctx.group), None, None, None


def _send(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
    return out


def split_experts(model: Model, mesh: DeviceMesh) -> None:
    """Divide the experts of each layer over the `expert` dimension of a mesh. Weights may be on the meta device.

    Each rank keeps its part of the values that it has.
    """
    refuse_undivided(model, mesh.size())
    exchange = ExpertExchange(mesh)
    for experts in find_experts(model.module):
        experts.exchange = exchange  # type: ignore[assignment]
        for name, weight in list(experts.named_parameters(recurse=False)):
            divided = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(divided, requires_grad=weight.requires_grad))


def gather_experts(weight: Tensor, mesh: DeviceMesh) -> Iterator[Tensor]:
    """Yield a copy of each expert of a divided weight, sent by the rank that has it. All ranks of the mesh call it."""
    assert isinstance(weight, DTensor), "ranks divide it"
    own = weight.to_local().detach()
    for expert in range(len(weight)):
        owner, place = divmod(expert, len(own))
        part = own[place].clone() if owner == mesh.get_local_rank() else torch.empty_like(own[0])
        dist.broadcast(part, group=mesh.get_group(), group_src=owner)
        yield part


def refuse_undivided(model: Model, expert: int) -> None:
    """Refuse experts that so many ranks cannot divide evenly. Weights may be on the meta device."""
    for experts in find_experts(model.module):
        count = int(experts.num_experts)  # type: ignore[arg-type]
        if count % expert:
            fits = max(number for number in range(1, expert) if not count % number)
            raise ConfigError(
                f"`mesh.expert={expert}` gives each rank an equal part of the {count} experts of a layer, and {count} "
                f"over {expert} ranks are {count / expert:.4g} each. Choose a number that divides them, such as {fits}."
            )
        odd = next((name for name, weight in experts.named_parameters() if len(weight) != count), None)
        if odd is not None:
            raise ConfigError(
                f"`mesh.expert={expert}` divides weights that have a part for each expert, and `{odd}` of this "
                f"{model.module.config.model_type} model has none. Set `mesh.expert=1`."
            )


def refuse_without_experts(model: Model, expert: int) -> None:
    """Refuse to divide the experts of a model that has none."""
    if not find_experts(model.module):
        raise ConfigError(
            f"`mesh.expert={expert}` divides experts, and this {model.module.config.model_type} model has none. Leave "
            "it out: the ranks then share its weights all the same."
        )


def choose_sharded_dimension(experts: nn.Module, meshes: ShardMeshes) -> Callable[[nn.Parameter], Shard]:
    """Return the dimension in which ranks shard the experts that they share: whole experts, or else their rows."""
    assert meshes.experts is not None, "experts have ranks of their own"
    shards = meshes.experts.size(meshes.experts.ndim - 1)
    expert = 1 if meshes.expert is None else meshes.expert.size()
    held = int(experts.num_experts) // expert  # type: ignore[arg-type]
    if expert == 1 or not held % shards:
        return lambda _: Shard(0)
    uneven = next((weight.shape[1] for weight in experts.parameters() if weight.shape[1] % shards), None)
    if uneven is not None:
        raise ConfigError(
            f"`mesh.expert={expert}` gives each rank {held} experts, which {shards} ranks share: they can divide "
            f"neither {held} experts nor their rows, of which one weight has {uneven}. Set `mesh.expert=1`."
        )
    return lambda _: Shard(1)
