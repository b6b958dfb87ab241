"""The windows of a run's next steps: the groups that each step may train on, while some are still undecided.

The groups of a run form a line, in the order of their ordinals. The window of a step starts where the window before it
ended. It closes with its `size`-th candidate, or when it is `longest` groups long. A candidate is a group that can be
trained on, or that is still undecided. So a window counts every undecided group as one that it will train on.

    size 2, longest 4      ? undecided   + can be trained on   - cannot

    line       +  -  ?  +  +  -  ?  ?
    windows    [ 1    ][ 2 ][ 3     ][ open

A candidate that turns out not to be one makes its window take the next groups of the line. The ends of windows only
move forward, and a group never comes into a later window. So the cost of a run is its groups times its windows.

With `collect.order=windowed` a step may train on quick groups before slow ones (`choose_early`). It takes the first n
candidates by their ordinals, and fills up with those that were decided first. n is the least number that leaves each
other group in time: its latest step, by the windows of those that are left, is not after its deadline. With n = `size`
that is the order of ordinals.

    size 2           candidates, with deadlines      a step takes
    n = 0            ? 5   ? 5   + 6   + 6           the last two: the first two can still be trained on at step 5
    n = 1            ? 4   + 5   + 5   + 6           nothing yet: the first one must be in this step, step 4

A group that is left behind never misses its deadline. So no group is older than the staleness bound, and none is left
out because it is slow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from etude.records import has_zero_variance


class GroupStatus(Enum):
    """The use of a group for a step."""

    OPEN = "some rollouts have not ended"
    USABLE = "a step can train on it"
    ZERO_VARIANCE = "a step trains on it only where it finds too few others"
    FAILED = "no step can train on it"

    @property
    def is_candidate(self) -> bool:
        """True if a step can train on the group, or if that is undecided."""
        return self in (GroupStatus.OPEN, GroupStatus.USABLE)


@dataclass(slots=True, eq=False)
class TaskGroup:
    """The state of one task's rollouts."""

    task: int
    place: int
    """Its place in the windows."""
    floor: int | None = None
    """No token of its rollouts is older than this version; None before any was issued."""
    running: set[int] = field(default_factory=set)
    """The rollouts that were issued and have not ended."""
    held: tuple[int, ...] = ()
    """The rollouts that are to be issued, and are not yet."""
    metrics: dict[int, float] = field(default_factory=dict)
    status: GroupStatus = GroupStatus.OPEN
    decided: int = 0
    """Its number in the order in which groups were decided."""

    @property
    def has_zero_variance(self) -> bool:
        """True if all its metrics are equal, also to the greedy answer where there is one: DAPO's filter (2503.14476),
        if `refill` is set. A single rollout compares with nothing, and does not count as equal."""
        values = self.metrics.values()
        return len(values) > 1 and bool(has_zero_variance(min(values), max(values)))

    def sampled(self, size: int) -> tuple[int, ...]:
        """Return the samples of the group that were scored."""
        return tuple(sample for sample in sorted(self.metrics) if sample < size)


def windows_before(candidates: Iterable[bool], size: int, longest: int) -> Iterator[int]:
    """Return for each group of a line the number of windows that closed before it.

    candidates: of each group, whether it is one. size, longest: as for `StepWindows`.
    """
    closed = length = found = 0
    for candidate in candidates:
        yield closed
        length, found = length + 1, found + candidate
        if found == size or length == longest:
            closed = closed + 1
            length = 0
            found = 0


@dataclass(slots=True)
class _Window:
    """The counts of one window."""

    end: int
    """The place behind its last group."""
    length: int = 0
    candidates: int = 0
    undecided: int = 0

    def count(self, usable: bool | None, by: int) -> None:
        """Count a group in (1) or out (-1). usable: None while it is undecided."""
        self.length += by
        self.candidates += by * (usable is not False)
        self.undecided += by * (usable is None)


