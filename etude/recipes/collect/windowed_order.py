"""The groups of a step where quick groups may be trained on before slow ones: `collect.order=windowed`.

A step takes `size` groups from the candidates: groups that can be trained on, or that are still undecided. It takes the
first n of them by their ordinals, and fills up with those that were decided first. n is the least number that leaves
each other group in time: its latest step, by the windows of those that are left, is not after its deadline. With
n = `size` that is the order of ordinals.

    size 2           candidates, with deadlines      a step takes
    n = 0            ? 5   ? 5   + 6   + 6           the last two: the first two can still be trained on at step 5
    n = 1            ? 4   + 5   + 5   + 6           nothing yet: the first one must be in this step, step 4

A group that is left behind never misses its deadline. So no group is older than the staleness bound, and none is left
out because it is slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from etude.recipes.collect.step_windows import windows_before
from etude.recipes.collect.task_group import GroupStatus, TaskGroup

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
