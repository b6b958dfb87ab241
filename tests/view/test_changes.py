"""Streams of changes: one event for each change of their run, bounded in number, and ended with the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from etude.view import changes
from etude.view.catalog import RunCatalog
from etude.view.changes import ChangeWatcher
from etude.view.server import start_viewer
from tests.view.made import KEY, write_metrics, write_run


def test_a_stream_tells_of_changes_of_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "LOOK_S", 0.01)
    monkeypatch.setattr(changes, "HEARTBEAT_S", 0.2)
    for name in ("one", "other"):
        write_run(tmp_path / name, steps=2)

    async def told() -> None:
        watcher = ChangeWatcher(RunCatalog(tmp_path), closing := asyncio.Event())
        one, other, every = (watcher.events(run) for run in ("one", "other", ""))
        firsts = [await following(stream) for stream in (one, other, every)]
        assert all(first.startswith(b"data: ") for first in firsts) and watcher.streams == 3
        write_metrics(tmp_path / "one", 3, first=3)
        seconds = [await following(stream) for stream in (one, other, every)]
        assert seconds[0] != firsts[0] and seconds[2] != firsts[2], "its own change, and that of any run"
        assert seconds[1] == b": nothing new\n\n", "a heartbeat, and no change"
        closing.set()
        for stream in (one, other, every):
            with pytest.raises(StopAsyncIteration):
                await following(stream)
        assert watcher.streams == 0

    asyncio.run(told())


def test_a_look_waits_for_no_query_of_its_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    with closing(RunCatalog(tmp_path)) as catalog, ThreadPoolExecutor() as pool:
        watcher = ChangeWatcher(catalog, asyncio.Event())
        with catalog.reader("run") as reader:
            assert all(pool.submit(watcher.stamp, run).result(10) for run in ("run", ""))
            reader.database = str(tmp_path / "gone.sqlite")
            watcher = ChangeWatcher(catalog, asyncio.Event())
            during = pool.submit(watcher.stamp, "run").result(10)
        assert ChangeWatcher(catalog, asyncio.Event()).stamp("run") != during, "pages hear of a lost connection"


async def following(stream: AsyncIterator[bytes]) -> bytes:
    return await asyncio.wait_for(anext(stream), 10)


def test_streams_are_bounded_and_end_with_the_browser_or_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.view.server.MOST_STREAMS", 2)
    monkeypatch.setattr(changes, "LOOK_S", 0.05)
    write_run(tmp_path / "run", steps=1)
    server, address = start_viewer(tmp_path, key=KEY)
    with server, httpx2.Client(base_url=address, timeout=10) as client:

        def opened(run: str = "run") -> int:
            with client.stream("GET", f"api/changes?run={run}") as reply:
                return reply.status_code

        assert opened("nothing") == 404
        with client.stream("GET", "api/changes?run=run") as first, client.stream("GET", "api/changes") as second:
            both = first.iter_raw(), second.iter_raw()
            assert all(next(chunks).startswith(b"data: ") for chunks in both)
            assert first.headers["content-type"].startswith("text/event-stream")
            assert opened() == 503
        until = time.monotonic() + 10
        while (status := opened()) != 200 and time.monotonic() < until:
            time.sleep(0.05)
        assert status == 200, "the server noticed that both have gone"
        with client.stream("GET", "api/changes?run=run") as last:
            chunks = last.iter_raw()
            next(chunks)
            began = time.monotonic()
            server.stop()
            assert next(chunks, b"") == b"" and time.monotonic() - began < 8.0, "a stream holds up no end"
