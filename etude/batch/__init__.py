"""Rollouts as flat columns (`Batch`), what one forward pass sees of them (`Pack`), and their form on the wire."""

from __future__ import annotations

from etude.batch.batch import COLUMNS, Batch
from etude.batch.columns import Column, Kind, ranges
from etude.batch.form import Form
from etude.batch.outline import Outline
from etude.batch.pack import Pack
from etude.batch.wire import from_bytes, to_bytes

__all__ = ["COLUMNS", "Batch", "Column", "Form", "Kind", "Outline", "Pack", "from_bytes", "ranges", "to_bytes"]
