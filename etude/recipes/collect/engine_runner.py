"""The run's own runner: it claims rollouts from the run's rollout queue, and an engine plays them.

consumes       queued rollouts of the queue in this process
produces       attempts, each with its end in the journal; ends of one turn of the event loop share a transaction
waits for      the queue, while it has nothing to claim; the player, whose limits bound an attempt
unblocked by   a claim; an attempt's end; its own cancellation, after which the queue repeats the attempts

It lives on the event loop of the run, as long as the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from etude.errors import EtudeError
from etude.recipes.collect.evaluation_player import evaluated_answer
from etude.recipes.collect.player import EnginePlayer, TurnSeeds
from etude.recipes.collect.requested import RequestedRollouts
from etude.recipes.collect.rollouts import PlayedRollout
from etude.recipes.collect.sampling import derived_seed
from etude.records import Outcome, SamplingParams
from etude.rewards import Verdict
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.records import AttemptEnd, LeasedAttempt, RecordedTurn
from etude.store.queue.rollout_limits import RolloutLimits, RolloutPurpose

CLAIM_S = 60.0
"""Seconds of one claim."""
MAX_CLAIMS = 1000
"""Rollouts of one claim. The player bounds how many answers are drawn at a time."""


class EngineRunner:
    """Plays the rollouts of a queue with an engine, any number of them at a time."""

    def __init__(
        self,
        queue: LocalRolloutQueue,
        players: Mapping[RolloutPurpose, tuple[EnginePlayer, SamplingParams]],
        seed: int,
    ) -> None:
        """players: makes the attempts for each use, with these sampling parameters. seed: of the run; each turn's is
        derived from it."""
        self._queue = queue
        self._players = players
        self._seed = seed
        self._failure: asyncio.Future[None] | None = None
        """The error that ended the runner. It stays so: the queue does not repeat the attempts that it left."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()
        self._ends: list[tuple[AttemptEnd, PlayedRollout]] = []
        """Attempts that ended in this turn of the event loop, and are not written yet."""

    async def run(self, requested: RequestedRollouts) -> None:
        """Play until this is cancelled, and report each end. Raise the error of the engine or the queue."""
        if self._failure is None:
            self._failure = asyncio.get_running_loop().create_future()
            self._begin(self._claim(requested), self._tasks)
        try:
            await self._failure
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._begin_write(requested)
            await asyncio.gather(*self._writes, return_exceptions=True)

    def _begin(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        assert self._failure is not None, "tasks begin when the runner runs"
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _claim(self, requested: RequestedRollouts) -> None:
        while True:
            for claim in await self._queue.claim_own(MAX_CLAIMS, CLAIM_S):
                self._begin(self._play(claim, requested), self._tasks)

    async def _play(self, claim: LeasedAttempt, requested: RequestedRollouts) -> None:
        """Play one attempt."""
        player, sampling = self._players[claim.use]
        sampling = replace(sampling, temperature=0.0) if claim.greedy else sampling
        task = claim.task
        if claim.use == "val":  # the ordinal that its reward and its environment see is the same at any step
            row, _ = evaluated_answer(task.ordinal)
            task = replace(task, ordinal=row)
        played = await player.play(task, sampling, self._seeds(claim))
        if not self._ends:
            asyncio.get_running_loop().call_soon(self._begin_write, requested)
        self._ends.append((_end_of(claim, played), played))

    def _seeds(self, claim: LeasedAttempt) -> TurnSeeds:
        ordinal = claim.task.ordinal

        def seed(turn: int) -> int:  # the seed of the first turn is the same with and without later turns
            if claim.use == "val":  # the same at any step, so that the same weights give the same answers
                return derived_seed(self._seed, "evaluate", *evaluated_answer(ordinal), *([turn] if turn else []))
            return derived_seed(self._seed, "train", ordinal, claim.sample, claim.drawn, *([turn] if turn else []))

        return seed

    def _begin_write(self, requested: RequestedRollouts) -> None:
        if self._ends:
            self._begin(self._write(self._ends, requested), self._writes)
            self._ends = []

    async def _write(self, ends: Sequence[tuple[AttemptEnd, PlayedRollout]], requested: RequestedRollouts) -> None:
        """Write the ends of one turn of the event loop, and report them."""
        written = await self._queue.finish_own([end for end, _ in ends])
        for (end, played), state in zip(ends, written, strict=True):
            if isinstance(state, EtudeError):
                raise state
            attempt = state.attempts[end.attempt_id.attempt]
            if played.succeeded and attempt.reward is None:  # the queue refused it
                played = replace(played, verdict=Verdict.failure(Outcome.INFRA_ERROR, attempt.error))
            requested.report(state, played)


def engine_limits(retries: int) -> Mapping[RolloutPurpose, RolloutLimits]:
    """Return the limits of rollouts that an engine plays. retries: further attempts at a rollout for training that
    failed; one that scores the model is attempted once. The player has the time limits."""
    return {
        "train": RolloutLimits(timeout_s=None, max_attempts=1 + retries),
        "val": RolloutLimits(timeout_s=None, max_attempts=1),
    }


def _end_of(claim: LeasedAttempt, played: PlayedRollout) -> AttemptEnd:
    verdict = played.verdict
    times = chain(played.times, repeat((0.0, 0.0)))
    turns = [RecordedTurn(turn, *each) for turn, each in zip(played.turns, times, strict=False)]
    return AttemptEnd(
        claim.attempt_id,
        verdict.outcome,
        verdict.error,
        turns,
        verdict.reward,
        verdict.parts,
        extracted=verdict.extracted_answer if claim.use == "val" else None,
        truncated=played.truncated,
        role=played.role,
    )
