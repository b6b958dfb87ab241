"""Values in requests and replies arrive unchanged, to the last bit, and what has another form is refused."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import DataError
from etude.records import Outcome, Task, Turn
from etude.store.http.checks import VERBS, read_call
from etude.store.http.forms import decode_as, decode_turn, encode_arguments, encode_as, encode_reward, encode_turn
from etude.store.journal.blobs import pack_turn
from etude.store.journal.json_values import to_json
from etude.store.queue.rollout_queue import AttemptId, Claim, RolloutLimits, RolloutRequest, RunnerState
from tests.store.made import turn

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
LIMITS = st.builds(
    RolloutLimits,
    timeout_s=st.none() | st.floats(0.001, 1e6),
    unresponsive_s=st.floats(0.001, 1e6),
    queue_timeout_s=st.none() | st.floats(0.001, 1e6),
    max_attempts=st.integers(1, 100),
    retry_on=st.sampled_from([(), (Outcome.FAILED,), RolloutLimits().retry_on]),
)
TASKS = st.builds(Task, st.integers(0, 2**63 - 1), st.dictionaries(st.text(), JSON, max_size=3), st.text())


def arrived(verb: str, **arguments: Any) -> Any:
    """Return the arguments of a call after they were sent to a server, which checks them."""
    body = to_json(encode_arguments(VERBS[verb], arguments)).encode()
    return read_call(VERBS[verb], body).arguments


def returned(kind: Any, value: Any) -> Any:
    """Return a value after it was sent in a reply."""
    return decode_as(kind, json.loads(to_json(encode_as(kind, value))))


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal; NaN equals itself."""
    return repr(left) == repr(right)


@given(TASKS, st.integers(0, 9), st.none() | st.integers(0, 2**63 - 1), LIMITS)
def test_requested_rollouts_arrive_unchanged(task: Task, sample: int, id: int | None, limits: RolloutLimits) -> None:
    wanted = RolloutRequest(task, sample, id, "val", limits)
    assert same(arrived("enqueue", wanted=[wanted])["wanted"], [wanted])


@given(TASKS, LIMITS, st.dictionaries(st.text(), JSON, max_size=3))
def test_claims_arrive_unchanged(task: Task, limits: RolloutLimits, resources: dict[str, Any]) -> None:
    claim = Claim(AttemptId(1, 2), task, "train", limits, resources, "a", "b")
    assert same(returned(Claim, claim), claim)
    runner = RunnerState("r", (AttemptId(1, 2), AttemptId(3, 4)), 0.5, resources)
    assert same(returned(RunnerState, runner), runner)


@given(st.integers(0, 20), st.integers(0, 2**31), st.none() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_turn_arrives_to_the_last_bit(tokens: int, anchor: int, reward: float | None) -> None:
    bound = replace(turn(3, tokens, anchor=anchor, reward=reward), grammar='start: "é"')
    for recorded in (bound, bare(turn(0, tokens))):
        read = arrived("record_turn", attempt=AttemptId(0, 0), turn=recorded)["turn"]
        for other in (returned(Turn, recorded), read):
            assert pack_turn(other) == pack_turn(recorded)
            names = ("index", "model", "tags", "reward", "anchor", "observed", "opened", "grammar")
            assert [getattr(other, name) for name in names] == [getattr(recorded, name) for name in names]
            assert (other.completion.finish_reason, other.completion.text) == ("stop", recorded.completion.text)


@pytest.mark.parametrize(
    "document",
    [
        {"ordinal": "3", "fields": {}},
        {"ordinal": 3, "fields": {}, "more": 1},
        {"ordinal": 3.5, "fields": {}},
        {"ordinal": 2**63, "fields": {}},
        {"ordinal": True, "fields": {}},
        {"fields": {}},
    ],
)
def test_a_part_of_a_request_is_checked_at_any_depth(document: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"wanted\.0\.task\.(ordinal|more)"):
        read_call(VERBS["enqueue"], json.dumps({"wanted": [{"task": document}]}).encode())


def test_a_reply_of_a_newer_server_may_have_more_fields() -> None:
    runner = RunnerState("r", (AttemptId(1, 2),), 0.5, {})
    assert decode_as(RunnerState, encode_as(RunnerState, runner) | {"more": 1}) == runner


def bare(recorded: Any) -> Any:
    """Return a turn without its optional fields."""
    return replace(recorded, completion=replace(recorded.completion, raw_logp=None, top_ids=None, top_logp=None))


@given(st.integers(0, 200), st.binary(max_size=40))
def test_a_turn_with_missing_or_additional_bytes_is_refused(at: int, more: bytes) -> None:
    document = encode_turn(turn())
    whole = pack_turn(turn())
    broken = whole[: at % len(whole)] + more
    if broken == whole:
        return
    changed = document | {"arrays": base64.b64encode(broken).decode()}
    try:
        read = decode_turn(changed)
    except DataError:
        return
    assert len(pack_turn(read)) == len(broken), "every byte is one of some array"


def test_a_reward_is_a_finite_number_or_several() -> None:
    assert encode_reward({"a": 1, "b": 0.5}) == {"a": 1.0, "b": 0.5}
    for reward in (math.nan, {"a": math.inf}):
        with pytest.raises(DataError):
            encode_reward(reward)
