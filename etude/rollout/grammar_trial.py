"""A check that a server's grammar engine is llguidance, before its first answer that is held to a grammar."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from etude.chat.grammar import HEADER, GrammarCompiler
from etude.errors import ConfigError, DataError, EngineError
from etude.records import SamplingParams
from etude.rollout.reported_sets import GrammarSets
from etude.rollout.server_client import ServerUnreachableError

if TYPE_CHECKING:
    from etude.rollout.server_engine import ServerEngine

TRIAL = HEADER + 'start: %json {"enum": [17]}\n'
"""A grammar that only llguidance reads, with one answer, which every vocabulary can spell."""
TRIAL_TOKENS = 16


class GrammarTrial:
    """The check that a server's grammar engine is llguidance, by a short answer before the first one that needs it."""

    def __init__(self, server: ServerEngine) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._passed_by = -1

    async def run(self, grammars: GrammarCompiler) -> None:
        """Let the server write the answer, once after each of its starts; raise if it cannot."""
        async with self._lock:
            incarnation = self._server.incarnation
            if self._passed_by != incarnation:
                await self._try(grammars)
                self._passed_by = incarnation

    async def _try(self, grammars: GrammarCompiler) -> None:
        server = self._server
        backend = server.backend
        prompt = [grammars.end_ids[0]]
        sampling = SamplingParams(max_tokens=TRIAL_TOKENS, grammar=TRIAL)
        ids: list[int] = []
        try:
            async with aclosing(backend.stream(server, prompt, sampling, prompt, "trial")) as chunks:
                async for chunk in chunks:
                    ids += chunk.ids
                    server.new_tokens += len(chunk.ids)
            sets = GrammarSets(grammars, TRIAL, server.shape.vocab_size)
            await asyncio.to_thread(sets.extend, ids)
        except ServerUnreachableError:
            raise
        except (DataError, EngineError) as error:
            raise ConfigError(
                f"An answer of a certain form was asked for, and the server at {server.url} cannot hold one to it "
                f"({error}). Start it with `{' '.join(backend.grammar_args)}`."
            ) from error
        if not ids:
            raise EngineError(f"The server at {server.url} wrote no token of an answer that was held to a grammar.")
