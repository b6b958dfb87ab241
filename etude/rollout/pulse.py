"""Whether an engine goes on behind the process that speaks for it.

A server is several processes. The one that is asked over HTTP says that all is well while another, which computes,
hangs. So that one is put a question that nobody can answer for it, and which it answers between two steps; whatever it
draws is an answer as well. One that is at a long step is not taken to hang: it has `SILENT` seconds.
"""

from __future__ import annotations

import asyncio
import time

from etude.errors import EtudeError
from etude.rollout.connection import AwayError
from etude.rollout.server import Server

__all__ = ["Pulse"]

SILENT = 300.0
"""Seconds for which an engine may say nothing: for the longest prompt, or a kernel that is compiled when it is used."""
ASKED = 30
"""How often it is asked in as long a time, while it answers."""


class Pulse:
    """One server's. Used on its event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._asked: asyncio.Task[None] | None = None
        self._answered, self._since = True, 0.0

    def stopped(self) -> bool:
        """Whether it owes an answer for too long. To be called again and again: that is when it is asked."""
        now = time.monotonic()
        if self._answered and now - self._since > SILENT / ASKED:
            self._answered, self._since = False, now
        if not self._answered and (self._asked is None or self._asked.done()):
            self._asked = asyncio.create_task(self._ask())
        return not self._answered and now - max(self._since, self._server.heard) > SILENT

    def rest(self) -> None:
        """It owes nothing, until it is asked again."""
        if self._asked is not None:
            self._asked.cancel()
        self._asked, self._answered = None, True

    async def _ask(self) -> None:
        try:
            await self._server.rests()
        except AwayError:
            return
        except (EtudeError, ValueError, KeyError):
            pass  # it refuses to answer, or makes no sense, and so it is there
        self._answered = True
