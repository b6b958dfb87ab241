"""Rewards in parts, for presets that compare them one by one."""

from __future__ import annotations

from etude.records import Task


def in_parts(task: Task, answer: str) -> dict[str, float]:
    """The right answer earns 1; beside it stands whether it has the right length."""
    wanted = str(task.fields["ground_truth"])
    right, length = float(answer == wanted), float(len(answer) == len(wanted))
    return {"score": right, "right": right, "length": length}
