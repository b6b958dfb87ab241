"""The share of a GPU for a vLLM server that takes turns with a rank."""

from __future__ import annotations

from etude.errors import ConfigError

GIB = 2**30
LEFT_FREE = 4 * GIB
"""Bytes that stay free: for the rank's own work while the server samples, and for what the server takes beside it."""
MAX_SHARE = 0.9


def share_beside_rank(free: int, total: int) -> float:
    """Return the share of a GPU's memory for the server. free, total: its bytes, with the rank's weights loaded.

    vLLM's own default is 0.92 of the whole GPU, and it ends at its start if less than its share is free.
    """
    share = min((free - LEFT_FREE) / total, MAX_SHARE)
    share = int(share * 1000) / 1000  # never more than was computed
    if share <= 0:
        raise ConfigError(
            f"Of {total / GIB:.3g} GiB of the GPU {free / GIB:.3g} GiB are free beside the rank, and "
            f"{LEFT_FREE / GIB:g} GiB must stay free, so nothing is left for a server. Name another GPU with "
            f"`rollout.devices`, divide the model among more `ranks`, or end other programs on this GPU."
        )
    return share
