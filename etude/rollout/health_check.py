"""A check that the engine of a server works, and not only the HTTP process in front of it."""

from __future__ import annotations

import asyncio

from etude.errors import EtudeError
from etude.rollout.server_client import NONSENSE, ServerUnreachableError
from etude.rollout.server_engine import ServerEngine
from etude.running_time import running_time

MAX_SILENCE = 300.0
"""Seconds that an engine may be silent: enough for the longest prompt, or for a kernel that is compiled when first
used."""
PROBES_PER_SILENCE = 30
"""The number of probes in that time, while the engine answers."""


class HealthCheck:
    """A check that the engine of a server still works behind the HTTP process that answers for it.

    The HTTP process may report that all is well while the engine process hangs. The check asks something that only the
    engine can answer, between two steps. A drawn token counts as an answer too. A long step is no hang: the engine has
    `MAX_SILENCE` seconds.
    """

    def __init__(self, server: ServerEngine) -> None:
        self._server = server
        self._probe_task: asyncio.Task[None] | None = None
        self._has_answered = True
        self._since = 0.0

    def is_hung(self) -> bool:
        """Return True if an answer is overdue. Call this repeatedly: each call sends the next probe when it is due."""
        now = running_time()
        if self._has_answered and now - self._since > MAX_SILENCE / PROBES_PER_SILENCE:
            self._has_answered = False
            self._since = now
        if not self._has_answered and (self._probe_task is None or self._probe_task.done()):
            self._probe_task = asyncio.create_task(self._probe())
        return not self._has_answered and now - max(self._since, self._server.last_token_time) > MAX_SILENCE

    def reset(self) -> None:
        """Forget the pending probe; the next call of `is_hung` starts again."""
        if self._probe_task is not None:
            self._probe_task.cancel()
        self._probe_task = None
        self._has_answered = True

    async def _probe(self) -> None:
        try:
            await self._server.backend.is_suspended(self._server)
        except ServerUnreachableError:
            return
        except (EtudeError, *NONSENSE):
            pass  # a refusal or nonsense is an answer too
        self._has_answered = True
