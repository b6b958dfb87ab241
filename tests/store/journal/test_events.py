"""Events are immutable: checked and converted to plain values at creation, and read back as they were written."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DataError, RewardError, StoreError
from etude.records import Outcome
from etude.store.journal.event_records import EventRecord, decode, encode
from etude.store.journal.events import (
    EVENTS,
    AdvantagesEstimated,
    AttemptEnded,
    AttemptReady,
    AttemptRewarded,
    AttemptStarted,
    EvaluationNumbered,
    Event,
    LateResultRecorded,
    NoteRecorded,
    PolicyEvaluated,
    PolicyPublished,
    ResourcePut,
    RolloutCancelled,
    RolloutExpired,
    RolloutQueued,
    RolloutResumed,
    RolloutsAdmitted,
    RolloutSealed,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.queue.rollout_limits import RolloutLimits
from tests.store.made import turn

EXAMPLES: list[Event] = [
    TaskIssued(7, 1203, "gsm8k", {"prompt": "2+2?", "extra": {"none": None, "list": [1, 2.5, True, "\ud800 \x00 ✓"]}}),
    TaskDropped(7, 3, "flat"),
    RolloutQueued(70, 7, 2, "val", RolloutLimits(timeout_s=None, retry_on=(Outcome.FAILED,))),
    RolloutCancelled(70, "enough"),
    RolloutExpired(70, "600 s in the queue"),
    RolloutResumed(70, 3),
    RolloutSealed(70),
    AttemptStarted(70, 0, "runner-1"),
    AttemptReady(70, 0),
    TurnRecorded(70, 0, turn(2, reward=0.5, anchor=-(2**63)), at=1.75e9, began=1.75e9 - 2.5),
    TurnRewarded(70, 0, 2, 0.1 + 0.2, {"tool": 0.3}),
    NoteRecorded(70, 0, "tool", {"calls": [1, 2.5, None, "✓"]}),
    AttemptRewarded(70, 0, 0.1 + 0.2, {"right": 1.0, "short": -0.5}, truncated=True, paid=0.7, role=1),
    AttemptEnded(70, 0, Outcome.TIMED_OUT, "after 60 s", retry=True, ended_by_queue=True),
    LateResultRecorded(70, 0, Outcome.SUCCEEDED, "", 1.0, {"right": 1.0}),
    RolloutsAdmitted(3, (70, 71), end=9, version=2, skipped=(5, 8)),
    AdvantagesEstimated(3, (70, 71), (1 / 3, float("nan"))),
    PolicyEvaluated(3, "val", {"mean@4": float("nan"), "pass@4": 1.0}, [{"answer": "4", "reward": 1.0}]),
    PolicyPublished(4, 3),
    EvaluationNumbered("val-3f20", 2071),
    ResourcePut("endpoint", 1, {"base_url": "http://127.0.0.1:8000/v1", "model": "policy"}),
]


def test_there_is_an_example_of_every_event() -> None:
    assert {type(event) for event in EXAMPLES} == set(EVENTS.values())


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_an_event_is_read_back_as_written(event: Event) -> None:
    written = encode(event)
    read = decode(written)
    assert type(read) is type(event) and encode(read) == written
    assert written.body.isascii() and isinstance(json.loads(written.body), dict)


def test_large_arrays_are_stored_outside_the_json() -> None:
    stored = {event.kind: encode(event) for event in EXAMPLES}
    assert {kind for kind, record in stored.items() if record.payload} == {"turn_recorded", "policy_evaluated"}
    assert "ids" not in stored["turn_recorded"].body and "samples" not in stored["policy_evaluated"].body


def test_only_events_of_a_rollout_are_indexed_by_it() -> None:
    filed = {event.kind: encode(event).rollout for event in EXAMPLES}
    without = {
        "task_issued",
        "task_dropped",
        "rollouts_admitted",
        "advantages_estimated",
        "policy_evaluated",
        "policy_published",
        "evaluation_numbered",
        "resource_put",
    }
    assert filed == {kind: None if kind in without else 70 for kind in EVENTS}


def test_a_field_added_later_takes_its_default() -> None:
    old = EventRecord("attempt_rewarded", 1, '{"rollout":1,"attempt":0,"reward":2.0}', b"")
    assert decode(old) == AttemptRewarded(1, 0, 2.0, {}, truncated=False)
    assert decode(EventRecord("rollout_queued", 1, '{"rollout":1,"task":0,"sample":2}', b"")) == RolloutQueued(1, 0, 2)
    assert decode(EventRecord("attempt_started", 1, '{"rollout":1,"attempt":0}', b"")) == AttemptStarted(1, 0)
    ended = EventRecord(
        "attempt_ended", 1, '{"rollout":1,"attempt":0,"outcome":"failed","error":"!","retry":false}', b""
    )
    assert decode(ended) == AttemptEnded(1, 0, Outcome.FAILED, "!")
    written = encode(TurnRecorded(1, 0, turn(0), 5.0, 4.0))
    body = {name: value for name, value in json.loads(written.body).items() if name not in ("at", "began")}
    turned = decode(written._replace(body=json.dumps(body)))
    assert isinstance(turned, TurnRecorded) and (turned.at, turned.began) == (0.0, 0.0)


@pytest.mark.parametrize("event", EVENTS.values())
def test_the_kind_of_an_event_is_its_name_in_the_code(event: type[Event]) -> None:
    assert event.kind == re.sub(r"(?<!^)([A-Z])", r"_\1", event.__name__).lower()


def test_an_event_of_a_newer_version_is_reported() -> None:
    with pytest.raises(StoreError, match=r"kind 'dreamt'; a newer version wrote it"):
        decode(EventRecord("dreamt", None, "{}", b""))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_is_a_finite_number(value: float) -> None:
    with pytest.raises(RewardError, match="Attempt 1 of rollout 5: reward is"):
        AttemptRewarded(5, 1, value)
    with pytest.raises(RewardError, match="reward of its turns is"):
        AttemptRewarded(5, 1, 0.0, paid=value)
    with pytest.raises(RewardError, match="reward part 'right' is"):
        AttemptRewarded(5, 1, 0.0, {"right": value})
    with pytest.raises(RewardError, match="reward of turn 2 is"):
        TurnRewarded(5, 1, 2, value)
    with pytest.raises(RewardError, match="late reward is"):
        LateResultRecorded(5, 1, Outcome.SUCCEEDED, reward=value)


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.CANCELLED])
def test_succeeded_and_cancelled_attempts_are_not_retried(outcome: Outcome) -> None:
    with pytest.raises(DataError, match=f"ended {outcome}, which cannot be retried"):
        AttemptEnded(5, 0, outcome, retry=True)


def test_numpy_in_a_task_becomes_plain() -> None:
    fields = {"n": np.int64(3), "x": np.float32(0.5), "ok": np.bool_(True), "all": np.array([[1, 2]]), "t": (1, "a")}
    task = TaskIssued(0, 0, "s", fields)
    assert task.fields == {"n": 3, "x": 0.5, "ok": True, "all": [[1, 2]], "t": [1, "a"]}
    assert RolloutsAdmitted(1, tuple(np.arange(2)), end=0, version=0).rollouts == (0, 1)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"a": {"image": b"png"}}, "Task 0: fields.a.image is of type bytes, which a journal cannot store"),
        ({"a": [1, {2}]}, "Task 0: fields.a[1] is of type set"),
        ({"a": {1: "x"}}, "Task 0: fields.a has the key 1; in a journal every key must be text"),
        ({"a": np.longdouble(1)}, "Task 0: fields.a is of type longdouble"),
    ],
)
def test_values_that_json_lacks_are_named(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(DataError, match=re.escape(sentence)):
        TaskIssued(0, 0, "s", fields)
    with pytest.raises(DataError, match=re.escape(sentence.removeprefix("Task 0: fields"))):
        NoteRecorded(0, 0, "seen", fields)
    with pytest.raises(DataError, match=re.escape(sentence.removeprefix("Task 0: fields"))):
        ResourcePut("prompt", 1, fields)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.text())
def test_any_plain_fields_come_back(fields: dict[str, object], source: str) -> None:
    task = TaskIssued(1, 2, source, fields)
    assert decode(encode(task)) == task and task.fields == fields
