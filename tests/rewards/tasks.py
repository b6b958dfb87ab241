"""Tasks for rewards to judge."""

from __future__ import annotations

from typing import Any

from etude.records import Task


def task(truth: Any = "4", ordinal: int = 7, **fields: Any) -> Task:
    """A task with this ground truth."""
    return Task(ordinal, {"prompt": "2+2?", "ground_truth": truth, **fields}, source="sums")
