"""The ranks of sharded weights as a device mesh: replica × data × tensor.

    replica     copies of the same shards
    data        each layer's weights are sharded over these ranks
    tensor      each layer's heads and inner width are split over these ranks, which compute the same rollouts

                   tensor                                        layers   sharded over data
    data   rank 0 │ 1        rank 4 │ 5                          root     sharded over data × tensor
                2 │ 3             6 │ 7                          rollouts other ones along replica and data
             replica 0         replica 1

Ranks along `tensor` have adjacent numbers, because they exchange the most.
"""

from __future__ import annotations

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
        "data": ranks // config.replicas // config.tensor,
        "tensor": config.tensor,
    }
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
    meshes = ShardMeshes.from_mesh(init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))
    groups = meshes.groups() - {dist.group.WORLD}
    for group in groups if dist.get_backend() != dist.Backend.FAKE else ():
        _set_pg_timeout(timedelta(seconds=timeout), group)
    return meshes


@dataclass(frozen=True)
class ShardMeshes:
    """The parts of a mesh, as models use them."""

    layers: DeviceMesh
    """data, or replica × data: the ranks that share each layer's weights."""
    root: DeviceMesh
    """All ranks: those of data × tensor as one dimension, and the replicas as another if there are any."""
    tensor: DeviceMesh | None
    """The ranks that compute the same rollouts; None for one."""
    rollouts: dist.ProcessGroup
    """The ranks along replica and data: they hold other rollouts."""
    everyone: dist.ProcessGroup

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ShardMeshes:
        """Return the parts of a mesh with the dimensions above, or with a single one."""
        names = mesh.mesh_dim_names or ("data",)
        layers = root = mesh
        tensor = None
        if "tensor" in names:
            tensor, shards = mesh["tensor"], mesh["data", "tensor"]._flatten("shard")
            replicated = "replica" in names
            layers = mesh["replica", "data"] if replicated else mesh["data"]
            root = DeviceMesh._concatenate([mesh["replica"], shards]) if replicated else shards
        return cls(layers, root, tensor, _group(layers, "rollouts"), _group(mesh, "ranks"))

    @property
    def device_type(self) -> str:
        """The kind of device of the ranks."""
        return self.layers.device_type

    @property
    def ranks_per_rollout(self) -> int:
        """The number of ranks that compute the same rollouts."""
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
        meshes = [self.layers, self.root, *([] if self.tensor is None else [self.tensor])]
        return {self.rollouts, self.everyone, *(group for mesh in meshes for group in mesh.get_all_groups())}


def _ranks(group: dist.ProcessGroup) -> Ranks:
    return DistributedRanks(group) if dist.get_world_size(group) > 1 else SingleRank()


def _group(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """Return the group of all ranks of a mesh."""
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten(name).get_group()
