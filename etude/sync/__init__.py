"""Bringing weights from where they are trained to where they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from etude.sync.config import SyncConfig
from etude.sync.fleet import Fleet
from etude.sync.local import LocalCarrier
from etude.sync.plan import Plan, shares
from etude.sync.server import Carrier, Server

__all__ = ["Carrier", "Fleet", "LocalCarrier", "Plan", "Server", "SyncConfig", "carrier", "fleet", "shares"]


def carrier(config: SyncConfig, directory: Path, device: torch.device | None = None) -> Carrier:
    """The carrier that was asked for. directory: the run's own. device: the GPU that weights lie on, for a carrier from
    there; by default the caller's."""
    nbytes = config.bucket_mib * 2**20
    dtype: torch.dtype | None = None if config.dtype == "as_trained" else getattr(torch, config.dtype)
    if config.carrier == "shm":
        from etude.sync.shm import ShmCarrier

        return ShmCarrier(nbytes, dtype)
    if config.carrier == "ipc":
        from etude.sync.ipc import IpcCarrier

        return IpcCarrier(nbytes, dtype, device=device)
    if config.carrier == "disk":
        from etude.sync.disk import DiskCarrier

        return DiskCarrier(directory / config.directory, nbytes, dtype, delta=config.delta)
    from etude.sync.group import GroupCarrier

    return GroupCarrier(config.carrier, nbytes, dtype, address=config.address, timeout=config.timeout, device=device)


def fleet(servers: Sequence[Server], config: SyncConfig, directory: Path, device: torch.device | None = None) -> Fleet:
    """A `WeightCarrier` to these servers; the rest is as in `carrier`."""
    return Fleet(servers, carrier(config, directory, device), running=config.running, timeout=config.timeout)
