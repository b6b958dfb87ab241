"""Tries an advantage on groups of one, two and more rollouts: how few of a group it can compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.algorithms import Advantage, AlgorithmState, View
from etude.batch import Batch
from etude.errors import BatchError
from etude.recipes.run.config import Run
from etude.records import Rollout, Sample

__all__ = ["TRIAL_REWARDS", "min_group_size", "trial_advantages"]

TRIAL_REWARDS = [0.0, 1.0]
"""The rewards of two rollouts on which an advantage is tried; further ones earn 2, 3 and so on."""


def trial_advantages(advantage: Advantage, groups: Sequence[int] = (0, 1)) -> list[float] | None:
    """The advantages of rollouts of these groups that earn 0, 1, 2 and so on; zeros where it refuses such groups.

    None where that cannot be told: it reads what only a run can give, or one of the user's own raises.
    """
    zeros = np.zeros(2, np.int32)
    logp = np.array([0.0, -0.5], np.float32)
    rows = [Sample(zeros, np.array([False, True]), logp, zeros, zeros, rollout=i) for i in range(len(groups))]
    batch = Batch.from_records(rows, [Rollout(i, group, group, float(i)) for i, group in enumerate(groups)])
    try:
        return advantage(View(batch), AlgorithmState()).advantage.tolist()
    except BatchError:
        return [0.0] * len(groups)
    except Exception:  # what is wrong with it, the first step says
        return None


def min_group_size(run: Run) -> int:
    """The fewest rollouts of a group that a step trains on, where failures took the others.

    One, unless the advantage would refuse a rollout that is left alone, or give it nothing, or its bare reward in place
    of a comparison: then as many as it compares.
    """
    size, alone = run.collect.group_size, trial_advantages(run.advantage)
    bare = alone == TRIAL_REWARDS != trial_advantages(run.advantage, (0, 0))
    if alone is None or (any(alone) and not bare):
        return 1
    return next((few for few in range(2, size + 1) if any(trial_advantages(run.advantage, (0,) * few) or ())), 1)
