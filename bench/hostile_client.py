"""The hostile client of `bench.hostile`, in its own process: `python -m bench.hostile_client SHAPE`.

It reads the server's address and keys, and prints that it has begun. It sends requests of one shape over a few
connections until it reads another line, and then prints the status codes of the answers.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any
from urllib.parse import urlsplit

__all__ = ["SHAPES"]

CONNECTIONS = 4
SILENT = 500
"""Connections of the shapes `slow`, `bodiless` and `unread`."""
SPANS = "application/x-protobuf"
Request = Iterator[bytes]
ServerInfo = dict[str, Any]
_numbers = count()


def _posted(path: str, key: str, body: bytes, more: str = "", kind: str = "application/json") -> Request:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n{more}"
    yield f"{head}content-type: {kind}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    yield body


def _noted(
    server_info: ServerInfo, data: bytes, more: str = "", which: int = 1, kind: str = "application/json"
) -> Request:
    body = b'{"attempt":{"rollout":%d,"attempt":0},"name":"x","data":%s}' % (server_info["first"] + which, data)
    return _posted("/v1/store/record_note", server_info["rewards"][which], body, more, kind)


def _header(_: ServerInfo) -> Request:
    yield b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\nX-A: "
    for _ in range(64):
        yield b"a" * 2**20
    yield b"\r\n\r\n"


def _pipelined(_: ServerInfo) -> Request:
    yield b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n" * 5000


def _chunked(server_info: ServerInfo) -> Request:
    yield b"POST /v1/store/record_note HTTP/1.1\r\nhost: x\r\n"
    yield f"authorization: Bearer {server_info['rewards'][1]}\r\n".encode()
    yield b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    for _ in range(64):
        yield b"1\r\na\r\n" * 20_000


def _spans(server_info: ServerInfo) -> Request:
    spans = b"\x12\x00" * 1_950_000
    for _ in range(2):
        spans = bytes([10 if _ else 18]) + _varint(len(spans)) + spans
    return _posted("/v1/traces", server_info["rewards"][1], spans, kind=SPANS)


def _varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + _varint(number >> 7) if number > 127 else bytes([number])


def _tokens(server_info: ServerInfo) -> Request:
    text = "Which way is it to the gate, and what shall I see on the way there? " * 15_000
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    return _posted("/v1/messages/count_tokens", server_info["keys"][1], json.dumps(body).encode())


def _once(server_info: ServerInfo) -> Request:
    number = next(_numbers)
    size = 60_000 if number % 10 == 0 else 180
    return _noted(server_info, b"1", f"idempotency-key: {number}-{'k' * size}\r\n")


def _beats(server_info: ServerInfo) -> Request:
    body = {"runner": f"made-up-{next(_numbers)}", "running": [], "info": {"a": "x" * 4_000_000}}
    return _posted("/v1/store/heartbeat", server_info["runner"], json.dumps(body).encode())


def _typed(server_info: ServerInfo) -> Request:
    return _noted(server_info, b"[%s[]]" % (b"[]," * 2_400_000), kind=SPANS)


def _within(*numbers: int, inner: bytes) -> bytes:
    """Return nested protobuf messages, each in the field of this number."""
    for number in reversed(numbers):
        inner = bytes([number << 3 | 2]) + _varint(len(inner)) + inner
    return inner


def _scopes(server_info: ServerInfo) -> Request:
    resource = _within(1, 1, 2, 1, inner=b"x" * 3_900_000)
    return _posted(
        "/v1/traces", server_info["rewards"][1], _within(1, inner=resource + b"\x12\x00" * 15_000), kind=SPANS
    )


def _repeated(server_info: ServerInfo) -> Request:
    resource = _within(1, inner=_within(1, inner=b"\x12\x02\x10\x01") * 350)
    spans = _within(2, inner=b"\x12\x00" * 4096)
    return _posted("/v1/traces", server_info["rewards"][1], _within(1, inner=resource + spans), kind=SPANS)


def _unread(_: ServerInfo) -> Request:
    yield b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 12


def _bodiless(_: ServerInfo) -> Request:
    yield b"POST /v1/store/find HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n"


def _find(server_info: ServerInfo) -> Request:
    query = {"ids": list(range(1_000_000))}
    return _posted("/v1/store/find", server_info["key"], json.dumps({"query": query}).encode())


SHAPES: dict[str, Callable[[ServerInfo], Request]] = {
    "header": _header,
    "slow": _header,
    "pipelined": _pipelined,
    "chunked": _chunked,
    "note": lambda server_info: _noted(server_info, b"[" + b"[]," * 9_000_000 + b"[]]"),
    "deep": lambda server_info: _noted(server_info, b"[" * 13_500_000 + b"]" * 13_500_000),
    "spans": _spans,
    "tokens": _tokens,
    "once": _once,
    "beats": _beats,
    "find": _find,
    "typed": _typed,
    "scopes": _scopes,
    "fields": lambda server_info: _posted("/v1/traces", server_info["rewards"][1], b"\x78\x00" * 2_000_000, kind=SPANS),
    "repeated": _repeated,
    "bodiless": _bodiless,
    "unread": _unread,
}
HELD: dict[str, Callable[[ServerInfo], Request]] = {"bodiless": _bodiless, "unread": _unread}
"""Shapes of many connections that send this once and then wait, without reading."""


def answered(place: tuple[str, int], request: Request) -> str:
    """Return the status of the answer to one request, sent on a separate connection."""
    received = b""
    with suppress(OSError), socket.create_connection(place, timeout=60) as line:
        with suppress(OSError):  # an answer may be there although not all was read
            for part in request:
                line.sendall(part)
        received = line.recv(4096)
        while line.recv(2**16):
            pass
    return received.split()[1].decode() if received.startswith(b"HTTP/1.1 ") else "none"


def dripped(place: tuple[str, int], stopped: threading.Event, counted: Counter[str]) -> None:
    """Send endless request heads on many connections."""
    lines = []
    while not stopped.wait(0.5):
        with suppress(OSError):
            while len(lines) < SILENT:
                lines.append(socket.create_connection(place, timeout=5))
                lines[-1].sendall(b"GET /")
        for line in list(lines):
            try:
                line.sendall(b"a")
            except OSError:
                counted["none"] += 1
                lines.remove(line)


def held(place: tuple[str, int], stopped: threading.Event, counted: Counter[str], request: list[bytes]) -> None:
    """Open connections that send a request and read nothing; replace each that is closed."""
    lines: list[socket.socket] = []
    while not stopped.wait(0.5):
        gone, _, _ = select.select(lines, [], [], 0)
        for line in gone:
            with suppress(OSError):
                if line.recv(1, socket.MSG_PEEK):
                    continue  # an answer, which is left there
            counted["none"] += 1
            lines.remove(line)
            line.close()
        with suppress(OSError):
            while len(lines) < SILENT:
                lines.append(socket.socket())
                lines[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                lines[-1].settimeout(5)
                lines[-1].connect(place)
                for part in request:
                    lines[-1].sendall(part)


def main(shape: str) -> None:
    """Send requests until the next input line."""
    server_info = json.loads(sys.stdin.readline())
    url = urlsplit(server_info["url"])
    place = (str(url.hostname), int(url.port or 0))
    counted: Counter[str] = Counter()
    stopped = threading.Event()

    def send() -> None:
        while not stopped.is_set():
            counted[answered(place, SHAPES[shape](server_info))] += 1

    if shape == "slow":
        threads = [threading.Thread(target=dripped, args=(place, stopped, counted), daemon=True)]
    elif shape in HELD:
        parts = list(HELD[shape](server_info))
        threads = [threading.Thread(target=held, args=(place, stopped, counted, parts), daemon=True)]
    else:
        threads = [threading.Thread(target=send, daemon=True) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    print("{}", flush=True)
    sys.stdin.readline()
    stopped.set()
    for thread in threads:
        thread.join(15)
    print(json.dumps(counted), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
