"""Server-sent events: a page gets one when its run, or any run, has changed, and then asks again.

consumes       the small files of runs, and the times of all their files
produces       one event for each change, and a comment when nothing has changed for a while
waits for      the next look
unblocked by   the end of the server, and of the connection
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress

from etude.errors import EtudeError
from etude.view.catalog import RunCatalog
from etude.view.queries.runs import list_runs, summarize
from etude.view.replies import to_json

MOST_STREAMS = 64
"""Open streams at most. A page without a stream asks every few seconds."""
LOOK_S = 1.0
"""Seconds between two looks at a run."""
PAUSE = 20.0
"""The least pause between two looks, in durations of a look: looking takes at most 5 % of one core."""
HEARTBEAT_S = 15.0
"""Seconds without an event after which a comment is sent, so that the server notices a browser that has gone."""


class ChangeWatcher:
    """Looks at runs for all streams. Streams of the same run share each look."""

    def __init__(self, catalog: RunCatalog, closing: asyncio.Event) -> None:
        self._catalog, self._closing = catalog, closing
        self._lock = threading.Lock()
        self._looks: dict[str, tuple[float, str]] = {}
        """The time of the next look at each run, and the stamp of the last one."""
        self.streams = 0
        """The open streams."""

    def stamp(self, run: str) -> str:
        """Return a text that is another one after a change of the run; of any run if `run` is empty."""
        with self._lock:
            due, stamp = self._looks.get(run, (0.0, ""))
            began = time.monotonic()
            if began >= due:
                stamp = self._look(run)
                ended = time.monotonic()
                self._looks[run] = began + max(LOOK_S, PAUSE * (ended - began)), stamp
            return stamp

    def _look(self, run: str) -> str:
        if not run:
            return f"{zlib.crc32(to_json(list_runs(self._catalog))):08x}"
        with self._catalog.reader(run, briefly=True) as reader:
            return f"{zlib.crc32(to_json(summarize(reader))):08x}"

    async def events(self, run: str) -> AsyncIterator[bytes]:
        """Yield the stamp of a run as an event, at first and after each change, until the server ends."""
        self.streams += 1
        try:
            last, sent_at = "", 0.0
            while not self._closing.is_set():
                stamp = await asyncio.to_thread(self.stamp, run)
                now = time.monotonic()
                if stamp != last or now - sent_at >= HEARTBEAT_S:
                    yield b": nothing new\n\n" if stamp == last else f"data: {stamp}\n\n".encode()
                    last, sent_at = stamp, now
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), LOOK_S)
        except EtudeError:  # the run is gone: the next query of the page says so
            pass
        finally:
            self.streams -= 1
