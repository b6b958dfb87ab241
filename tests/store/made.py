"""Small turns and event sequences for the tests of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from etude.records import Completion, Outcome, Turn
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    Event,
    RolloutQueued,
    TaskIssued,
    TurnRecorded,
)
from etude.store.journal.event_records import encode
from etude.support import EncodedSet, Support, encode_ids


def turn(
    index: int = 0, tokens: int = 3, *, seed: int = 0, reward: float | None = None, anchor: int | None = None
) -> Turn:
    """Return a turn of random tokens, with every optional column."""
    draw = np.random.default_rng([seed, index])
    ids = draw.integers(0, 1000, tokens)
    completion = Completion(
        ids=ids,
        logp=-draw.random(tokens),
        version=np.full(tokens, seed),
        finish_reason="stop",
        text=f"answer {seed}.{index} ✓",
        raw_logp=-draw.random(tokens),
        top_ids=draw.integers(0, 1000, (tokens, 2)),
        top_logp=-draw.random((tokens, 2)),
        support=Support.build([_set_with(id) for id in ids.tolist()]),
    )
    prompt = draw.integers(0, 1000, 4)
    shown = Turn(prompt, completion, index, tags=("solver",), reward=reward, anchor=anchor)
    return replace(shown, observed=index % 4 or None, opened=index % 2)


def _set_with(id: int) -> EncodedSet | None:
    """Return a set that an id is in: for every third id it alone, or a large set, or the whole vocabulary."""
    if id % 3 == 2:
        return None
    ids = {id} if id % 3 else {id, *range(500, 800)}
    return encode_ids(sorted(ids), 10_000)


def group(task: int, size: int = 2) -> list[Event]:
    """Return a task and the rollouts queued for it: rollout `task * size + sample`."""
    issued = TaskIssued(
        task, 100 + task, "sums", {"prompt": [{"role": "user", "content": f"{task}+1?"}], "answer": "?"}
    )
    return [issued, *(RolloutQueued(task * size + sample, task, sample) for sample in range(size))]


def tried(
    rollout: int, reward: float = 1.0, attempt: int = 0, outcome: Outcome = Outcome.SUCCEEDED, turns: int = 1
) -> list[Event]:
    """Return the events of one complete attempt."""
    return [
        AttemptStarted(rollout, attempt),
        *(TurnRecorded(rollout, attempt, turn(index, seed=rollout)) for index in range(turns)),
        AttemptRewarded(rollout, attempt, reward, {"right": reward}),
        AttemptEnded(rollout, attempt, outcome, "" if outcome is Outcome.SUCCEEDED else "it broke"),
    ]


def same(left: Sequence[Event], right: Sequence[Event]) -> bool:
    """Return whether two lists of events are equal to the last bit. (Records that hold arrays equal only
    themselves.)"""
    return [encode(event) for event in left] == [encode(event) for event in right]
