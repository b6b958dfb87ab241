"""The rule about a reward that collapsed: the step, the update before it, and the option that made it too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from etude.recipes.diagnosis.evidence import RECENT, SURE, Evidence, RunFinding, Series

FALLEN = 0.5
"""Share of the best reward under which a reward has collapsed."""
LASTING = 3
"""Steps that the reward stays there; one low step may be chance."""
SMOOTHED = 3
"""Steps whose mean is a level of the reward, so that one lucky step is not the best one."""
CUT_JUMP = 0.2
"""Rise of the share of rollouts that are cut off."""
FACTOR = 1.5
"""Change of the length of answers, or of their perplexity, upwards or downwards."""
MEASURED = 1e-7
"""Divergence under which it says nothing: each update measures it before it moves the policy, so the first has none."""
USUAL_RATES = "1e-6 for billions of parameters, 1e-5 for hundreds of millions, 1e-4 for tiny models"


def _is_cut(before: float, after: float) -> bool:
    return after - before > CUT_JUMP


def _is_other(before: float, after: float) -> bool:
    return after > FACTOR * before or before > FACTOR * after


JUMPS: dict[str, Callable[[float, float], bool]] = {
    "truncated": _is_cut,
    "answer_length": _is_other,
    "mismatch/sampler_perplexity": _is_other,
}
"""The metrics that tell a policy that changed from tasks that did, each with the test of its means around the fall."""


def reward_collapsed(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a reward that fell below half of its best and stayed there, while the answers changed."""
    reward = evidence.series("reward")
    best, place = _find_fall(reward)
    if place is None:
        return
    fell = int(reward.steps[place])
    around = {name: _means_around(evidence.series(name), fell) for name in JUMPS}
    jumps = {name: means for name, means in around.items() if means is not None and JUMPS[name](*means)}
    if not jumps:
        return
    name, (before, after) = next(iter(jumps.items()))
    staleness = evidence.series("staleness/mean")
    stale = staleness.values[staleness.steps == fell]
    update = max(fell - 1 - round(float(stale.sum())), 1)
    measured = _measure_update(evidence, update)
    low = Series("reward", reward.steps[place:], reward.values[place:])
    what = (
        f"The reward fell from {best:.3g} to {low.values[0]:.3g} in step {fell} and stayed low, while `{name}` went "
        f"from {before:.3g} to {after:.3g}. The update of step {update} ruined the policy: {_describe(measured)}."
    )
    shown = {name: after for name, (_, after) in jumps.items()} | measured
    yield low.finding(what, _remedy(evidence, measured, update), 1.0, **shown)


def _remedy(evidence: Evidence, measured: Mapping[str, float], update: int) -> str:
    rate = measured.get("learning_rate", evidence.number("train.learning_rate", 0.0))
    smaller = [f"`{name}=1`" for name in ("mini_batches", "ppo_epochs") if evidence.number(name, 1) > 1]
    smaller += ["`kl=reverse`"] if evidence.option("kl") is None else ["a larger `kl.coefficient`"]
    again = "Start again" + (f", or from a checkpoint before step {update}." if update > 1 else ".")
    return (
        f"Lower `train.learning_rate={rate:g}`; usual is {USUAL_RATES}. Then {', '.join(smaller)}, or a lower "
        f"`train.max_grad_norm`. {again}"
    )


def _find_fall(reward: Series) -> tuple[float, int | None]:
    """Return the best level of a reward, and the place of the step from which on it is under half of it."""
    values = reward.values
    if len(values) <= LASTING:
        return 0.0, None
    counts = np.minimum(np.arange(1, len(values) + 1), SMOOTHED)
    best = float((np.convolve(values, np.ones(SMOOTHED))[: len(values)] / counts).max())
    if best <= 0.0:
        return best, None
    high = np.flatnonzero(values >= FALLEN * best)
    place = int(high[-1]) + 1
    if len(high) > 1 and np.diff(high).max() > LASTING:
        return best, None  # it has recovered before: tasks of other difficulty, and no ruined policy
    before, after = values[max(0, place - RECENT) : place], values[place:]
    if len(after) < LASTING:
        return best, None
    noise = np.concatenate([np.diff(before), np.diff(after)]).std() / np.sqrt(2.0)
    error = noise * np.sqrt(1 / len(before) + 1 / len(after))
    return best, place if before.mean() - after.mean() > SURE * error else None


def _means_around(metric: Series, step: int) -> tuple[float, float] | None:
    """Return the means of a metric in the steps before a step, and from it on; None without either."""
    before = metric.values[metric.steps < step][-RECENT:]
    after = metric.values[metric.steps >= step][:RECENT]
    return (float(before.mean()), float(after.mean())) if len(before) and len(after) else None


def _measure_update(evidence: Evidence, step: int) -> dict[str, float]:
    """Return what was measured of an update: its rate, its gradient, and how far it moved the policy.

    The divergence from the reference is that of the policy before the update, so the next step has its effect.
    """
    measured: dict[str, float] = {}
    for name, at, least in (
        ("learning_rate", step, 0.0),
        ("grad_norm", step, 0.0),
        ("policy_kl", step, MEASURED),
        ("kl", step + 1, MEASURED),
    ):
        metric = evidence.series(name)
        for value in metric.values[(metric.steps == at) & (metric.values > least)]:
            measured[name] = float(value)
    return measured


def _describe(measured: Mapping[str, float]) -> str:
    names = {
        "learning_rate": "learning rate {:g}",
        "grad_norm": "gradient norm {:.3g}",
        "policy_kl": "{:.2g} nats a token from the policy that sampled",
        "kl": "then {:.2g} nats a token from the reference",
    }
    return ", ".join(names[name].format(value) for name, value in measured.items())
