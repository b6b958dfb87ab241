"""Messages over HTTP arrive unchanged, to the last bit."""

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
from etude.records import Outcome, Task
from etude.store.http.json_records import (
    decode_claim,
    decode_runner,
    decode_turn,
    encode_claim,
    encode_reward,
    encode_rollout_request,
    encode_runner,
    encode_turn,
)
from etude.store.http.request_models import ClaimModel, Runner, TurnModel
from etude.store.http.requests import EnqueueRequest
from etude.store.http.write_requests import RecordTurnRequest
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


def sent(document: Any) -> Any:
    return json.loads(to_json(document))


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal; NaN equals itself."""
    return repr(left) == repr(right)


@given(TASKS, st.integers(0, 9), st.none() | st.integers(0, 2**63 - 1), LIMITS)
def test_requested_rollouts_arrive_unchanged(task: Task, sample: int, id: int | None, limits: RolloutLimits) -> None:
    wanted = RolloutRequest(task, sample, id, "val", limits)
    (arrived,) = EnqueueRequest.model_validate_json(to_json({"wanted": [encode_rollout_request(wanted)]})).wanted
    assert same(arrived.to_request(), wanted)


@given(TASKS, LIMITS, st.dictionaries(st.text(), JSON, max_size=3))
def test_claims_arrive_unchanged(task: Task, limits: RolloutLimits, resources: dict[str, Any]) -> None:
    claim = Claim(AttemptId(1, 2), task, "train", limits, resources, "a", "b")
    assert same(decode_claim(sent(ClaimModel(**encode_claim(claim)).model_dump())), claim)
    runner = RunnerState("r", (AttemptId(1, 2), AttemptId(3, 4)), 0.5, resources)
    assert same(decode_runner(sent(Runner(**encode_runner(runner)).model_dump())), runner)


@given(st.integers(0, 20), st.integers(0, 2**31), st.none() | st.floats(allow_nan=False, allow_infinity=False))
def test_a_turn_arrives_to_the_last_bit(tokens: int, anchor: int, reward: float | None) -> None:
    for recorded in (turn(3, tokens, anchor=anchor, reward=reward), bare(turn(0, tokens))):
        document = encode_turn(recorded)
        request = {"rollout": 0, "attempt": 0, "turn": document}
        read = RecordTurnRequest.model_validate_json(to_json(request)).turn
        for arrived in (decode_turn(sent(TurnModel(**document).model_dump())), decode_turn(read.model_dump())):
            assert pack_turn(arrived) == pack_turn(recorded)
            names = ("index", "model", "tags", "reward", "anchor", "observed", "opened")
            assert [getattr(arrived, name) for name in names] == [getattr(recorded, name) for name in names]
            assert (arrived.completion.finish_reason, arrived.completion.text) == ("stop", recorded.completion.text)


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
        arrived = decode_turn(changed)
    except DataError:
        return
    assert len(pack_turn(arrived)) == len(broken), "every byte is one of some array"


def test_a_reward_is_a_finite_number_or_several() -> None:
    assert encode_reward({"a": 1, "b": 0.5}) == {"a": 1.0, "b": 0.5}
    for reward in (math.nan, {"a": math.inf}):
        with pytest.raises(DataError):
            encode_reward(reward)
