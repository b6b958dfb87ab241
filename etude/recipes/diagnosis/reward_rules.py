"""Rules about rewards, groups and evaluations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from etude.recipes.diagnosis.evidence import SURE, Evidence, RunFinding, Series, has_learned, rise, rises

FLAT_STEPS = 30
"""Steps before a reward that has not risen counts as flat."""
LEVEL_SHARE = 0.9
"""Share of groups with equal rewards from which too little is compared."""
FAILED_SHARE = 0.05
"""Share of failed attempts that biases the training data."""
FEWEST_SCORES = 3
FEWEST_REWARDS = 3
"""Steps in which a reward must be the same to be constant."""
MOSTLY_CUT = 0.5
"""Share of rollouts that are cut off, from which that may be why they have no reward."""


def reward_flat(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a reward that has not risen since the run began, while no evaluation has either."""
    reward = evidence.series("reward")
    if len(reward) < FLAT_STEPS or _rewards_nothing(evidence):
        return
    gain, error = rise(reward)
    if gain > error or any(rises(score) for score in _scores(evidence)):
        return
    what = (
        f"The reward has not risen in {len(reward)} steps: {reward.head().mean:.3g} in the first ones, "
        f"{reward.tail().mean:.3g} in the last ones."
    )
    remedy = (
        "Read `etude answers RUN`: easier tasks or partial credit help if answers never succeed. Then raise "
        "`train.learning_rate`, or `collect.tasks` if the reward is noisy."
    )
    yield reward.finding(what, remedy, 0.7, gain=gain, standard_error=error)


def reward_constant(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a reward that has been the same for every rollout since the run began."""
    reward, share = evidence.series("reward"), evidence.series("zero_variance_share")
    if len(reward) < FEWEST_REWARDS or _rewards_nothing(evidence):
        return
    if np.ptp(reward.values) > 0.0 or not len(share) or share.values.min() < 1.0:
        return
    value = reward.values[0]
    what = f"Every rollout of {len(reward)} steps had the same reward, {value:g}: there is nothing to learn from."
    cut = evidence.recent("truncated", fewest=1)
    if cut is not None and cut.mean >= MOSTLY_CUT:
        what += f" {cut.mean:.0%} of them were cut off before their end."
    name = evidence.option("reward.name")
    judged = f"`reward={name}`" if name else "the reward"
    remedy = (
        f"Read `etude answers RUN`. If right answers are among them, {judged} does not see them: compare their format, "
        "and the column of the expected answer (`data.columns.answer`). If none is right, take easier tasks, give "
        "partial credit, or raise `sampling.max_tokens`. If all are right, take harder tasks."
    )
    yield reward.finding(what, remedy, 0.98, zero_variance_share=1.0)


def groups_level(evidence: Evidence) -> Iterator[RunFinding]:
    """Find groups whose rollouts nearly all earn the same, before the run has learned."""
    share, reward = evidence.recent("zero_variance_share"), evidence.series("reward")
    if share is None or share.mean < LEVEL_SHARE or has_learned(evidence) or _rewards_nothing(evidence):
        return
    what = f"{share.mean:.0%} of the groups have equal rewards, and teach nothing."
    remedy = (
        "The tasks are too hard or too easy: `collect.refill=3`, `data.sampler=curriculum`, `collect.group_size=16`. "
        "If they should not be, check the reward in `etude answers RUN`."
    )
    yield share.finding(what, remedy, 0.9 * share.mean, reward=reward.tail().mean)


def reward_gamed(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a reward, or a part of one, that rises while the scores of the evaluation fall."""
    fallen = [score for score in _scores(evidence) if _falls(score)]
    if not fallen:
        return
    score = fallen[0]
    parts = [evidence.series(name) for name in [*evidence.names("reward/*"), "reward"]]
    since = int(score.steps[int(score.values.argmax())])
    for part in parts:
        later = Series(part.name, part.steps[part.steps >= since], part.values[part.steps >= since])
        if len(later) >= FEWEST_SCORES and rises(later):
            what = (
                f"`{part.name}` rises from {later.values[0]:.3g} to {later.values[-1]:.3g}, while `{score.name}` falls "
                f"from {score.values.max():.3g} in step {since} to {score.values[-1]:.3g}."
            )
            remedy = (
                "The policy exploits the reward: read `etude answers RUN`, correct or remove that part, add "
                "`kl=reverse`, and use the best checkpoint (`--best`)."
            )
            yield later.finding(what, remedy, 0.95, **{score.name: float(score.values[-1])})
            return


def reward_fails(evidence: Evidence) -> Iterator[RunFinding]:
    """Find attempts that fail too often, with their most frequent cause."""
    share = evidence.recent("failed_share", fewest=3)
    if share is None or share.mean < FAILED_SHARE:
        return
    counts = {name: evidence.series(name).tail() for name in evidence.names("failed_attempts/*")}
    recent = {name: float(count.values[count.steps >= share.steps[0]].sum()) for name, count in counts.items()}
    cause = max(recent, key=lambda name: recent[name], default="")
    why = f", mostly with the outcome `{cause.partition('/')[2]}`" if cause else ""
    what = f"{share.mean:.0%} of the attempts fail{why}. Training sees only the others, which biases it."
    remedy = (
        "The log has the last error of each step. A slow reward: `judging.timeout`, `judging.workers=4`. Slow answers: "
        "`collect.timeout`, `sampling.max_tokens`. A reward that raises: `judging.on_error=stop` shows where."
    )
    yield share.finding(what, remedy, 0.5 + share.mean, **({cause: recent[cause]} if cause else {}))


def _scores(evidence: Evidence) -> list[Series]:
    """Return the scores of the evaluations that have at least three."""
    scores = [evidence.series(name, from_step=0) for name in evidence.names("eval/mean@*")]
    return [score for score in scores if len(score) >= FEWEST_SCORES]


def _rewards_nothing(evidence: Evidence) -> bool:
    """Return whether the run learns from no reward, as a distillation does."""
    return bool(evidence.option("reward.name") == "nothing")


def _falls(score: Series) -> bool:
    """Return whether a score is clearly below its best, in its last two values.

    The best of many noisy scores is above their mean, so the margin is one standard deviation larger.
    """
    best, last = float(score.values.max()), float(score.values[-2:].max())
    noise = float(np.diff(score.values).std() / np.sqrt(2.0))
    return last < best - max(0.1 * abs(best), (SURE + 1) * noise)
