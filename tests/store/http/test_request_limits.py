"""The size of a body's content is known before it is parsed, and stored data of each client is bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import AgentError, DataError
from etude.store.http import request_limits as bounds
from etude.store.http.background_thread import BackgroundThread
from etude.store.http.reply_cache import CacheQuota, HttpReply, ReplyCache
from etude.store.http.request_limits import (
    RequestRefusedError,
    check_json_size,
)
from etude.store.journal.json_values import NOTE_BYTES, NOTE_VALUES, json_size
from etude.store.queue.waiters import RUNNERS, RunnerRegistry

TEXTS = st.text(st.sampled_from('ab"\\[]{},:é\n'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers(0, 99) | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


def held(value: Any) -> tuple[int, int]:
    """Return the number of values in a value, counting an empty list or object as one, and the number of its levels."""
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    if inner is None:
        return 0, 0
    counts = [held(value_within) for value_within in inner]
    return (len(inner) or 1) + sum(count for count, _ in counts), 1 + max((depth for _, depth in counts), default=0)


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_values_of_a_body_are_counted_exactly(value: Any, ascii: bool, piece: int) -> None:
    count, depth = held(value)
    body = json.dumps(value, ensure_ascii=ascii).encode()
    before, bounds._PIECE = bounds._PIECE, piece
    try:
        check_json_size(body, count, max(depth, 1))
        if len(body) > piece and count:
            with pytest.raises(RequestRefusedError, match="values") as raised:
                check_json_size(body, count - 1, max(depth, 1))
            assert raised.value.status == 413
        if depth > 1:
            with pytest.raises(RequestRefusedError, match="nested too deeply") as raised:
                check_json_size(body, count, depth - 1)
            assert raised.value.status == 400
    finally:
        bounds._PIECE = before


@pytest.mark.parametrize(
    "body",
    [b"[" + b"[]," * 9_000_000 + b"1]", b"{" + b'"":"",' * 4_000_000 + b"}", b'"' * 8_000_000, b"[" * 200_000],
    ids=["lists", "entries", "quotes", "deep"],
)
def test_bodies_that_take_long_to_parse_are_refused_early(body: bytes) -> None:
    with pytest.raises(RequestRefusedError):
        check_json_size(body)


@pytest.mark.parametrize("body", [b"[" * 90, b"]]]}", b'{"a', b"\\" * 70_000, b""])
def test_malformed_json_is_left_to_the_parser(body: bytes) -> None:
    check_json_size(body)


def test_large_notes_are_refused() -> None:
    assert json_size({"text": "x" * 1000, "list": [1] * 1000}, "It")
    for large in ("x" * (NOTE_BYTES + 1), [[]] * (NOTE_VALUES + 1), {"é" * NOTE_BYTES: 1}, 2 ** (5 * NOTE_BYTES)):
        with pytest.raises(DataError, match="The note is too large"):
            json_size(large, "The note")


def test_an_event_that_is_too_large_is_refused_at_the_agents_call() -> None:
    from etude import emit

    with pytest.raises(AgentError, match=f"{NOTE_VALUES} values"):
        emit.event("many", [[]] * (NOTE_VALUES + 1))


def test_the_replies_of_one_key_stay_within_its_quota_and_displace_no_others() -> None:
    async def story() -> None:
        once, few = ReplyCache(), CacheQuota(answers=10, bytes=1000)

        async def reply() -> HttpReply:
            return 200, bytes(50)

        await once.get_or_run("mine", reply, "me")
        for number in range(500):
            await once.get_or_run(number, reply, "other", few)
        assert once.contains("mine") and [once.contains(number) for number in (0, 489, 490, 499)] == [
            False,
            False,
            True,
            True,
        ]
        assert len(once._replies) == 11 and once._bytes == 550
        assert all(asked.task is None for asked in once._replies.values()), "no request is held on to"

    asyncio.run(story())


def test_the_number_of_remembered_runners_is_bounded() -> None:
    runners = RunnerRegistry(lambda *_: None)
    runners.record_heartbeat("mine", {"pid": 1})
    for number in range(2 * RUNNERS):
        runners.record_heartbeat(f"made-up-{number}")
        if number % 100 == 0:
            runners.record_heartbeat("mine")
    known = {state.name: state.info for state in runners.states([], 0.0)}
    assert len(known) == RUNNERS and known["mine"] == {"pid": 1}


def test_one_long_request_of_each_owner_is_processed_at_a_time() -> None:
    async def story() -> None:
        background, order = BackgroundThread(), []

        async def work(owner: str, size: int, name: str) -> None:
            async with background.slot(owner, size):
                order.append(name)
                await asyncio.sleep(0.02)
                order.append(name)

        long = bounds.INLINE_BYTES + 1
        await asyncio.gather(work("a", long, "1"), work("a", long, "2"), work("b", long, "3"), work("a", 10, "4"))
        assert order[:3] == ["1", "3", "4"] and order.index("2") > order.index("1", 1)
        assert not background._semaphores

    asyncio.run(story())
