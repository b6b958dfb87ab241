"""Checkpoints: written whole or not at all, checked when read, and exported for others to load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import names_of

if TYPE_CHECKING:
    from etude.checkpoint.checkpoints import Checkpoints
    from etude.checkpoint.config import CheckpointConfig
    from etude.checkpoint.exporting import export, export_adapter
    from etude.checkpoint.files import Checkpoint, Tree, flat

__all__ = ["Checkpoint", "CheckpointConfig", "Checkpoints", "Tree", "export", "export_adapter", "flat"]

__getattr__ = names_of(
    __name__,
    {
        "checkpoints": ("Checkpoints",),
        "config": ("CheckpointConfig",),
        "exporting": ("export", "export_adapter"),
        "files": ("Checkpoint", "Tree", "flat"),
    },
)
