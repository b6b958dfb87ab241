"""The engines of a simulated cluster. Each one divides its time among the requests that run on it.

An engine samples for all its running requests at the same rate, which depends on their number. So the engine counts one
*progress* for all of them, and a request ends when the progress reaches its own end. The cost of an event is
the logarithm of the number of requests.

A request goes to an engine with the fewest requests. Where all are full it waits in one line, first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

NEVER = float("inf")


@dataclass(frozen=True)
class Cluster:
    """The machines of a run, by the seconds that they take."""

    engines: int
    slots: int
    """The most requests that an engine works on at the same time; others wait."""
    token_s: Callable[[int], float]
    """Seconds that each request takes for a token while this many run on its engine."""
    update_s: Callable[[int, int], float]
    """Seconds that the trainer takes for a step with this many tokens."""
    publish_s: float = 0.0
    """Seconds until the engines have new weights; the trainer waits for it."""
    pause_s: float = 0.0
    """The last part of these seconds, in which the engines stand still."""
    attempts: int | None = None
    """The most attempts at the same time, tools and waits included; None sets no limit. Others wait for an end."""
    shares_processors: bool = False
    """True if engine and trainer compute on the same processors, and so slow each other down."""
    between_s: Callable[[int], float] = lambda step: 0.0  # noqa: ARG005
    """Seconds between a step's publish and the next step: evaluation and saving."""
    judge_s: float = 0.0
    """Seconds from the last token of a rollout to its score."""
    failures_per_day: float = 0.0
    """Number of times that each engine is lost in a day."""
    restart_s: float = 300.0
    """Seconds until an engine that was lost is back."""


class Engines:
    """The engines, their requests and the line. A request is any integer that the caller chooses.

    Times are those of the engines' own clock, which stops during a pause.
    """

    def __init__(self, cluster: Cluster, on_start: Callable[[int], None]) -> None:
        """on_start: called with each request that an engine begins."""
        count = cluster.engines
        self._slots = cluster.slots
        self._on_start = on_start
        self._token_s = [0.0, *(cluster.token_s(running) for running in range(1, cluster.slots + 1))]
        self._requests: list[list[tuple[float, int, float]]] = [[] for _ in range(count)]
        """The running requests of each engine, as a heap by the progress at which they end, with their work."""
        self._progress = [0.0] * count
        self._since = [0.0] * count
        """The progress of each engine, and the time at which it was counted."""
        self._stamps = [0] * count
        """The number of changes of each engine: an end that was predicted before the last change is invalid."""
        self._ends: list[tuple[float, int, int]] = []
        """When the next request of an engine ends, as a heap: time, engine, stamp."""
        self._free = [(0, engine) for engine in range(count)]
        """Engines with a free slot, as a heap by the number of their requests. Old entries stay until they are met."""
        self._up = [True] * count
        self.line: deque[tuple[int, float]] = deque()
        """Requests without an engine, with their work."""
        self.busy_s = 0.0
        """Seconds in which an engine had a request, over all engines."""
        self.drawn = 0.0
        """The work that was done, over all engines."""

    @property
    def next_end(self) -> float:
        """The time at which the next request ends."""
        ends, stamps = self._ends, self._stamps
        while ends and ends[0][2] != stamps[ends[0][1]]:
            heappop(ends)
        return ends[0][0] if ends else NEVER

    def submit(self, now: float, request: int, work: float) -> None:
        """Give a request to an engine, or put it at the end of the line."""
        free = self._free
        while free:
            running, engine = heappop(free)
            if running == len(self._requests[engine]) and self._up[engine]:
                self._count(engine, now)
                self._begin(engine, request, work)
                self._changed(engine, now)
                return
        self.line.append((request, work))

    def end(self, now: float) -> int:
        """Take the request off its engine that ends now, and return it. The engine begins one from the line."""
        _, engine, _ = heappop(self._ends)
        self._count(engine, now)
        end, request, _ = heappop(self._requests[engine])
        self._progress[engine] = end
        if self.line:
            self._begin(engine, *self.line.popleft())
        self._changed(engine, now)
        return request

    def lose(self, engine: int, now: float) -> None:
        """Stop an engine. Its requests start again, before those in the queue; their work is lost."""
        self._count(engine, now)
        lost = self._requests[engine]
        self._requests[engine] = []
        self._up[engine] = False
        self._changed(engine, now)
        self.line.extendleft((request, work) for _, request, work in sorted(lost, reverse=True))
        self._drain(now)

    def restore(self, engine: int, now: float) -> None:
        """Take an engine back that was lost."""
        self._up[engine] = True
        self._changed(engine, now)
        self._drain(now)

    def is_up(self, engine: int) -> bool:
        """Return whether an engine works."""
        return self._up[engine]

    def count(self, now: float) -> None:
        """Count what runs up to now."""
        for engine in range(len(self._requests)):
            self._count(engine, now)

    def _drain(self, now: float) -> None:
        waiting = self.line
        self.line = deque()
        while waiting:
            self.submit(now, *waiting.popleft())
            if self.line:  # no engine has a free slot
                self.line.extend(waiting)
                return

    def _count(self, engine: int, now: float) -> None:
        """Bring an engine's progress up to now."""
        running = len(self._requests[engine])
        if running:
            seconds = now - self._since[engine]
            done = seconds / self._token_s[running]
            self._progress[engine] += done
            self.busy_s += seconds
            self.drawn += done * running
        self._since[engine] = now

    def _begin(self, engine: int, request: int, work: float) -> None:
        heappush(self._requests[engine], (self._progress[engine] + work, request, work))
        self._on_start(request)

    def _changed(self, engine: int, now: float) -> None:
        """Foresee the next end on an engine, and offer its free slot."""
        requests = self._requests[engine]
        running = len(requests)
        stamp = self._stamps[engine] = self._stamps[engine] + 1
        if running:
            left = max(requests[0][0] - self._progress[engine], 0.0)
            heappush(self._ends, (now + left * self._token_s[running], engine, stamp))
        if running < self._slots and self._up[engine]:
            heappush(self._free, (running, engine))
