"""Writes events of several rollouts in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from etude.store import Journal, Phase, RolloutState, events


class JournalBatch:
    """Collects what coroutines append in one turn of their event loop, and writes it in one transaction.

    A write waits for the disk. Rollouts that end together wait for it once.
    """

    def __init__(self, store: Journal) -> None:
        self._store = store
        self._events: list[events.Event] = []
        self._written: asyncio.Future[None] | None = None

    async def append(self, written: Sequence[events.Event]) -> None:
        """Return when these events are in the journal. Raises the error of the whole transaction."""
        if self._written is None:
            loop = asyncio.get_running_loop()
            self._written = loop.create_future()
            loop.call_soon(self._write)
        self._events += written
        await asyncio.shield(self._written)

    def _write(self) -> None:
        written, self._written = self._written, None
        batch, self._events = self._events, []
        assert written is not None
        try:
            self._store.append(batch)
        except Exception as error:
            written.set_exception(error)
            written.exception()  # each waiter raises it; if all were cancelled, asyncio must not report it
        else:
            written.set_result(None)


def cancel_queued(store: Journal, ids: Sequence[int], why: str) -> None:
    """Cancel those of these rollouts that are queued."""
    states = store.load_states(RolloutState, ids).values()
    store.append([events.RolloutCancelled(state.id, why) for state in states if state.phase is Phase.QUEUED])
