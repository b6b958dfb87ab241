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
from typing import Any

from etude.errors import EtudeError, StoreError
from etude.view.catalog import RunCatalog
from etude.view.queries.runs import list_runs, summarize
from etude.view.replies import to_json
from etude.view.run_reader import RunReader

MOST_STREAMS = 64
"""Open streams at most. A page without a stream asks every few seconds."""
LOOK_S = 2.0
"""Seconds between two looks at a run. A page asks all its queries again after each change that is seen."""
PAUSE = 20.0
"""The least pause between two looks, in processor times of a look: looking takes at most 5 % of one core."""
HEARTBEAT_S = 15.0
"""Seconds without an event after which a comment is sent, so that the server notices a browser that has gone."""


class ChangeWatcher:
    """Looks at runs for all streams. Streams of the same run share each look."""

    def __init__(self, catalog: RunCatalog, closing: asyncio.Event) -> None:
        self._catalog = catalog
        self._closing = closing
        self._lock = threading.Lock()
        """The lock of looks, which wait for no query."""
        self._looks: dict[str, tuple[float, str]] = {}
        """The time of the next look at each run, and the stamp of the last one."""
        self._position = 0
        """The last known end of the journal in a database; -1 if it could not be read."""
        self.streams = 0
        """The open streams."""

    def stamp(self, run: str) -> str:
        """Return a text that is another one after a change of the run; of any run if `run` is empty."""
        with self._lock:
            due, stamp = self._looks.get(run, (0.0, ""))
            if time.monotonic() >= due:
                began = time.thread_time()
                stamp = f"{zlib.crc32(to_json(self._read(run))):08x}"
                self._looks[run] = time.monotonic() + max(LOOK_S, PAUSE * (time.thread_time() - began)), stamp
            return stamp

    def _read(self, run: str) -> Any:
        if not run:
            return list_runs(self._catalog)
        with self._catalog.reader(run, briefly=True) as reader:
            return summarize(reader), self._find_end(reader)

    def _find_end(self, reader: RunReader) -> int:
        """Return the end of the journal in a database; the last known one during a query."""
        if reader.database and reader.lock.acquire(blocking=False):
            try:
                self._position = reader.journal.position
            except StoreError:  # the pages ask, and show the error; the next look connects again
                self._position = -1
                reader.close()
            finally:
                reader.lock.release()
        return self._position

    async def events(self, run: str) -> AsyncIterator[bytes]:
        """Yield the stamp of a run as an event, at first and after each change, until the server ends.

        The first `anext` counts the stream before it waits, and raises if the run is unknown.
        """
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
        except EtudeError:
            if not last:
                raise
            # The run is gone: the next query of the page says so.
        finally:
            self.streams -= 1
