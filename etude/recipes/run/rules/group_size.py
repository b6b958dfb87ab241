"""Tries an advantage on groups of one, two and more rollouts, to find the smallest group that it can compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from etude.algorithms import Advantage, AlgorithmState, View
from etude.batch import Batch
from etude.errors import BatchError
from etude.records import Rollout, Sample

TRIAL_REWARDS = [0.0, 1.0]
"""The rewards of two rollouts on which an advantage is tried; further ones have 2, 3 and so on."""


def trial_advantages(advantage: Advantage, groups: Sequence[int] = (0, 1)) -> list[float] | None:
    """Return the advantages of rollouts in these groups, with rewards 0, 1, 2 and so on; zeros where it refuses such
    groups.

    Return None where they cannot be computed: the advantage reads columns that only a run has, or the user's own code
    raises.
    """
    zeros = np.zeros(2, np.int32)
    logp = np.array([0.0, -0.5], np.float32)
    rows = [Sample(zeros, np.array([False, True]), logp, zeros, zeros, rollout=i) for i in range(len(groups))]
    batch = Batch.from_records(rows, [Rollout(i, group, group, float(i)) for i, group in enumerate(groups)])
    try:
        return advantage(View(batch), AlgorithmState()).advantage.tolist()
    except BatchError:
        return [0.0] * len(groups)
    except Exception:  # the first step reports the error
        return None


def min_group_size(advantage: Advantage, size: int) -> int:
    """Return the fewest rollouts of a group of a size that a step trains on, after failures took the others.

    It is one, unless the advantage refuses a single rollout, or gives it zero or its bare reward in place of a
    comparison. Then it is the smallest size that the advantage compares.
    """
    alone = trial_advantages(advantage)
    bare = alone == TRIAL_REWARDS != trial_advantages(advantage, (0, 0))
    if alone is None or (any(alone) and not bare):
        return 1
    return next((few for few in range(2, size + 1) if any(trial_advantages(advantage, (0,) * few) or ())), 1)
