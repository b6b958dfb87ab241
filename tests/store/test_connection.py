"""What one client sends over a socket costs others nothing: heads, trailers, pipelines and connections are bounded
before a key is looked at."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import httpx2
import pytest

from etude.store import bounds, open_store
from etude.store.connection import Room
from etude.store.keys import Keyring
from etude.store.local_desk import LocalDesk
from etude.store.server import serve
from tests.store.served import SECRET

Place = tuple[str, int]
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    ring = Keyring(SECRET)
    desk = LocalDesk(open_store(), ring)
    with serve(desk, ring) as serving:
        host, _, port = serving.url.removeprefix("http://").rpartition(":")
        yield host, int(port)
    asyncio.run(desk.close())


def sent(place: Place, *parts: bytes, ends: bool = True) -> bytes:
    """All that is answered to this, until the other side hangs up. ends: say that no more comes."""
    heard = b""
    with socket.create_connection(place, timeout=20) as line, suppress(ConnectionError, TimeoutError):
        for part in parts:
            line.sendall(part)
        if ends:
            line.shutdown(socket.SHUT_WR)
        while part := line.recv(2**16):
            heard += part
    return heard


def refused(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((b"GET /" + b"a" * 64_000 + b" HTTP/1.1\r\n\r\n",), "bytes"),
        ((HEALTH + b"x-a: ", *[b"a" * 2**20] * 64, b"\r\n\r\n"), "bytes"),
        ((HEALTH + b"x-a: b\r\n" * 200 + b"\r\n",), "more than 100 headers"),
        ((HEALTH + b"a" * 64_000 + b": b\r\n\r\n",), "bytes"),
    ],
    ids=["line", "header", "headers", "name"],
)
def test_a_head_without_bounds_is_answered_431_and_others_do_not_wait(
    place: Place, parts: tuple[bytes, ...], says: str
) -> None:
    status, error = refused(sent(place, *parts))
    assert status == 431 and says in error["message"] and error["kind"] == "Refused"
    assert sent(place, HEALTH + b"connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_who_sends_a_head_for_ever_is_let_go_of_and_others_are_answered_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "DRAINED_BYTES", 2**24)
    with socket.create_connection(place, timeout=20) as line:
        line.sendall(HEALTH + b"x-a: ")
        total, longest = 0, 0.0
        with suppress(ConnectionError):
            while total < 2**26:
                line.sendall(b"a" * 2**20)
                total += 2**20
                began = time.monotonic()
                assert sent(place, HEALTH + b"connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
                longest = max(longest, time.monotonic() - began)
    assert total < 2**26 and longest < 5.0  # a great deal, on a machine that has much to do


def test_a_head_that_drips_is_answered_408(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 0.5)
    with socket.create_connection(place, timeout=20) as line:
        heard = b""
        line.settimeout(0.1)
        for each in HEALTH + b"x-a: " + b"a" * 300:
            with suppress(TimeoutError, BrokenPipeError):
                line.sendall(bytes([each]))
                if heard := line.recv(2**16):
                    break
    status, error = refused(heard)
    assert status == 408 and "within 0.5 seconds" in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"0\r\nx-a: " + b"a" * 2**20, b"5;" + b"a" * 2**20, b"1\r\na\r\n" * 200_000],
    ids=["trailer", "extension", "chunks"],
)
def test_a_chunked_body_of_little_but_framing_is_hung_up_on(place: Place, body: bytes) -> None:
    head = b"POST /v1/store/statistics HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b"200 OK" not in sent(place, head, *(body[at : at + 2**16] for at in range(0, len(body), 2**16)))


def test_a_chunked_body_with_a_trailer_is_read(place: Place) -> None:
    head = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert sent(place, head + b"2\r\n{}\r\n0\r\nx-a: b\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_a_few_requests_may_wait_on_a_connection_and_thousands_may_not(place: Place) -> None:
    last = HEALTH + b"connection: close\r\n\r\n"
    assert sent(place, (HEALTH + b"\r\n") * 7 + last, ends=False).count(b"200 OK") == 8
    assert sent(place, (HEALTH + b"\r\n") * 5000).count(b"200 OK") <= bounds.PIPELINED + 1


def test_silent_connections_make_room_for_others_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bounds, "CONNECTIONS", 8)
    ring = Keyring(SECRET)
    desk = LocalDesk(open_store(), ring)
    caplog.set_level(logging.WARNING, "etude.store")
    with serve(desk, ring) as serving, ExitStack() as stack:
        host, _, port = serving.url.removeprefix("http://").rpartition(":")
        with httpx2.Client(base_url=serving.url, headers={"authorization": f"Bearer {ring.admin}"}) as client:
            assert client.post("/v1/store/statistics", json={}).status_code == 200
            for _ in range(40):
                stack.enter_context(socket.create_connection((host, int(port))))
            time.sleep(0.3)
            assert client.post("/v1/store/statistics", json={}).status_code == 200, "who asked before is let be"
            assert sent((host, int(port)), HEALTH + b"connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
            body = b'{"runner": "r", "wait_s": 20}'
            head = f"POST /v1/store/claim HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ring.admin}\r\n".encode()
            for _ in range(100):  # until all that there may be are being answered
                poll = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
                poll.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                time.sleep(0.05)
                answer = sent((host, int(port)), HEALTH + b"connection: close\r\n\r\n")
                if not answer.startswith(b"HTTP/1.1 200"):
                    break
            status, error = refused(answer)
            assert status == 503 and "as many connections as it may have" in error["message"]
    asyncio.run(desk.close())
    assert sum("Raise the limit with: ulimit -n" in record.getMessage() for record in caplog.records) == 1


def test_it_is_said_when_no_more_files_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import os
    import resource

    caplog.set_level(logging.INFO, "etude.store")
    room, limits = Room(), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, limits[1]))
    filled: list[int] = []
    try:
        with suppress(OSError):
            while True:
                filled.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(3):
            room.look()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in (taken, *filled):
            os.close(each)
    room.look()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "can open no more files (Too many open files)" in said[0] and "again" in said[1]
