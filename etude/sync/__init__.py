"""Weight synchronization: publishing the trainer's weights to the engines that sample with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from etude.sync.config import SyncConfig
from etude.sync.local import publish_to_engine
from etude.sync.replicas import ReplicaWeightSync
from etude.sync.transport import WeightReceiver, WeightTransport
from etude.sync.weights import WeightManifest

__all__ = [
    "ReplicaWeightSync",
    "SyncConfig",
    "WeightManifest",
    "WeightReceiver",
    "WeightTransport",
    "build_transport",
    "build_weight_sync",
    "publish_to_engine",
]


def build_transport(config: SyncConfig, directory: Path, device: torch.device | None = None) -> WeightTransport:
    """Build the weight transport that the configuration names.

    directory: the run's directory. device: the GPU that holds the weights, for `ipc` and `nccl`; by default the
    caller's.
    """
    nbytes = config.bucket_mib * 2**20
    dtype: torch.dtype | None = None if config.dtype == "as_trained" else getattr(torch, config.dtype)
    if config.weight_transport == "shm":
        from etude.sync.shm import ShmTransport

        return ShmTransport(nbytes, dtype)
    if config.weight_transport == "ipc":
        from etude.sync.ipc import IpcTransport

        return IpcTransport(nbytes, dtype, device=device)
    if config.weight_transport == "disk":
        from etude.sync.disk import DiskTransport

        return DiskTransport(directory / config.directory, nbytes, dtype, delta=config.delta)
    from etude.sync.broadcast import BroadcastTransport

    return BroadcastTransport(
        config.weight_transport, nbytes, dtype, address=config.address, timeout=config.timeout, device=device
    )


def build_weight_sync(
    servers: Sequence[WeightReceiver], config: SyncConfig, directory: Path, device: torch.device | None = None
) -> ReplicaWeightSync:
    """Build the sender of weights to these servers; the other arguments are as in `build_transport`."""
    return ReplicaWeightSync(
        servers, build_transport(config, directory, device), running=config.running, timeout=config.timeout
    )
