"""Rewards in parts, for presets that compare them one by one."""

from __future__ import annotations

from etude.records import Task


def in_parts(task: Task, answer: str) -> dict[str, float]:
    """Return 1 for the right answer; the second part says whether its length is right."""
    wanted = str(task.fields["ground_truth"])
    right, length = float(answer == wanted), float(len(answer) == len(wanted))
    return {"score": right, "right": right, "length": length}
