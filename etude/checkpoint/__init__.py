"""Checkpoints: written whole or not at all, verified when read, and exported for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from etude.checkpoint.background import BackgroundSaver
    from etude.checkpoint.config import CheckpointConfig
    from etude.checkpoint.files import Checkpoint, TensorTree, flat
    from etude.checkpoint.hf_export import check_export_directory, export, export_adapter
    from etude.checkpoint.manager import CheckpointManager
    from etude.checkpoint.processor_files import ProcessorFiles

__all__ = [
    "BackgroundSaver",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointManager",
    "ProcessorFiles",
    "TensorTree",
    "check_export_directory",
    "export",
    "export_adapter",
    "flat",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "background": ("BackgroundSaver",),
        "manager": ("CheckpointManager",),
        "config": ("CheckpointConfig",),
        "hf_export": ("check_export_directory", "export", "export_adapter"),
        "processor_files": ("ProcessorFiles",),
        "files": ("Checkpoint", "TensorTree", "flat"),
    },
)
