"""Checkpoints: written whole or not at all, checked when read, and exported for others to load."""

from __future__ import annotations

from etude.checkpoint.checkpoints import CheckpointConfig, Checkpoints
from etude.checkpoint.export import export, export_adapter
from etude.checkpoint.files import Checkpoint, Tree, flat

__all__ = ["Checkpoint", "CheckpointConfig", "Checkpoints", "Tree", "export", "export_adapter", "flat"]
