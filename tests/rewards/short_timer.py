"""A reward function whose process ends itself after half a second of processor time, if its call lasts so long."""

from __future__ import annotations

import os

from etude.records import Task
from etude.rewards import worker_main
from tests.rewards.functions import announced as announce

LIMIT_S = 60.0
"""The limit of the call: its parent does not end it before the timer does."""

worker_main.TIMER_GRACE_S = 0.5 / (os.cpu_count() or 1) - LIMIT_S


def announced(task: Task, answer: str) -> float:
    """Print the number of its process, then misbehave as the answer says."""
    return announce(task, answer)
