"""How much a body holds is known before it is parsed, and what is kept of anybody is bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import AgentError, DataError
from etude.store import bounds
from etude.store.aside import Aside
from etude.store.bounds import NOTE_BYTES, NOTE_VALUES, RUNNERS, RefusedError, small, weigh
from etude.store.once import Answer, Once, Share
from etude.store.waiting import Runners

TEXTS = st.text(st.sampled_from('ab"\\[]{},:é\n'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers(0, 99) | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


def held(value: Any) -> tuple[int, int]:
    """How many values are in a value, an empty list or object counted as one; and how many levels it has."""
    inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    if inner is None:
        return 0, 0
    found = [held(each) for each in inner]
    return (len(inner) or 1) + sum(count for count, _ in found), 1 + max((depth for _, depth in found), default=0)


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_what_a_body_holds_is_counted_exactly(value: Any, ascii: bool, piece: int) -> None:
    count, depth = held(value)
    body = json.dumps(value, ensure_ascii=ascii).encode()
    before, bounds._PIECE = bounds._PIECE, piece
    try:
        weigh(body, count, max(depth, 1))
        if len(body) > piece and count:
            with pytest.raises(RefusedError, match="values") as raised:
                weigh(body, count - 1, max(depth, 1))
            assert raised.value.status == 413
        if depth > 1:
            with pytest.raises(RefusedError, match="nested too deeply") as raised:
                weigh(body, count, depth - 1)
            assert raised.value.status == 400
    finally:
        bounds._PIECE = before


@pytest.mark.parametrize(
    "body",
    [b"[" + b"[]," * 9_000_000 + b"1]", b"{" + b'"":"",' * 4_000_000 + b"}", b'"' * 8_000_000, b"[" * 200_000],
    ids=["lists", "entries", "quotes", "deep"],
)
def test_what_would_take_long_to_parse_is_refused_soon(body: bytes) -> None:
    with pytest.raises(RefusedError):
        weigh(body)


@pytest.mark.parametrize("body", [b"[" * 90, b"]]]}", b'{"a', b"\\" * 70_000, b""])
def test_what_is_no_json_is_left_to_who_parses_it(body: bytes) -> None:
    weigh(body)


def test_a_note_is_small() -> None:
    assert small({"text": "x" * 1000, "list": [1] * 1000}, "It")
    for large in ("x" * (NOTE_BYTES + 1), [[]] * (NOTE_VALUES + 1), {"é" * NOTE_BYTES: 1}, 2 ** (5 * NOTE_BYTES)):
        with pytest.raises(DataError, match="The note holds more than is kept"):
            small(large, "The note")


def test_an_agent_hears_at_once_that_an_event_is_too_large() -> None:
    from etude import emit

    with pytest.raises(AgentError, match=f"{NOTE_VALUES} values"):
        emit.event("many", [[]] * (NOTE_VALUES + 1))


def test_the_answers_of_one_key_are_no_more_than_its_share_and_push_out_nobody_elses() -> None:
    async def story() -> None:
        once, few = Once(), Share(answers=10, bytes=1000)

        async def said() -> Answer:
            return 200, bytes(50)

        await once.answer("mine", said, "me")
        for number in range(500):
            await once.answer(number, said, "other", few)
        assert once.knows("mine") and [once.knows(number) for number in (0, 489, 490, 499)] == [
            False,
            False,
            True,
            True,
        ]
        assert len(once._asked) == 11 and once._bytes == 550
        assert all(asked.task is None for asked in once._asked.values()), "no request is held on to"

    asyncio.run(story())


def test_runners_under_made_up_names_are_no_more_than_are_remembered() -> None:
    runners = Runners(lambda *_: None)
    runners.spoke("mine", {"pid": 1})
    for number in range(2 * RUNNERS):
        runners.spoke(f"made-up-{number}")
        if number % 100 == 0:
            runners.spoke("mine")
    known = {state.name: state.told for state in runners.states([], 0.0)}
    assert len(known) == RUNNERS and known["mine"] == {"pid": 1}


def test_of_one_owner_one_long_request_is_worked_on_at_a_time() -> None:
    async def story() -> None:
        aside, order = Aside(), []

        async def work(owner: str, size: int, name: str) -> None:
            async with aside.turn(owner, size):
                order.append(name)
                await asyncio.sleep(0.02)
                order.append(name)

        long = bounds.FEW_BYTES + 1
        await asyncio.gather(work("a", long, "1"), work("a", long, "2"), work("b", long, "3"), work("a", 10, "4"))
        assert order[:3] == ["1", "3", "4"] and order[-2:] == ["2", "2"]
        assert not aside._turns

    asyncio.run(story())
