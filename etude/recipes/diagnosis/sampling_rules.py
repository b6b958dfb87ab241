"""Rules about lengths, engines, staleness and memory."""

from __future__ import annotations

from collections.abc import Iterator

from etude.recipes.diagnosis.evidence import Evidence, RunFinding, has_learned

CUT_SHARE = 0.25
LIMIT_SHARE = 0.9
BUSY_SHARE = 0.5
"""Share of the time under which an engine counts as idle."""
WAIT_SHARE = 0.3
"""Share of a step's time that makes a wait worth a remedy."""
SHORT_STEP_S = 1.0
"""Steps that are shorter are mostly fixed costs."""
FULL_SHARE = 0.9


def answers_cut_off(evidence: Evidence) -> Iterator[RunFinding]:
    """Find answers that are cut off, before the run has learned."""
    share = evidence.recent("truncated")
    if share is None or share.mean < CUT_SHARE or has_learned(evidence):
        return
    limit = evidence.option("sampling.max_tokens")
    what = f"{share.mean:.0%} of the rollouts are cut off" + (f" at `sampling.max_tokens={limit}`." if limit else ".")
    remedy = (
        "Raise `sampling.max_tokens`. If answers never end, check `chat.template`, and read `etude answers RUN`. "
        "`mask_truncated=true` leaves them out of the loss."
    )
    yield share.finding(what, remedy, 0.4 + 0.4 * share.mean)


def lengths_at_limit(evidence: Evidence) -> Iterator[RunFinding]:
    """Find answers whose mean length is nearly the longest allowed, before the run has learned."""
    length, limit = evidence.recent("answer_length"), evidence.number("sampling.max_tokens", 0.0)
    several_turns = evidence.recent("turns")
    if length is None or not limit or several_turns is not None or has_learned(evidence):
        return
    if length.mean < LIMIT_SHARE * limit:
        return
    what = f"The mean answer has {length.mean:.4g} tokens, and `sampling.max_tokens={limit:g}` is the longest."
    remedy = "Raise `sampling.max_tokens`; if longer answers earn no more, the preset `dapo` penalizes length."
    yield length.finding(what, remedy, 0.55)


def engines_idle(evidence: Evidence) -> Iterator[RunFinding]:
    """Find engines that wait: for judges, tools or the trainer, or for rollouts that may begin."""
    total, busy, collect = (evidence.recent(name) for name in ("time/step", "engine/busy_seconds", "time/collect"))
    if total is None or busy is None or collect is None or total.mean < SHORT_STEP_S:
        return
    stale = evidence.number("max_staleness", 0) > 0
    available = total.mean if stale else collect.mean
    share = busy.mean / available
    if share >= BUSY_SHARE or collect.mean < WAIT_SHARE * total.mean:
        return
    judging = evidence.recent("judging_seconds")
    where = "of a step" if stale else "of the collection"
    what = (
        f"The engine computes in {share:.0%} {where}, and the trainer waits {collect.mean:.3g} s a step for rollouts."
    )
    if judging is not None and judging.mean > available / 4:
        remedy = f"Judging takes {judging.mean:.3g} s: `judging.workers=4`."
    elif evidence.option("agent.path") or evidence.option("agent.sources"):
        remedy = (
            "More attempts at a time: `agent.max_concurrency`, `agent.runners`, `collect.tasks`; or `max_staleness=1`."
        )
    else:
        remedy = "More answers at a time: `collect.tasks`, `rollout.max_num_seqs`; or `max_staleness=1`."
    yield busy.finding(what, remedy, 0.35, **{"time/step": total.mean, "time/collect": collect.mean})


def staleness_at_bound(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a staleness bound that makes the trainer wait."""
    bound = evidence.number("max_staleness", 0)
    mean, total, collect = (evidence.recent(name) for name in ("staleness/mean", "time/step", "time/collect"))
    if not bound or mean is None or total is None or collect is None or len(mean) < 10:
        return
    if mean.mean < 0.9 * bound or collect.mean < WAIT_SHARE * total.mean:
        return
    what = (
        f"Rollouts are {mean.mean:.2g} versions old, as `max_staleness={bound:g}` allows, and the trainer still waits "
        f"for them in {collect.mean / total.mean:.0%} of a step."
    )
    remedy = (
        "Raise `max_staleness`, or `collect.order=windowed`, which leaves slow groups to later steps; "
        "`etude simulate RUN` shows what each would bring."
    )
    yield mean.finding(what, remedy, 0.3, **{"time/collect": collect.mean, "time/step": total.mean})


def memory_nearly_full(evidence: Evidence) -> Iterator[RunFinding]:
    """Find a process that uses nearly all memory of its device."""
    share = evidence.recent("memory_share", fewest=1)
    if share is None or share.values.max() < FULL_SHARE:
        return
    what = f"The peak of memory is {share.values.max():.0%} of the device."
    remedy = (
        "`etude plan` with the run's options shows each part. Lower `train.max_tokens_per_micro_batch` or "
        "`rollout.kv_gib`, or set `train.activation_checkpointing=full`."
    )
    yield share.finding(what, remedy, 0.5)
