"""Time a normal client of a store and a model endpoint while another client attacks them.

    python -m bench.hostile [--seconds 6] [--shapes header note …] [--json FILE]

The server, the hostile client and the normal client are separate processes. The normal client sends a few dozen
requests a second to the store and the endpoint, first alone and then beside each shape. The table has the milliseconds
of its requests, the status codes of the hostile requests, and the growth of the server's memory.

    header      a header of 64 MB, without a key               slow       500 connections that never end a head
    pipelined   5,000 requests at once on a connection         chunked    a body in chunks of one byte
    note        27 MB of [],[],… by an attempt's reward key    deep       27 MB of [[[[…
    spans       3.9 MB of empty OTLP spans                     tokens     count_tokens of a megabyte of text
    once        idempotency keys, each new and long            beats      heartbeats of 4 MB under made-up names
    find        find with a million ids, by the admin key      typed      a note of [],[],… declared as protobuf
    scopes      a long resource with 15,000 empty scopes       fields     4 MB of fields that no export has
    repeated    4,096 empty spans of a resource of 350 values  bodiless   500 connections: a head, and no body
    unread      500 connections that read no answer
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.agents_load import body_of
from bench.common import written
from bench.hostile_client import SHAPES
from bench.workers import Worker
from etude.observe import make_console, progress

AIM_MS = 100.0
"""The largest allowed p99 of the normal client, in milliseconds."""
PAUSE_S = 0.02
"""Between two requests of each of its two connections."""
ATTEMPTS = 64


@dataclass(frozen=True)
class Figure:
    """Milliseconds of the normal client's requests beside one shape; `alone` is its p99 before."""

    name: str
    p50: float
    p99: float
    longest: float
    alone: float
    requests: int
    answers: dict[str, int]
    """The hostile requests by the status of their answer; `none` is a closed connection."""
    grown_mib: float
    """The growth of the server's memory during this shape."""

    @property
    def met(self) -> bool:
        """True if no client was kept waiting."""
        return self.p99 <= AIM_MS


async def request_times(server_info: dict[str, Any], seconds: float) -> list[float]:
    """Return the seconds of each request to the store and to the endpoint, over a connection each."""
    place = urlsplit(server_info["url"])
    took: list[float] = []
    until = time.perf_counter() + seconds

    async def ask(path: str, key: str, body: bytes) -> None:
        head = f"POST {path} HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {key}\r\n"
        call = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        while time.perf_counter() < until:
            began = time.perf_counter()
            writer.write(call)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 "), answer.decode()
            await reader.readexactly(int(answer.lower().split(b"content-length:", 1)[1].split(b"\r\n", 1)[0]))
            took.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_S)
        writer.close()

    attempt = {"rollout": server_info["first"], "attempt": 0}
    note = json.dumps({"attempt": attempt, "name": "seen", "data": {"a": 1}}).encode()
    async with asyncio.timeout(seconds + 120.0):
        await asyncio.gather(
            ask("/v1/store/record_note", server_info["rewards"][0], note),
            ask("/v1/store/statistics", server_info["key"], b"{}"),
            ask("/v1/chat/completions", server_info["keys"][0], body_of(0)),
        )
    return took


def measured(
    shape: str, server_info: dict[str, Any], server: Worker, alone: float, seconds: float, folder: Path
) -> Figure:
    """Measure the normal client beside one shape."""
    before = memory_mib(server.process.pid)
    client = Worker(shape, [sys.executable, "-m", "bench.hostile_client", shape], folder / f"{shape}.log")
    try:
        client.tell(json.dumps(server_info))
        client.hear()  # it has started
        took = sorted(asyncio.run(request_times(server_info, seconds)))
        client.tell("stop")
        answers = client.hear()
    finally:
        client.close()
    p50, p99, longest = (1e3 * took[int(part * (len(took) - 1))] for part in (0.5, 0.99, 1.0))
    return Figure(shape, p50, p99, longest, alone, len(took), answers, memory_mib(server.process.pid) - before)


def memory_mib(pid: int) -> float:
    """Return the memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def measure(shapes: Sequence[str], seconds: float, folder: Path, say: Any) -> list[Figure]:
    """Run every shape against the same server."""
    figures = []
    command = [sys.executable, "-m", "bench.agents_server", str(folder / "server"), str(ATTEMPTS)]
    (folder / "server").mkdir()
    server = Worker("the server", command, folder / "server.log")
    try:
        server_info = server.hear()
        asyncio.run(request_times(server_info, 1.0))
        for shape in shapes:
            took = sorted(asyncio.run(request_times(server_info, seconds / 2)))
            alone = 1e3 * took[int(0.99 * (len(took) - 1))]
            figures.append(measured(shape, server_info, server, alone, seconds, folder))
            say()
    finally:
        server.close()
    return figures


def shown(figures: Sequence[Figure]) -> Table:
    """Return the table of the figures; missed aims are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("shape")
    for title in ("p50, ms", "p99, ms", "longest, ms", "p99 before, ms", "answered", "memory, MiB", ""):
        table.add_column(title, justify="right")
    for figure in figures:
        answers = ", ".join(f"{status} × {count}" for status, count in sorted(figure.answers.items()))
        times = [f"{value:.1f}" for value in (figure.p50, figure.p99, figure.longest, figure.alone)]
        cells = [*times, answers, f"{figure.grown_mib:+.0f}", "" if figure.met else "misses"]
        table.add_row(figure.name, *cells, style="" if figure.met else "yellow")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="for which each shape is sent")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES, help="these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the workers are ended as well
    console = make_console()
    with tempfile.TemporaryDirectory() as made, progress("shapes", len(given.shapes), console) as bar:
        figures = measure(given.shapes, given.seconds, Path(made), bar.advance)
    console.print(shown(figures))
    if given.json is not None:
        ratios = {figure.name: figure.p99 / AIM_MS for figure in figures}
        about = {"load": os.getloadavg()[0], "aim_ms": AIM_MS}
        written(given.json, [asdict(figure) | {"met": figure.met} for figure in figures], ratios, about)
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
