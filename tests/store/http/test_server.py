"""The server's answers to valid, invalid, large, slow and repeated requests."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import logging
import socket
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from etude.errors import ConfigError, StoreError
from etude.records import Task
from etude.store import open_store
from etude.store.http.forms import encode_turn
from etude.store.http.server import create_app, serve
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import RolloutRequest
from tests.store.http.served import SECRET, Served, served, waiting_claims
from tests.store.made import turn
from tests.waits import blocked_until, until

MEGABYTE = 2**20


def packed(body: bytes) -> bytes:
    """Return the same bytes at any time, since they are part of the names of tests."""
    return gzip.compress(body, mtime=0)


@pytest.fixture(scope="module")
def store() -> Iterator[Served]:
    with served(max_body_bytes=MEGABYTE) as made:
        yield made


def kind(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["kind"]


# -- invalid requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "body", "status"),
    [
        ("statistics", b"", 400),
        ("statistics", b"{", 400),
        ("statistics", b'{"a": "\xff"}', 400),
        ("statistics", b'{"a": "\\ud800"}', 400),
        ("record_note", b'{"name": "x", "data": ' + b"[" * 9999 + b"]" * 9999 + b"}", 400),
        ("statistics", b"[]", 422),
        ("statistics", {"unknown": 1}, 422),
        ("turns", {"rollout": "0"}, 422),
        ("turns", {"rollout": 2**63}, 422),
        ("turns", {"rollout": -1}, 422),
        ("find", {"query": {"limit": 1001}}, 422),
        ("find", {"query": {"limit": 0}}, 422),
        ("wait", {"limit": 1001}, 422),
        ("wait", {"timeout_s": 31}, 422),
        ("wait", b'{"timeout_s": NaN}', 422),
        ("claim", {"runner": "r", "n": 1001}, 422),
        ("claim", {"runner": "", "n": 1}, 422),
        ("claim", {"runner": "a\x00b", "n": 1}, 422),
        ("record_reward", b'{"attempt": {"rollout": 0, "attempt": 0}, "reward": NaN}', 422),
        ("record_reward", b'{"attempt": {"rollout": 0, "attempt": 0}, "reward": 1e999}', 422),
        ("record_reward", b'{"attempt": {"rollout": 0, "attempt": 0}, "reward": {"a": Infinity}}', 422),
        ("record_reward", {"attempt": {"rollout": 0, "attempt": 0}, "reward": {}}, 422),
        ("finish", {"attempt": {"rollout": 0, "attempt": 0}, "report": {"outcome": "gone"}}, 422),
        ("enqueue", {"wanted": [{"task": {"ordinal": 1, "fields": {}}, "limits": {"retry_on": ["succeeded"]}}]}, 422),
        ("enqueue", {"wanted": [{"task": {"ordinal": 1, "fields": {}}, "limits": {"timeout_s": 0}}]}, 422),
        ("turns", {"rollout": 2**62}, 404),
        ("notes", {"rollout": 2**62}, 404),
        ("finish", {"attempt": {"rollout": 2**62, "attempt": 0}, "report": {"outcome": "succeeded"}}, 404),
        ("record_reward", {"attempt": {"rollout": 2**62, "attempt": 0}, "reward": 1}, 404),
        ("cancel", {"rollouts": [2**62], "why": "x"}, 404),
        ("get_resource", {"name": "nothing"}, 404),
        ("wait", {"cursor": 2**62}, 404),
        ("nothing", {}, 404),
    ],
)
def test_invalid_requests_are_refused_clearly(store: Served, verb: str, body: Any, status: int) -> None:
    answer = store.verb(verb, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["request"] == answer.headers["x-request-id"] and error["message"][-1] in ".;)") or status == 404


@pytest.mark.parametrize("arrays", ["", "!!", "AAAA", "/" * 200, "A" * 44])
def test_an_invalid_turn_is_refused(store: Served, arrays: str) -> None:
    (claim,) = store.claimed()
    body = {
        "attempt": claim.attempt_id._asdict(),
        "turn": encode_turn(turn()) | {"arrays": arrays},
    }
    assert kind(store.verb("record_turn", body)) == (422, "DataError")
    store.ended(claim)


def test_an_illegal_move_names_both_states(store: Served) -> None:
    (claim,) = store.claimed()
    store.ended(claim)
    body = {"attempt": claim.attempt_id._asdict(), "report": {"outcome": "failed"}}
    answer = store.verb("finish", body)
    assert kind(answer) == (409, "IllegalTransitionError")
    assert "succeeded" in answer.text and "failed" in answer.text


def test_other_methods_are_refused(store: Served) -> None:
    assert store.ask("/v1/store/enqueue", method="GET").status_code == 405
    assert store.ask("/healthz", b"{}").status_code == 405


# -- bodies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (packed(b"{}"), "gzip", 200),
        (zlib.compress(b"{}"), "deflate", 200),
        (b"{}", "identity", 200),
        (packed(b"{}")[:-4], "gzip", 400),
        (packed(b"{}") + b"more", "gzip", 400),
        (b"{}", "gzip", 400),
        (b"{}", "br", 415),
        (b" " * (MEGABYTE + 1), "identity", 413),
        (packed(b" " * (MEGABYTE + 1)), "gzip", 413),
        (packed(bytes(100 * MEGABYTE)), "gzip", 413),
        (b" " * (MEGABYTE - 2) + b"{}", "identity", 200),
        (packed(b" " * (MEGABYTE - 2) + b"{}"), "gzip", 200),
    ],
)
def test_bodies_are_inflated_and_bounded(store: Served, body: bytes, encoding: str, status: int) -> None:
    assert store.verb("statistics", body, content_encoding=encoding).status_code == status


@pytest.mark.parametrize("body", [b" " * 70_000, packed(b" " * 1_000_000)], ids=["long", "packed"])
@pytest.mark.parametrize("key", [None, "etude.admin.made-up"])
def test_without_a_key_little_is_read(store: Served, body: bytes, key: str | None) -> None:
    encoding = "identity" if body[:1] == b" " else "gzip"
    answer = store.ask("/v1/store/statistics", body, key, content_encoding=encoding)
    assert kind(answer) == (401, "InvalidKeyError")
    assert store.ask("/v1/store/statistics", b"{}", key).status_code == 401


def test_an_app_without_keys_reads_no_more_from_anonymous_clients() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await Response(str(len(await Request(scope, receive).body())))(scope, receive, send)

    with served(mounts={"/other": app}) as store:
        assert store.ask("/other/x", b" " * 60_000).text == "60000"
        answer = store.ask("/other/x", b" " * 70_000)
        assert answer.status_code == 401 and "at most 65536 bytes" in answer.json()["error"]["message"]
        assert store.ask("/other/x", b" " * 70_000, store.keyring.runner).text == "70000"


def test_a_path_cannot_forge_log_lines(store: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="etude"):
        store.ask("/x%0A2026-01-01%20INFO%20forged%1b[31m", method="GET")
        store.ask("/x%C2%9B31m%E2%80%A8forged%C2%85%E2%80%AE", method="GET")
    messages_logged = [record.getMessage() for record in caplog.records if "forged" in record.getMessage()]
    assert len(messages_logged) == 2 and all(text.isprintable() for text in messages_logged)
    assert "/x\\x9b31m\\u2028forged\\x85\\u202e answered 404" in messages_logged[1]


def test_a_body_of_undeclared_length_is_bounded_too(store: Served) -> None:
    async def send(client: httpx2.AsyncClient) -> int:
        async def parts() -> Any:
            for _ in range(40):
                yield bytes(MEGABYTE // 20)

        headers = {"authorization": f"Bearer {store.keyring.admin}"}
        return (await client.post("/v1/store/statistics", content=parts(), headers=headers)).status_code

    assert store.run(send) == 413


def test_a_large_answer_is_compressed(store: Served) -> None:
    (claim,) = store.claimed()
    for _ in range(30):
        store.verb("record_turn", {"attempt": claim.attempt_id._asdict(), "turn": encode_turn(turn(tokens=200))})
    answer = store.verb("turns", {"rollout": claim.attempt_id.rollout}, accept_encoding="gzip")
    assert answer.headers["content-encoding"] == "gzip" and len(answer.json()["reply"]) == 30
    assert (
        "content-encoding"
        not in store.verb("turns", {"rollout": claim.attempt_id.rollout}, accept_encoding="br").headers
    )


# -- names of requests ------------------------------------------------------------------------------------------------


def test_a_request_keeps_its_id_and_the_log_has_it(store: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "etude.store"):
        assert store.verb("statistics", x_request_id="mine-1").headers["x-request-id"] == "mine-1"
    assert "mine-1" in caplog.text and "/v1/store/statistics" in caplog.text
    made = {store.verb("statistics").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert store.verb("statistics", x_request_id="x" * 500).headers["x-request-id"] != "x" * 500


def test_a_request_sent_twice_with_one_key_is_executed_once(store: Served) -> None:
    (claim,) = store.claimed()
    body = {"attempt": claim.attempt_id._asdict(), "turn": encode_turn(turn())}
    once = [store.verb("record_turn", body, idempotency_key="a").json() for _ in range(3)]
    assert once == [{"reply": 0}] * 3
    assert store.verb("record_turn", body, idempotency_key="b").json() == {"reply": 1}
    store.claimed()
    first, again = (store.verb("claim", {"runner": "r", "n": 5}, idempotency_key="c").json() for _ in range(2))
    assert first == again
    other = store.ask("/v1/store/claim", {"runner": "r", "n": 5}, store.keyring.runner, idempotency_key="c").json()
    assert other == {"reply": []}, "another key is another's name"


def test_a_request_that_may_have_run_before_a_restart_is_not_executed_again(store: Served) -> None:
    (claim,) = store.claimed()
    body = {"attempt": claim.attempt_id._asdict(), "turn": encode_turn(turn())}
    before = {"idempotency_key": "d", "x_sent_to": "another instance"}
    assert store.verb("record_turn", body, **before).json() == {"reply": 0}, "it never came"
    assert store.verb("record_turn", body, **before | {"idempotency_key": "e"}).json() == {"reply": 0}, (
        "it is known again"
    )
    pay = {"attempt": claim.attempt_id._asdict(), "reward": 1.0}
    batch = {
        "writes": [
            {"verb": "record_turn"} | body,
            {"verb": "record_reward"} | pay | {"turn": 0},
            {"verb": "record_reward"} | pay,
        ]
    }
    replies = store.verb("batch", batch, **before).json()["replies"]
    assert [reply.get("status", 200) for reply in replies] == [200, 412, 200] and replies[0] == {"reply": 0}
    assert len(store.verb("turns", {"rollout": claim.attempt_id.rollout}).json()["reply"]) == 1
    assert kind(store.verb("enqueue", {"wanted": [{"task": {"ordinal": 10**6, "fields": {}}}]}, **before))[0] == 412


# -- the description --------------------------------------------------------------------------------------------------


def test_the_description_is_built_once_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("etude.store.http.openapi.to_json", lambda schema: made.append(schema) or json.dumps(schema))
    with served() as store:
        first, second = (store.ask("/openapi.json", method="GET") for _ in range(2))
        assert first.content == second.content and first.headers["content-type"] == "application/json"
        assert len(made) == 1
        page = store.ask("/docs", method="GET")
        assert page.status_code == 200 and "/openapi.json" in page.text


def test_answers_follow_the_openapi_description(store: Served) -> None:
    description = store.ask("/openapi.json", method="GET").json()
    (claim,) = store.claimed()
    own = {"attempt": claim.attempt_id._asdict()}
    story: dict[str, Any] = {
        "put_resource": {"name": "endpoint", "value": {"base_url": "http://x"}},
        "get_resource": {"name": "endpoint"},
        "enqueue": {"wanted": [{"task": {"ordinal": 10**7, "fields": {"a": [1, None]}}, "use": "val"}]},
        "claim": {"runner": "r"},
        "heartbeat": {"runner": "r", "running": [own["attempt"]], "info": {"pid": 1}},
        "ready": own,
        "record_turn": own | {"turn": encode_turn(turn())},
        "record_reward": own | {"reward": {"right": 1.0}},
        "record_note": own | {"name": "seen", "data": [1]},
        "finish": own | {"report": {"outcome": "succeeded"}},
        "batch": {"writes": [{"verb": "ready"} | own, {"verb": "ready", "attempt": {"rollout": 2**60, "attempt": 0}}]},
        "cancel": {"rollouts": [], "why": "x"},
        "wait": {"cursor": 0},
        "find": {"query": {"ids": [claim.attempt_id.rollout]}},
        "turns": {"rollout": claim.attempt_id.rollout},
        "notes": {"rollout": claim.attempt_id.rollout},
        "runners": {},
        "statistics": {},
    }
    for verb, body in story.items():
        operation = description["paths"][f"/v1/store/{verb}"]["post"]
        schemas = {"components": description["components"]}
        body = json.loads(json.dumps(body))
        jsonschema.validate(body, operation["requestBody"]["content"]["application/json"]["schema"] | schemas)
        for status, answer in (("200", store.verb(verb, body)), ("422", store.verb(verb, {"unknown": 1}))):
            assert str(answer.status_code) == status, answer.text
            jsonschema.validate(
                answer.json(),
                operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"] | schemas,
            )
        assert operation["summary"] and operation["security"] == [{"key": []}]


# -- defects ----------------------------------------------------------------------------------------------------------


class Broken(LocalRolloutQueue):
    """A queue with a defect."""

    async def statistics(self) -> dict[str, float]:
        raise RuntimeError("a defect of ours")


def test_a_defect_is_reported_with_the_id_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    keyring, journal = Keyring(SECRET), open_store()
    queue = Broken(journal, keyring)
    broken = Served(journal, keyring, queue, create_app(queue, keyring))
    answer = broken.verb("statistics", x_request_id="mine-2")
    assert kind(answer) == (500, "Failed") and "a defect of ours" not in answer.text
    assert "mine-2" in caplog.text and "a defect of ours" in caplog.text
    asyncio.run(queue.close())
    assert kind(broken.verb("runners")) == (503, "StoreError")


# -- over a socket ----------------------------------------------------------------------------------------------------


def test_serving_starts_and_stops_soon_and_others_are_served_beside_it() -> None:
    router, other = APIRouter(), FastAPI()

    @router.get("/v1/models")
    async def models() -> list[str]:
        return ["policy"]

    @other.get("/hello")
    async def hello() -> str:
        return "hello"

    keyring, journal = Keyring(SECRET), open_store()
    queue = LocalRolloutQueue(journal, keyring)
    with serve(queue, keyring, routers=[router], mounts={"/other": other}) as serving:
        assert serving.admin_key == keyring.admin and serving.url.startswith("http://127.0.0.1:")
        assert httpx2.get(f"{serving.url}/healthz").json() == {"status": "ok"}
        assert httpx2.get(f"{serving.url}/v1/models").json() == ["policy"]
        assert httpx2.get(f"{serving.url}/other/hello").json() == "hello"
        assert "x-request-id" in httpx2.get(f"{serving.url}/other/hello").headers
        assert "/v1/models" in httpx2.get(f"{serving.url}/openapi.json").json()["paths"]
        with pytest.raises(StoreError, match="another port"):
            serve(queue, keyring, port=int(serving.url.rpartition(":")[2]))

        async def polls() -> float:
            headers = {"authorization": f"Bearer {keyring.admin}"}
            async with httpx2.AsyncClient(base_url=serving.url, headers=headers, timeout=20.0) as client:
                claim = asyncio.create_task(client.post("/v1/store/claim", json={"runner": "r", "wait_s": 20}))
                wait = asyncio.create_task(client.post("/v1/store/wait", json={"timeout_s": 20}))
                await until(lambda: waiting_claims(queue) == len(queue._state._waits) == 1)
                start = time.monotonic()
                await asyncio.to_thread(serving.stop)
                assert (await claim).json() == {"reply": []} and (await wait).json()["reply"]["rollouts"] == []
                return time.monotonic() - start

        assert asyncio.run(polls()) < 10
    asyncio.run(queue.close())


def test_a_server_on_a_public_address_requires_a_given_key() -> None:
    shown: list[str] = []
    queue = LocalRolloutQueue(open_store())
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 .*127\.0\.0\.1"):
        serve(queue, host="0.0.0.0", show=shown.append)
    assert shown == []
    with serve(queue, show=shown.append) as serving:
        assert len(shown) == 1 and serving.admin_key in shown[0]
        headers = {"authorization": f"Bearer {serving.admin_key}"}
        assert httpx2.post(f"{serving.url}/v1/store/statistics", json={}, headers=headers).status_code == 200
    with serve(queue, Keyring(SECRET), host="0.0.0.0", show=shown.append):
        assert len(shown) == 1
    asyncio.run(queue.close())


@pytest.fixture(scope="module")
def listening() -> Iterator[tuple[str, int, str, LocalRolloutQueue]]:
    keyring, journal = Keyring(SECRET), open_store()
    queue = LocalRolloutQueue(journal, keyring)
    with serve(queue, keyring) as serving:
        host, _, port = serving.url.removeprefix("http://").rpartition(":")
        yield host, int(port), keyring.admin, queue
    asyncio.run(queue.close())


def test_a_body_of_fifty_megabytes_is_refused_with_the_reason(
    listening: tuple[str, int, str, LocalRolloutQueue],
) -> None:
    host, port, admin, _ = listening
    connection = http.client.HTTPConnection(host, port, timeout=20)
    body = bytes(50 * MEGABYTE)
    connection.request("POST", "/v1/store/statistics", body, {"authorization": f"Bearer {admin}"})
    answer = connection.getresponse()
    assert answer.status == 413 and json.loads(answer.read())["error"]["message"].startswith("The body has more")
    connection.close()


def test_a_runner_that_hangs_up_while_it_claims_is_given_nothing(
    listening: tuple[str, int, str, LocalRolloutQueue],
) -> None:
    host, port, admin, queue = listening
    body = json.dumps({"runner": "gone", "wait_s": 20}).encode()
    head = f"POST /v1/store/claim HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {admin}\r\ncontent-length: {len(body)}"
    with socket.create_connection((host, port)) as line:
        line.sendall(head.encode() + b"\r\n\r\n" + body)
        blocked_until(lambda: waiting_claims(queue) == 1)
    blocked_until(lambda: waiting_claims(queue) == 0)

    async def counted() -> dict[str, float]:
        await queue.enqueue([RolloutRequest(Task(0, {}))])
        return await queue.statistics()

    statistics = asyncio.run(counted())
    assert (statistics["queued"], statistics["running"], statistics["retries"]) == (1, 0, 0)
