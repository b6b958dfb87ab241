"""A run whose rollouts are kept by a store elsewhere (`agent.store`), and whose journal holds them all the same.

    runners ◄─► store ◄─ the far desk ─► journal ◄─ the run
                  ▲
               endpoint ─► engine

What the run asks for it writes down first, and asks for then; what ended it copies with every turn, before anybody here
is told. So the journal is a journal like any other: it is replayed, resumed and looked at without the store. Asking
again does no harm, which is what a run does that was killed between the two.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from etude.config.env import store_address
from etude.errors import ConfigError, UnknownError
from etude.observe import get_log
from etude.records import Outcome
from etude.store import (
    AttemptEnded,
    AttemptStarted,
    Event,
    Journal,
    Phase,
    Rewarded,
    RolloutCancelled,
    RolloutExpired,
    RolloutQueued,
    RolloutState,
    Status,
    TaskIssued,
    TaskState,
    TurnPaid,
    TurnRecorded,
)
from etude.store.client import RemoteDesk
from etude.store.desk import Find, Page, Wanted

__all__ = ["FarDesk", "claimed_for", "key_of"]

JOINED, RUN = "joined.json", "run"
"""A file that says which run this is to a store; and what says there whose rollouts it keeps."""
OPEN = frozenset({Status.QUEUED, Status.RUNNING})


def key_of(url: str) -> str:
    """The admin key to the store that is joined."""
    _, key = store_address()
    if not key:
        raise ConfigError(
            f"`agent.store={url}` is joined by its admin key, and ETUDE_STORE_KEY does not tell it. `etude store` says "
            "where it is kept."
        )
    return key


async def claimed_for(desk: RemoteDesk, url: str, directory: Path, journal: Journal) -> None:
    """Have the store keep the rollouts of this run, and of no other."""
    place = directory / JOINED
    if not place.exists():
        if journal.rollouts(Phase.QUEUED, Phase.RUNNING):
            raise ConfigError(
                f"The run in {directory} kept its rollouts itself so far, and some are open: `agent.store` cannot be "
                "set now. Leave it out, or begin a new run."
            )
        place.write_text(json.dumps({"run": secrets.token_hex(8)}), encoding="utf-8")
    elif journal.rollouts(Phase.QUEUED, Phase.RUNNING):
        get_log("recipes").warning(
            "The store at %s went on lending this run's rollouts while nobody trained. Some may have failed for want of "
            "a model, and some may be drawn by other weights than those of their step. A run without `agent.store` is "
            "resumed exactly.",
            url,
        )
    mine = json.loads(place.read_text(encoding="utf-8"))["run"]
    try:
        _, found = await desk.resource(RUN, 1)
    except UnknownError:
        await desk.put(RUN, {"id": mine, "directory": str(directory)})
        _, found = await desk.resource(RUN, 1)  # where two came at once, the first has it
    if found["id"] != mine:
        raise ConfigError(
            f"The store at {url} keeps the rollouts of another run, {found['directory']}. Give this one a store of its "
            "own: `etude store DIRECTORY`."
        )


class FarDesk(RemoteDesk):
    """The desk elsewhere, whose rollouts are written down here too. For the loop of the run alone."""

    def __init__(self, url: str, key: str, journal: Journal) -> None:
        super().__init__(url, key)
        self._journal = journal

    async def enqueue(self, wanted: Sequence[Wanted]) -> list[int]:
        """Queue rollouts, once that they are wanted is written here."""
        ids = [one.id for one in wanted if one.id is not None]
        assert len(ids) == len(wanted), "a run names its rollouts"
        tasks = self._journal.some(TaskState, [one.task.ordinal for one in wanted])
        known = self._journal.some(RolloutState, ids)
        new: dict[int, TaskIssued] = {}
        events: list[Event] = []
        for id, one in zip(ids, wanted, strict=True):
            task, row = one.task, one.task.fields.get("row")
            if task.ordinal not in tasks and task.ordinal not in new:
                place = row if isinstance(row, int) else task.ordinal
                new[task.ordinal] = TaskIssued(task.ordinal, place, task.source, task.fields)
            if id not in known:
                events.append(RolloutQueued(id, task.ordinal, one.sample, one.use, one.limits))
        if new or events:
            self._journal.append([*new.values(), *events])
        return await super().enqueue(wanted)

    async def find(self, what: Find) -> Page:
        """The rollouts that were asked for; those that ended are written here."""
        page = await super().find(what)
        await self._copy(page.rollouts)
        return page

    async def wait(self, cursor: int, timeout_s: float, limit: int = 256) -> tuple[int, list[RolloutState]]:
        """Rollouts that ended, written here."""
        cursor, ended = await super().wait(cursor, timeout_s, limit)
        await self._copy(ended)
        return cursor, ended

    async def _copy(self, states: Sequence[RolloutState]) -> None:
        """Write down what became of those that the journal has as open."""
        ended = [state for state in states if state.status not in OPEN]
        told = {state.id: await self._events(state) for state in self._still_open(ended)}
        for state in self._still_open(ended):  # another may have been at it meanwhile
            self._journal.append(told[state.id])

    def _still_open(self, states: Sequence[RolloutState]) -> list[RolloutState]:
        here = self._journal.some(RolloutState, [state.id for state in states])
        return [state for state in states if state.id in here and here[state.id].status in OPEN]

    async def _events(self, state: RolloutState) -> list[Event]:
        """All that happened to a rollout, as its journal would have it had it been here."""
        events: list[Event] = []
        newest = len(state.attempts) - 1
        stopped = bool(state.why)
        for number, attempt in enumerate(state.attempts):
            events.append(AttemptStarted(state.id, number))
            turns = await self.turns(state.id, number) if attempt.turns else []
            for turn in turns:
                events.append(TurnRecorded(state.id, number, replace(turn, reward=None)))
            events += [TurnPaid(state.id, number, turn.index, turn.reward) for turn in turns if turn.reward is not None]
            if attempt.reward is not None:
                told = attempt.reward, attempt.parts, attempt.truncated, 0.0, attempt.role
                events.append(Rewarded(state.id, number, *told))
            cut = stopped and number == newest and attempt.status is Status.CANCELLED and attempt.watched
            if not cut:
                outcome, retry = Outcome(attempt.status.value), number < newest or stopped
                events.append(AttemptEnded(state.id, number, outcome, attempt.error, retry, attempt.watched))
        if stopped:
            expired = state.status is Status.FAILED
            events.append((RolloutExpired if expired else RolloutCancelled)(state.id, state.why))
        return events
