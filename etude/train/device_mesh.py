"""The ranks of sharded weights as device meshes: replica × data × context × tensor, and for experts another division.

    replica     copies of the same shards
    data        ranks with other rollouts
    context     the tokens of the same rollouts are split over these ranks, and in attention the heads
    tensor      each layer's heads and inner width are split over these ranks, and the tokens of the same rollouts

                   tensor                                        layers   sharded over data × context
    data   rank 0 │ 1        rank 4 │ 5                          root     sharded over data × context × tensor
                2 │ 3             6 │ 7                          rollouts other ones along replica and data
             replica 0         replica 1

    expert      each layer's experts are divided over these ranks, which compute other rollouts or other tokens of them

Ranks along `tensor` have adjacent numbers, because they exchange the most, and then those along `context`. So have
those along `expert`, which is any divisor of data × context × tensor. The other ranks of a copy shard the same experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from etude.algorithms.view import Ranks, SingleRank
from etude.train.config import MeshConfig
from etude.train.ranks import DistributedRanks


def build_mesh(config: MeshConfig, device_type: str, *, timeout: float = 1800.0) -> ShardMeshes:
    """Return the meshes of all ranks. Every rank calls this at the same time, once for all of its models.

    timeout: the seconds that an exchange may wait for other ranks.
    """
    ranks = dist.get_world_size()
    config.check_ranks(ranks)
    sizes = {
        "replica": config.replicas,
        "data": ranks // config.replicas // config.ranks_per_rollout,
        "context": config.context,
        "tensor": config.tensor,
    }
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    meshes = ShardMeshes.from_mesh(mesh, config.expert)
    groups = meshes.groups() - {dist.group.WORLD}
    for group in groups if dist.get_backend() != dist.Backend.FAKE else ():
        _set_pg_timeout(timedelta(seconds=timeout), group)
    return meshes


@dataclass(frozen=True)
class ShardMeshes:
    """The parts of a mesh, as models use them."""

    layers: DeviceMesh
    """The ranks that share each layer's weights: those of data × context as one dimension, and the replicas as another
    if there are any."""
    root: DeviceMesh
    """All ranks: those of data × context × tensor as one dimension, and the replicas as another if there are any."""
    context: DeviceMesh | None
    """The ranks that split tokens, and in attention heads; None for one."""
    tensor: DeviceMesh | None
    """The ranks that split each layer's weights; None for one."""
    tokens: DeviceMesh | None
    """The ranks that compute the same rollouts, those of context × tensor; None for one."""
    expert: DeviceMesh | None
    """The ranks that divide the experts of each layer; None for one."""
    experts: DeviceMesh | None
    """The ranks that share the same experts, and the replicas as another dimension if there are any; None if they are
    those of `layers`."""
    rollouts: dist.ProcessGroup
    """The ranks along replica and data: they hold other rollouts."""
    everyone: dist.ProcessGroup

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, expert: int = 1) -> ShardMeshes:
        """Return the parts of a mesh with the dimensions above, or with a single one. expert: the ranks along it."""
        names = mesh.mesh_dim_names or ("data",)

        def with_replicas(part: DeviceMesh) -> DeviceMesh:
            return DeviceMesh._concatenate([mesh["replica"], part]) if "replica" in names else part

        context = mesh["context"] if "context" in names else None
        tensor = mesh["tensor"] if "tensor" in names else None
        shares = context is not None or tensor is not None
        shards = layer_shards = _join(mesh, ("data", "context"), "layer_shard")
        experts = None
        if tensor is not None:
            shards = _join(mesh, ("data", "context", "tensor"), "shard")
            experts = with_replicas(shards)
        divided = None
        if expert > 1:
            parts = shards._unflatten(0, (shards.size() // expert, expert), ("expert_shard", "expert"))
            parts._flatten("divided")  # the norm is then one sum over both
            divided = parts["expert"]
            experts = with_replicas(parts["expert_shard"])
        layers = with_replicas(layer_shards)
        return cls(
            layers=layers,
            root=layers if tensor is None else with_replicas(shards),
            context=context,
            tensor=tensor,
            tokens=_join(mesh, ("context", "tensor"), "tokens") if shares else None,
            expert=divided,
            experts=experts,
            rollouts=_join(mesh, ("replica", "data"), "rollouts").get_group(),
            everyone=_join(mesh, names, "ranks").get_group(),
        )

    @property
    def device_type(self) -> str:
        """The kind of device of the ranks."""
        return self.layers.device_type

    @property
    def ranks_per_rollout(self) -> int:
        """The number of ranks that compute the same rollouts."""
        return 1 if self.tokens is None else self.tokens.size()

    @property
    def tensor_size(self) -> int:
        """The number of ranks that split each layer's weights."""
        return 1 if self.tensor is None else self.tensor.size()

    @property
    def rollout_ranks(self) -> Ranks:
        """The ranks that hold other rollouts, this one included."""
        return _ranks(self.rollouts)

    @property
    def all_ranks(self) -> Ranks:
        """All ranks of the mesh."""
        return _ranks(self.everyone)

    def groups(self) -> set[dist.ProcessGroup]:
        """Every process group that is used."""
        some = (self.context, self.tensor, self.tokens, self.expert, self.experts)
        meshes = [self.layers, self.root, *(mesh for mesh in some if mesh is not None)]
        return {self.rollouts, self.everyone, *(group for mesh in meshes for group in mesh.get_all_groups())}


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return DistributedRanks(group) if dist.get_world_size(group) > 1 else SingleRank()


def _join(mesh: DeviceMesh, parts: Collection[str], name: str) -> DeviceMesh:
    """Return the dimensions of a mesh that are among these as one, with this name if they are several."""
    if mesh.ndim == 1:
        return mesh
    found = tuple(part for part in mesh.mesh_dim_names or () if part in parts)
    return mesh[found]._flatten(name) if len(found) > 1 else mesh[found[0]]
