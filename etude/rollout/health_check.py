"""Whether an engine goes on behind the process that speaks for it.

A server is several processes. The one that is asked over HTTP says that all is well while another, which computes,
hangs. So that one is put a question that nobody can answer for it, and which it answers between two steps; whatever it
draws is an answer as well. One that is at a long step is not taken to hang: it has `MAX_SILENCE` seconds.
"""

from __future__ import annotations

import asyncio
import time

from etude.errors import EtudeError
from etude.rollout.http_client import ServerUnreachableError
from etude.rollout.server_engine import ServerEngine

__all__ = ["HealthCheck"]

MAX_SILENCE = 300.0
"""Seconds for which an engine may say nothing: for the longest prompt, or a kernel that is compiled when it is used."""
PROBES_PER_SILENCE = 30
"""How often it is asked in as long a time, while it answers."""


class HealthCheck:
    """One server's. Used on its event loop."""

    def __init__(self, server: ServerEngine) -> None:
        self._server = server
        self._probe_task: asyncio.Task[None] | None = None
        self._has_answered, self._since = True, 0.0

    def is_hung(self) -> bool:
        """Whether it owes an answer for too long. To be called again and again: that is when it is asked."""
        now = time.monotonic()
        if self._has_answered and now - self._since > MAX_SILENCE / PROBES_PER_SILENCE:
            self._has_answered, self._since = False, now
        if not self._has_answered and (self._probe_task is None or self._probe_task.done()):
            self._probe_task = asyncio.create_task(self._probe())
        return not self._has_answered and now - max(self._since, self._server.last_token_time) > MAX_SILENCE

    def reset(self) -> None:
        """It owes nothing, until it is asked again."""
        if self._probe_task is not None:
            self._probe_task.cancel()
        self._probe_task, self._has_answered = None, True

    async def _probe(self) -> None:
        try:
            await self._server.is_suspended()
        except ServerUnreachableError:
            return
        except (EtudeError, ValueError, KeyError):
            pass  # it refuses to answer, or makes no sense, and so it is there
        self._has_answered = True
