"""Rollouts as flat columns (`Batch`), the input of one forward pass (`Pack`), and their serialization to bytes."""

from __future__ import annotations

from etude.batch.batch import COLUMNS, OWN_NAMES, Batch
from etude.batch.columns import Column, ColumnKind, ranges
from etude.batch.images import ImageContent, PackImages, StoredBytes
from etude.batch.meta import BatchMeta
from etude.batch.pack import Pack
from etude.batch.schema import BatchSchema
from etude.batch.serialization import from_bytes, to_bytes
from etude.batch.support_sets import SupportSets

__all__ = [
    "COLUMNS",
    "OWN_NAMES",
    "Batch",
    "BatchMeta",
    "BatchSchema",
    "Column",
    "ColumnKind",
    "ImageContent",
    "Pack",
    "PackImages",
    "StoredBytes",
    "SupportSets",
    "from_bytes",
    "ranges",
    "to_bytes",
]
