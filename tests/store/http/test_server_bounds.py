"""The contents of bodies and headers are bounded for every client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from etude.store.http import request_limits as bounds
from etude.store.http.forms import encode_turn
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.journal.json_values import NOTE_BYTES, NOTE_VALUES
from etude.store.queue.rollout_queue import AttemptId, RolloutQuery
from tests.store.http.served import Served, served
from tests.store.made import turn


@pytest.fixture(scope="module")
def store() -> Iterator[Served]:
    with served() as made:
        yield made


def kind(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["kind"]


NOBODY = {"rollout": 0, "attempt": 0}
LISTS = b"[" + b"[]," * 8_999_999 + b"[]]"


@pytest.mark.parametrize("name", ["record_note", "enqueue", "find", "heartbeat"])
def test_millions_of_values_are_refused_before_they_are_parsed(name: str) -> None:
    with served() as store:
        began = time.process_time()
        answer = store.verb(name, LISTS)
        assert answer.status_code == 413 and "more than 262144 values" in answer.json()["error"]["message"]
        assert time.process_time() - began < 5.0  # parsing takes twenty times as long
        assert store.verb(name, b"[" * 200_000).status_code == 400


def test_a_note_of_an_attempt_is_small_and_its_others_are_kept(store: Served) -> None:
    (claim,) = store.claimed()
    own = {"attempt": claim.attempt_id._asdict(), "name": "seen"}
    large: list[Any] = ["x" * (NOTE_BYTES + 1), [[]] * (NOTE_VALUES + 1)]
    for data in large:
        for key in (claim.reward_key, store.keyring.runner):
            answer = store.ask("/v1/store/record_note", own | {"data": data}, key)
            assert answer.status_code == 422 and "Send less" in answer.json()["error"]["message"]

    async def written() -> list[Any]:
        transport = httpx2.ASGITransport(store.app)
        queue = RemoteRolloutQueue("http://store", claim.reward_key, transport=transport)
        notes = (queue.record_note(claim.attempt_id, "seen", data) for data in ("first", *large, "last"))
        done = await asyncio.gather(*notes, return_exceptions=True)
        await queue.close()
        return done

    assert [type(result).__name__ for result in asyncio.run(written())] == [
        "NoneType",
        "DataError",
        "DataError",
        "NoneType",
    ]
    events = store.verb("notes", {"rollout": claim.attempt_id.rollout}).json()["reply"]
    assert sorted(note["data"] for note in events) == ["first", "last"]
    store.ended(claim)


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("find", {"query": {"ids": list(range(1001))}}),
        ("find", {"query": {"tasks": list(range(1001))}}),
        ("cancel", {"rollouts": list(range(1001)), "why": "x"}),
        ("heartbeat", {"runner": "r", "running": [{"rollout": n, "attempt": 0} for n in range(1001)]}),
        ("heartbeat", {"runner": "r", "running": [], "info": {"a": "x" * 5000}}),
        ("heartbeat", {"runner": "r", "running": [], "info": {str(n): n for n in range(300)}}),
        ("record_reward", {"attempt": NOBODY, "reward": {str(n): 1.0 for n in range(101)}}),
    ],
)
def test_lists_without_bounds_are_refused(store: Served, verb: str, body: Any) -> None:
    assert kind(store.verb(verb, body)) == (422, "DataError")


def test_large_requests_of_the_client_are_divided() -> None:
    with served() as store:
        claims = store.claimed(3)

        async def call_all() -> None:
            queue = RemoteRolloutQueue("http://store", store.keyring.admin, transport=httpx2.ASGITransport(store.app))
            ids = (*range(5000, 8000), *(claim.attempt_id.rollout for claim in claims))
            page = await queue.find(RolloutQuery(ids=ids, limit=2, sort="-id"))
            assert [state.id for state in page.rollouts] == [2, 1] and page.more
            assert len((await queue.find(RolloutQuery(ids=ids, tasks=tuple(range(1500))))).rollouts) == 3
            stop = await queue.heartbeat(
                "runner", [*(claim.attempt_id for claim in claims), *(AttemptId(9000, n) for n in range(2000))]
            )
            assert len(stop) == 2000 and not {claim.attempt_id for claim in claims} & dict(stop).keys()
            await queue.cancel([0, 1, 2] * 500, "enough")
            assert (await queue.statistics())["cancelled"] == 3
            await queue.close()

        asyncio.run(call_all())


@pytest.mark.parametrize("token", ["a" * 60_000, "a b", "\x7f"], ids=["long", "spaced", "odd"])
def test_an_idempotency_key_is_a_short_word(store: Served, token: str) -> None:
    answer = store.verb("statistics", idempotency_key=token)
    assert kind(answer) == (422, "DataError") and "idempotency-key" in answer.text


def test_the_memory_of_one_key_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HELD_BY_KEY", 300_000)
    body = b" " * 250_000 + b"{}"

    async def held(client: httpx2.AsyncClient) -> list[int]:
        read, arrived = asyncio.Event(), asyncio.Event()

        async def slow() -> Any:
            yield body[:200_000]
            read.set()
            await arrived.wait()
            yield body[200_000:]

        async def ask(content: Any, key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return (await client.post("/v1/store/get_resource", content=content, headers=headers)).status_code

        first = asyncio.create_task(ask(slow(), store.keyring.admin))
        await read.wait()
        answers = [await ask(body, store.keyring.admin), await ask(body, store.keyring.runner)]
        arrived.set()
        return [*answers, await first, await ask(body, store.keyring.admin)]

    with served() as store:
        assert store.run(held) == [429, 422, 422, 422]


@pytest.mark.parametrize(
    ("verb", "size"), [("claim", 20_000), ("wait", 20_000), ("heartbeat", 200_000), ("find", 200_000)]
)
def test_a_long_body_of_a_short_request_is_not_parsed(store: Served, verb: str, size: int) -> None:
    answer = store.verb(verb, b" " * size + b"{}")
    assert answer.status_code == 413 and f"The body of '{verb}'" in answer.json()["error"]["message"]


def test_bodies_of_an_attempt_have_a_smaller_limit(store: Served) -> None:
    (claim,) = store.claimed()
    body = b" " * (bounds.REWARDS_BYTES + 1)
    assert store.ask("/v1/store/record_note", body, claim.reward_key).status_code == 413
    assert store.ask("/v1/store/record_note", body[:-1], claim.reward_key).status_code == 400
    store.ended(claim)


def test_an_attempts_notes_with_its_own_key_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "NOTES", 8)
    monkeypatch.setattr(bounds, "NOTES_BYTES", 100_000)
    monkeypatch.setattr(bounds, "REWARDS", 5)
    span = {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "one"}, {"name": "two"}]}]}]}
    with served() as store:
        own, other = store.claimed(2)
        note = {"attempt": own.attempt_id._asdict(), "name": "seen", "data": "x" * 10_000}
        traced = {"content_type": "application/json"}
        for token in ("a", "a", "a", "b"):  # a repeated request is not counted again
            assert store.ask("/v1/store/record_note", note, own.reward_key, idempotency_key=token).status_code == 200
        assert store.ask("/v1/traces", span, own.reward_key, **traced).json() == {}
        paid = {"verb": "record_reward", "attempt": own.attempt_id._asdict(), "reward": 1.0, "turn": 0}
        batch = {"writes": [note | {"verb": "record_note", "data": 1}] * 3 + [paid] * 2}
        store.verb("record_turn", {"attempt": own.attempt_id._asdict(), "turn": encode_turn(turn())})
        replies = store.ask("/v1/store/batch", batch, own.reward_key).json()["replies"]
        assert [reply.get("status", 200) for reply in replies] == [200] * 5
        store.ended(own)
        assert store.ask("/v1/store/record_note", note | {"data": 1}, own.reward_key).status_code == 200
        answer = store.ask("/v1/store/record_note", note | {"data": 1}, own.reward_key)
        assert kind(answer) == (422, "DataError")
        assert "has written 8 notes and spans" in answer.json()["error"]["message"]
        refused = store.ask("/v1/traces", span, own.reward_key, **traced).json()["partialSuccess"]
        assert refused["rejectedSpans"] == "2"
        assert len(store.verb("notes", {"rollout": own.attempt_id.rollout}).json()["reply"]) == 8
        for key in (other.reward_key, store.keyring.runner):
            about = {"attempt": (other if key == other.reward_key else own).attempt_id._asdict()}
            assert store.ask("/v1/store/record_note", note | about, key).status_code == 200


def test_an_attempts_bytes_of_notes_and_number_of_rewards_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "NOTES_BYTES", 100_000)
    monkeypatch.setattr(bounds, "REWARDS", 5)
    with served() as store:
        (own,) = store.claimed()
        about = {"attempt": own.attempt_id._asdict()}
        large, small = (
            {"verb": "record_note", "name": "e", "data": "x" * 60_000},
            {"verb": "record_note", "name": "e"},
        )
        batch = {"writes": [about | large, *[about | small] * 99]}
        statuses = []
        for _ in range(2):
            replies = store.ask("/v1/store/batch", batch, own.reward_key).json()["replies"]
            statuses += [reply.get("status", 200) for reply in replies]
        assert statuses.count(422) >= 40, "the bytes of a batch are counted, however its notes share them"
        store.verb("record_turn", about | {"turn": encode_turn(turn())})
        paid = [
            store.ask("/v1/store/record_reward", about | {"reward": 0.1, "turn": 0}, own.reward_key).status_code
            for _ in range(7)
        ]
        assert paid == [200] * 5 + [422] * 2
        assert store.ask("/v1/store/record_reward", about | {"reward": 1.0}, own.reward_key).status_code == 200
