"""A check that an engine still works behind the process that answers for it.

A server has several processes. The HTTP process may report that all is well while the engine process hangs. The check
asks something that only the engine can answer, between two steps. A drawn token counts as an answer too. A long step is
no hang: the engine has `MAX_SILENCE` seconds.
"""

from __future__ import annotations

import asyncio
import time

from etude.errors import EtudeError
from etude.rollout.http_client import ServerUnreachableError
from etude.rollout.server_engine import ServerEngine

MAX_SILENCE = 300.0
"""Seconds that an engine may be silent: enough for the longest prompt, or for a kernel that is compiled when first
used."""
PROBES_PER_SILENCE = 30
"""The number of probes in that time, while the engine answers."""


class HealthCheck:
    """The check of one server. Used on its event loop."""

    def __init__(self, server: ServerEngine) -> None:
        self._server = server
        self._probe_task: asyncio.Task[None] | None = None
        self._has_answered, self._since = True, 0.0

    def is_hung(self) -> bool:
        """Return True if an answer is overdue. Call this repeatedly: each call sends the next probe when it is due."""
        now = time.monotonic()
        if self._has_answered and now - self._since > MAX_SILENCE / PROBES_PER_SILENCE:
            self._has_answered, self._since = False, now
        if not self._has_answered and (self._probe_task is None or self._probe_task.done()):
            self._probe_task = asyncio.create_task(self._probe())
        return not self._has_answered and now - max(self._since, self._server.last_token_time) > MAX_SILENCE

    def reset(self) -> None:
        """Forget the pending probe; the next call of `is_hung` starts again."""
        if self._probe_task is not None:
            self._probe_task.cancel()
        self._probe_task, self._has_answered = None, True

    async def _probe(self) -> None:
        try:
            await self._server.is_suspended()
        except ServerUnreachableError:
            return
        except (EtudeError, ValueError, KeyError):
            pass  # a refusal or nonsense is an answer too
        self._has_answered = True
