"""One client's data over a socket costs others nothing: heads, trailers, pipelines and connections are bounded before a
key is checked."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from etude.store import open_store
from etude.store.http import request_limits as bounds
from etude.store.http.connection import ConnectionLimiter, HttpConnection
from etude.store.http.server import serve
from etude.store.http.server_thread import ServerThread
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId
from tests.store.http.served import SECRET

Place = tuple[str, int]
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    keyring = Keyring(SECRET)
    queue = LocalRolloutQueue(open_store(), keyring)
    with serve(queue, keyring) as serving:
        host, _, port = serving.url.removeprefix("http://").rpartition(":")
        yield host, int(port)
    asyncio.run(queue.close())


def sent(place: Place, *parts: bytes, ends: bool = True) -> bytes:
    """Return the whole answer to these bytes, until the other side hangs up. ends: close the sending side."""
    received = b""
    with socket.create_connection(place, timeout=20) as line, suppress(ConnectionError, TimeoutError):
        for part in parts:
            line.sendall(part)
        if ends:
            with suppress(OSError):  # it was answered and hung up already: the answer can still be read
                line.shutdown(socket.SHUT_WR)
        while part := line.recv(2**16):
            received += part
    return received


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


def test_an_endless_head_is_cut_off_and_others_are_answered_meanwhile(
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
    assert total < 2**26 and longest < 5.0  # a large bound, for a busy machine


def test_a_slow_head_is_answered_408(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 0.5)
    with socket.create_connection(place, timeout=20) as line:
        received = b""
        line.settimeout(0.1)
        for byte in HEALTH + b"x-a: " + b"a" * 300:
            with suppress(TimeoutError, BrokenPipeError):
                line.sendall(bytes([byte]))
                if received := line.recv(2**16):
                    break
    status, error = refused(received)
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


POLL = b'{"runner": "r", "wait_s": 20}'


def posted(verb: str, body: bytes, key: str = "") -> bytes:
    head = f"POST /v1/store/{verb} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def statuses(line: socket.socket, count: int) -> list[int]:
    """Return the statuses of this many answers, or of those that come before the other side hangs up."""
    received = b""
    codes: list[int] = []
    while len(codes) < count:
        head, end, rest = received.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]) if end else 0
        if end and len(rest) >= size:
            received = rest[size:]
            codes.append(int(head.split()[1]))
            continue
        part = line.recv(2**16)
        if not part:
            break
        received += part
    return codes


@pytest.mark.parametrize("pipelined", [False, True])
def test_long_bodies_and_short_ones_follow_each_other_on_one_connection(place: Place, pipelined: bool) -> None:
    keyring = Keyring(SECRET)
    sizes = (30_000, 30_000, 100, 2**20, 100)
    requests = [posted("statistics", b" " * size + b"{}", keyring.admin) for size in sizes]
    with socket.create_connection(place, timeout=20) as line:
        if pipelined:
            line.sendall(b"".join(requests))
            assert statuses(line, 5) == [200] * 5
        else:
            for request in requests:
                line.sendall(request)
                assert statuses(line, 1) == [200]


@contextmanager
def roomed(monkeypatch: pytest.MonkeyPatch, most: int) -> Iterator[tuple[ServerThread, Place, str]]:
    """Serve with room for this many connections; yield the server, its address, and its admin key."""
    monkeypatch.setattr(bounds, "CONNECTIONS", most)
    keyring = Keyring(SECRET)
    queue = LocalRolloutQueue(open_store(), keyring)
    with serve(queue, keyring) as serving:
        host, _, port = serving.url.removeprefix("http://").rpartition(":")
        yield serving, (host, int(port)), keyring.admin
    asyncio.run(queue.close())


def connections(serving: ServerThread) -> set[HttpConnection]:
    return serving._server.server_state.connections  # they are Etude's own


def answering(serving: ServerThread) -> int:
    """Return the number of connections whose request is not answered yet."""
    cycles = [
        connection.cycle
        for connection in list(connections(serving))
        if connection.has_request and connection.cycle is not None
    ]
    return sum(not cycle.response_complete for cycle in cycles)


def on_the_loop(serving: ServerThread, work: Callable[[], object]) -> None:
    done = threading.Event()

    def do() -> None:
        work()
        done.set()

    next(iter(connections(serving))).loop.call_soon_threadsafe(do)
    assert done.wait(10)


def soon(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()


@pytest.mark.parametrize(
    "sends",
    [b"", b"GET /", posted("find", b"")[:-4] + b"\r\nx-a: b", posted("find", b"x" * 60_000)[:-59_000]],
    ids=["nothing", "line", "head", "body"],
)
def test_anonymous_connections_make_room_even_if_busy_and_before_those_with_a_key(
    monkeypatch: pytest.MonkeyPatch, sends: bytes
) -> None:
    with roomed(monkeypatch, 8) as (serving, place, admin), ExitStack() as stack:
        known = [stack.enter_context(socket.create_connection(place, timeout=20)) for _ in range(4)]
        for line in known:
            line.sendall(posted("statistics", b"{}", admin))
            assert statuses(line, 1) == [200]
        for _ in range(20):
            stranger = stack.enter_context(socket.create_connection(place, timeout=20))
            with suppress(ConnectionError):
                stranger.sendall(sends)
        assert len(connections(serving)) <= 8
        with socket.create_connection(place, timeout=20) as line:
            line.sendall(posted("statistics", b"{}", admin))
            assert statuses(line, 1) == [200]
        for line in known:
            line.sendall(posted("statistics", b"{}", admin))
            assert statuses(line, 1) == [200], "a client with a key stays connected"


def test_anonymous_connections_have_a_quarter_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.store.http.connection.ANONYMOUS_GRACE_S", 0.0)
    with roomed(monkeypatch, 16) as (serving, place, _), ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection(place, timeout=20)) for _ in range(12)]
        assert soon(lambda: len(connections(serving)) == 4)
        assert lines[0].recv(10) == b"", "the first ones go"
        lines[-1].sendall(HEALTH + b"\r\n")
        assert statuses(lines[-1], 1) == [200]


@pytest.mark.parametrize("known", [False, True], ids=["stranger", "with a key"])
def test_a_client_that_does_not_read_its_responses_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    with roomed(monkeypatch, 64) as (serving, place, admin), socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(place)
        line.settimeout(0.2)
        head = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n"
        key = f"authorization: Bearer {admin}\r\n".encode() if known else b""
        request = head + key + b"\r\n"
        assert soon(lambda: len(connections(serving)) == 1)
        (connection,) = connections(serving)

        def stuck() -> bool:
            if not connection.pipeline:
                line.sendall(request * 4)
            return connection.transport.get_write_buffer_size() > 2**16

        assert soon(stuck)
        now = time.monotonic()
        on_the_loop(serving, lambda: connection.check_timeouts(now))
        on_the_loop(serving, lambda: connection.check_timeouts(now + bounds.DRAINED_S + 1))
        assert connection in connections(serving)
        assert (connection in serving._server._limiter.idle) == known, "it may go for others"
        on_the_loop(serving, lambda: connection.check_timeouts(now + 1000))
        assert soon(lambda: not connections(serving))
        assert not serving._server._limiter.idle and not serving._server._limiter.anonymous
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "it is no failure"


def test_a_client_that_reads_slowly_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    with roomed(monkeypatch, 64) as (serving, place, _), socket.socket() as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect(place)
        line.settimeout(10)
        line.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 12)
        assert soon(lambda: len(connections(serving)) == 1)
        (connection,) = connections(serving)
        received, now = 0, time.monotonic()
        while received < 12 * 2**16:
            before = connection.transport.get_write_buffer_size()
            received += len(line.recv(2**16))
            if connection.transport.get_write_buffer_size() < before:
                now += bounds.ANONYMOUS_S - 1
                on_the_loop(serving, partial(connection.check_timeouts, now))
        assert connection in connections(serving)


def test_the_longest_silent_connection_makes_room_if_all_have_keys(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "etude.store")
    with roomed(monkeypatch, 8) as (serving, place, admin), ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection(place, timeout=20)) for _ in range(7)]
        for line in lines:
            line.sendall(posted("statistics", b"{}", admin))
            assert statuses(line, 1) == [200]
        assert lines[0].recv(10) == b"", "six of eight are kept for those with a key, as long as one is silent"
        for number in range(1, 9):  # as many as the limit are being answered
            poll = stack.enter_context(socket.create_connection(place, timeout=20))
            poll.sendall(posted("claim", POLL, admin))
            assert soon(lambda number=number: answering(serving) == number)
        status, error = refused(sent(place, ends=False))  # the refusal comes before the request
        assert status == 503 and "reached its limit of connections" in error["message"]
    assert sum("Raise the limit with: ulimit -n" in record.getMessage() for record in caplog.records) == 1


def test_an_attempt_with_many_connections_displaces_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with roomed(monkeypatch, 16) as (serving, place, admin), ExitStack() as stack:
        own = Keyring(SECRET).model_key(AttemptId(0, 0), 60.0)
        known = stack.enter_context(socket.create_connection(place, timeout=20))
        known.sendall(posted("statistics", b"{}", admin))
        assert statuses(known, 1) == [200]
        slow = [stack.enter_context(socket.create_connection(place, timeout=20)) for _ in range(15)]
        for line in slow:
            line.sendall(posted("find", b"x" * 1000, own)[:-10])
        room = serving._server._limiter
        assert soon(lambda: len(connections(serving)) == 12 and not room.anonymous)
        for line in slow[:4]:
            assert line.recv(10) == b"", "its first ones go"
        for line in (known, stack.enter_context(socket.create_connection(place, timeout=20))):
            line.sendall(posted("statistics", b"{}", admin))
            assert statuses(line, 1) == [200]
        for line in slow:
            line.close()
        assert soon(lambda: not room._attempts)


def test_a_lack_of_file_descriptors_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import os
    import resource

    caplog.set_level(logging.INFO, "etude.store")
    room, limits = ConnectionLimiter(), resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 1, limits[1]))
    filled: list[int] = []
    try:
        with suppress(OSError):
            while True:
                filled.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(3):
            room.enforce_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for opened in (descriptor, *filled):
            os.close(opened)
    room.enforce_limits()
    messages = [record.getMessage() for record in caplog.records]
    assert (
        len(messages) == 2 and "can open no more files (Too many open files)" in messages[0] and "again" in messages[1]
    )
