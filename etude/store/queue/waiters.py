"""The pending calls of a rollout queue: claims of runners, waits of trainers, and the last activity of each runner."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.running_time import running_time
from etude.store.queue.records import AttemptId, LeasedAttempt, RunnerState
from etude.store.queue.writer_thread import PendingResult

MAX_RECENT_ENDS = 4096
"""Number of the last ends that are held in memory."""
RUNNERS = 1024
"""Runners that are remembered at once."""
RUNNER_INFO = (4096, 200)
"""Bytes and values of the data that a runner reports about itself."""
REMEMBERED_S = 300.0
"""Seconds for which a runner is remembered after its last activity."""


@dataclass(slots=True, eq=False)
class PendingClaim:
    """A claim of a runner that waits for work."""

    runner: str
    n: int
    until: float
    promise: PendingResult | None = None
    leased: list[LeasedAttempt] = field(default_factory=list)
    is_cancelled: bool = False
    """True if the runner has stopped waiting."""


@dataclass(slots=True, eq=False)
class PendingWait:
    """A call that waits for rollouts to end."""

    cursor: int
    limit: int
    until: float
    promise: PendingResult | None = None


class RunnerRegistry:
    """The runners: the last activity of each, and the data that it reported."""

    def __init__(self, log: Callable[..., None]) -> None:
        """log: logs the runners that come and go."""
        self._last_seen: dict[str, tuple[float, Mapping[str, Any]]] = {}
        """The runner that has been silent longest is first; it is dropped if there are too many."""
        self._log = log

    def record_heartbeat(self, runner: str, info: Mapping[str, Any] | None = None) -> None:
        """Record that a runner is alive."""
        if runner not in self._last_seen:
            self._log("The runner '%s' has connected.", runner)
        _, known = self._last_seen.pop(runner, (0.0, {}))
        if len(self._last_seen) >= RUNNERS:
            del self._last_seen[next(iter(self._last_seen))]
        self._last_seen[runner] = running_time(), known if info is None else info

    def states(self, leases: Iterable[tuple[str, AttemptId]], now: float) -> list[RunnerState]:
        """Return all known runners. leases: pairs of runner and leased attempt."""
        running: dict[str, list[AttemptId]] = {name: [] for name in self._last_seen}
        for runner, key in leases:
            if runner in running:
                running[runner].append(key)
        return [
            RunnerState(name, tuple(running[name]), now - seen_at, info)
            for name, (seen_at, info) in sorted(self._last_seen.items())
        ]

    def forget(self, now: float) -> None:
        """Drop the runners that have been silent for long."""
        for name in [name for name, (seen_at, _) in self._last_seen.items() if now - seen_at > REMEMBERED_S]:
            del self._last_seen[name]
            self._log("The runner '%s' has sent nothing for %d minutes.", name, REMEMBERED_S // 60)


class RecentEnds:
    """The last rollouts that ended, by the position of their end in the journal."""

    def __init__(self, floor: int) -> None:
        self.floor = floor
        """Ends up to this position are found in the journal only."""
        self._ends: deque[tuple[int, int]] = deque()

    def add(self, position: int, rollout: int) -> None:
        """Add one end."""
        self._ends.append((position, rollout))
        if len(self._ends) > MAX_RECENT_ENDS:
            self.floor, _ = self._ends.popleft()

    def after(self, wait: PendingWait) -> list[tuple[int, int]]:
        """Return the first ends after the cursor of a wait."""
        if not self._ends or self._ends[-1][0] <= wait.cursor:
            return []
        first = bisect_right(self._ends, (wait.cursor, math.inf))
        return [self._ends[index] for index in range(first, min(len(self._ends), first + wait.limit))]