class StepWindows:
    """The windows over a line of groups. A group is named by its place, counted from the start of the run."""

    def __init__(self, size: int, longest: int) -> None:
        """size: candidates that close a window. longest: the number of groups that closes it, candidates or not."""
        self._size = size
        self.longest = longest
        """The number of groups that close a window. It may be set while the line is empty."""
        self._usable: dict[int, bool | None] = {}
        """Of each group, whether it can be trained on; None if that is undecided."""
        self._windows = [_Window(end=0)]
        """The closed windows in order, then the open one, which may be empty."""

    @property
    def closed(self) -> int:
        """The number of closed windows: those before the group that is appended next."""
        return len(self._windows) - 1

    @property
    def candidates(self) -> int:
        """The number of groups that can be trained on or are undecided."""
        return sum(window.candidates for window in self._windows)

    @property
    def usable(self) -> int:
        """The number of groups that can be trained on."""
        return sum(window.candidates - window.undecided for window in self._windows)

    @property
    def first_is_decided(self) -> bool:
        """True if the first window is closed and none of its groups is undecided."""
        return self.closed > 0 and not self._windows[0].undecided

    @property
    def first_end(self) -> int:
        """The place behind the last group of the first window, be it closed or open."""
        return self._windows[0].end

    def append(self) -> int:
        """Append an undecided group to the line, and return its place."""
        last = self._windows[-1]
        place = last.end
        self._usable[place] = None
        self._take(last, place)
        if self._is_full(last):
            self._windows.append(_Window(end=last.end))
        return place

    def decide(self, place: int, *, usable: bool) -> None:
        """Record whether a group can be trained on. One that can may still be ruled out later."""
        assert self._usable[place] is not False, "a group is ruled out once"
        index = self.before(place)
        window = self._windows[index]
        window.count(self._usable[place], -1)
        self._usable[place] = usable
        window.count(usable, +1)
        self._extend(index)

    def before(self, place: int) -> int:
        """Return the number of windows that closed before this group."""
        return bisect_right(self._windows, place, hi=self.closed, key=lambda window: window.end)

    def _is_full(self, window: _Window) -> bool:
        return window.candidates == self._size or window.length == self.longest

    def _take(self, window: _Window, place: int) -> None:
        window.count(self._usable[place], +1)
        window.end = place + 1

    def _extend(self, index: int) -> None:
        """Move the ends of windows forward, from this one on, until each is full or holds the rest of the line."""
        windows = self._windows
        while index < self.closed and not self._is_full(windows[index]):
            window, following = windows[index], windows[index + 1]
            while following.length and not self._is_full(window):
                following.count(self._usable[window.end], -1)
                self._take(window, window.end)
            if self._is_full(window):
                index += 1
            else:
                del windows[index + 1]


Deadline = Callable[[TaskGroup], float]
"""The last step that may train on a group."""


def choose_early(line: Sequence[TaskGroup], deadline: Deadline, size: int, longest: int, step: int) -> list[TaskGroup]:
    """Return the groups that this step trains on; none if it must wait.

    line: the groups that no step has trained on, by their ordinals. size, longest: those of the windows of steps.
    """
    candidates = [group for group in line if group.status.is_candidate]
    usable = [group for group in candidates if group.status is GroupStatus.USABLE]
    usable.sort(key=lambda group: group.decided)
    if len(usable) < size:
        return []

    def chosen(first: int) -> list[TaskGroup]:
        """Return the first candidates by their ordinals, and those that were decided first."""
        oldest = candidates[:first]
        tasks = {group.task for group in oldest}
        return oldest + [group for group in usable if group.task not in tasks][: size - first]

    def is_in_time(first: int) -> bool:
        left = _left(line, chosen(first))
        before = windows_before((group.status.is_candidate for group in left), size, longest)
        latest = ((group, step + 1 + windows) for group, windows in zip(left, before, strict=True))
        return all(last <= deadline(group) for group, last in latest if group.status.is_candidate)

    undecided = (index for index, group in enumerate(candidates[:size]) if group.status is GroupStatus.OPEN)
    most = next(undecided, size)
    if not is_in_time(most):
        return []
    return chosen(bisect_left(range(most), True, key=is_in_time))


def _left(line: Sequence[TaskGroup], chosen: Collection[TaskGroup]) -> list[TaskGroup]:
    """Return the groups that later steps look at: all candidates, and the others behind the last chosen group."""
    tasks = {group.task for group in chosen}
    end = max(tasks)
    return [group for group in line if group.task not in tasks and (group.status.is_candidate or group.task > end)]
