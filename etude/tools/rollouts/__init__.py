"""`etude export rollouts`: the rollouts of a run as training data, JSON lines or traces."""

from __future__ import annotations

from etude.tools.rollouts.export import ExportOptions, export_rollouts

__all__ = ["ExportOptions", "export_rollouts"]
