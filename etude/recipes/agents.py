"""Rollouts that agents make: asked for at a desk, played by runners, and read back when they have ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from etude.chat import Tokenizer, retold
from etude.config import Config
from etude.errors import CollectionError
from etude.observe import Mean, Metrics, Sum, format_seconds, get_log
from etude.recipes.play import Played, Seeds
from etude.recipes.sampling import Sampling
from etude.records import Outcome, Task, Turn
from etude.rewards import Judge, Verdict
from etude.store import Journal, RolloutState, Status, TaskDropped
from etude.store.desk import Desk, Find, Limits, Wanted

__all__ = ["SCORED", "AgentConfig", "Agents", "Losses", "Scorings"]

SCORED = 2**40
"""From this ordinal on tasks are asked only to score the model; no step trains on them."""
MOST_SAMPLES, MOST_TASKS = 2**10, 2**30
"""Answers to one task, and answers in all, by which a step is scored at most."""
ADDED = ("prompt", "row", "ground_truth", "extra_info")
"""Fields that a task has beside those of its file."""
LISTENING = 5.0
"""Seconds after which it is looked whether anybody is there to play."""
PAGE = 256


class AgentConfig(Config):
    """Who plays rollouts, where an agent does, and how long it may take."""

    path: str | None = Field(
        None, description="path/to/file.py:name or module:name: a function or class, `@etude.agent`"
    )
    strategy: Literal["shm", "cs"] = Field(
        "shm", description="where runners are: threads of this process, or processes of their own"
    )
    runners: int = Field(1, ge=0, description="how many are started; 0 waits for some to join from elsewhere")
    at_once: int = Field(16, ge=1, description="attempts that each of them has under way")
    timeout: float = Field(600.0, gt=0, description="seconds that an attempt may take")
    silence: float = Field(60.0, gt=0, description="seconds without a word from its runner, after which it is lost")
    patience: float = Field(300.0, gt=0, description="seconds to wait for a runner where there is none")
    failed: float | Literal["drop"] = Field(
        "drop", description="what an attempt counts for that fails for good: nothing, or this reward"
    )
    tags: tuple[str, ...] = Field((), description="learn from turns with one of these tags alone; by default from all")
    parameters: Literal["force", "default"] = Field(
        "force", description="force: the run's sampling parameters hold; default: the agent's own, where it sets them"
    )
    calls: int = Field(256, ge=1, description="calls to the model that are answered at once; more of them wait")
    store: str | None = Field(
        None,
        description="address of a store (`etude store DIRECTORY`) that keeps the rollouts; its admin key is read from "
        "ETUDE_STORE_KEY. null keeps them in this process",
    )
    listen: str = Field(
        "127.0.0.1:0",
        pattern=r"^\S+:\d{1,5}$",
        description="address and port of the endpoint, and of the store that this process keeps; port 0 is a free one",
    )


@dataclass(slots=True)
class Losses:
    """What became of attempts, by every way in which one can be lost."""

    ended: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    empty: int = 0
    unrewarded: int = 0
    turns: int = 0
    rows: int = 0
    rollouts: int = 0

    def metrics(self) -> Metrics:
        """The numbers."""
        told = Metrics(
            {
                "agents/retried": Sum.of(self.retried),
                "agents/empty": Sum.of(self.empty),
                "agents/no_reward": Sum.of(self.unrewarded),
                "agents/branches": Mean.over(self.rows, self.rollouts),
            }
        )
        for outcome in Outcome:
            told.add(f"agents/{outcome.value}", Sum.of(self.ended[outcome.value]))
        return told


class Agents:
    """Asks for rollouts at a desk and tells how each ended. Lives in one event loop.

    Waits for the desk; a rollout's own limits bound it where a runner plays it, and where no runner is there for
    `patience` seconds that is a `CollectionError` which says so.
    """

    def __init__(
        self, config: AgentConfig, retries: int, desk: Desk, judge: Judge, tokenizer: Tokenizer, cursor: int = 0
    ) -> None:
        """retries: further attempts at a rollout that failed. cursor: where the desk stands; what ended before is
        looked up when it is asked for."""
        self._config, self._desk, self._judge, self._tokenizer = config, desk, judge, tokenizer
        self._limits = Limits(config.timeout, config.silence, max_attempts=1 + retries)
        self._ends: dict[int, asyncio.Future[RolloutState]] = {}
        self._cursor = cursor
        self._waiter: asyncio.Task[None] | None = None
        self._losses = Losses()
        self.check: Callable[[], None] = lambda: None
        """Raises what ended the runners, where none of those is left that were started."""
        self.endpoint: Callable[[], Metrics] = Metrics
        """How the endpoint does that they call."""

    def spent(self) -> Metrics:
        """What became of the rollouts that ended since this was last asked."""
        found, self._losses = self._losses.metrics(), Losses()
        found.merge(self.endpoint())
        return found

    def retold(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said after the first prompt, in its order."""
        return retold(self._tokenizer, turns)

    async def ask(self, wanted: Sequence[tuple[int, Task, int]], use: Literal["train", "val"] = "train") -> None:
        """Have rollouts made: the id of each, its task, and which try at it is meant. Asking again does no harm."""
        loop = asyncio.get_running_loop()
        for id, _, _ in wanted:
            self._ends.setdefault(id, loop.create_future())
        asked = [Wanted(task, sample, id, use, self._limits) for id, task, sample in wanted]
        await self._desk.enqueue(asked)
        ids = [id for id, _, _ in wanted]
        for at in range(0, len(ids), PAGE):  # one that had ended before it was asked for is not told of again
            page = await self._desk.find(Find(ids=tuple(ids[at : at + PAGE]), limit=PAGE))
            self._tell([state for state in page.rollouts if state.status not in (Status.QUEUED, Status.RUNNING)])

    async def played(self, id: int, task: Task) -> Played:
        """How a rollout ended that was asked for."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.create_task(self._listen())
        try:
            state = await self._ends[id]
        finally:
            self._ends.pop(id, None)
            if not self._ends:
                self._waiter.cancel()
        return await self._read(state, task)

    async def forget(self, ids: Sequence[int], why: str) -> None:
        """Nobody wants these any more."""
        for id in ids:
            self._ends.pop(id, None)
        await self._desk.cancel(ids, why)

    # -- what came of them --------------------------------------------------------------------------------------------

    async def _read(self, state: RolloutState, task: Task) -> Played:
        """A rollout that ended, as those know it who learn from it."""
        last = state.last
        self._losses.rollouts += 1
        self._losses.retried += max(len(state.attempts) - 1, 0)
        self._losses.ended[state.status.value] += 1
        turns = tuple(await self._desk.turns(state.id)) if last is not None and last.turns else ()
        self._losses.turns += len(turns)
        self._losses.empty += not turns
        self._losses.rows += rows(turns)
        chosen = tuple(turn for turn in turns if not self._config.tags or set(turn.tags) & set(self._config.tags))
        truncated = any(turn.completion.finish == "length" for turn in turns[-1:])
        return Played(chosen, await self._verdict(state, task, turns), truncated)

    async def _verdict(self, state: RolloutState, task: Task, turns: Sequence[Turn]) -> Verdict:
        last, error = state.last, state.why or (state.last.error if state.last else "")
        if state.status.value != Outcome.SUCCEEDED.value:
            return self._lost(Outcome(state.status.value), error or f"Rollout {state.id} ended {state.status}.")
        assert last is not None, "who succeeded has tried"
        if last.reward is not None:
            return Verdict(last.reward, last.parts)
        if self._judge.judges:
            judged = await self._judge.judge(task, turns[-1].completion.text if turns else "")
            if judged.outcome is Outcome.SUCCEEDED:
                return judged
            told = "The agent ended without a reward, and the run's `reward` could not judge its last answer instead. "
            return replace(judged, error=f"{told}{judged.error}")
        if last.paid:
            return Verdict(0.0)
        self._losses.unrewarded += 1
        return self._lost(
            Outcome.FAILED,
            f"The agent ended rollout {state.id} without a reward. Have it return a number, call `etude.emit.reward`, "
            f"or give the run a `reward` that judges its last answer.",
        )

    def _lost(self, outcome: Outcome, error: str) -> Verdict:
        """A failure, or what it is to count for. Of what the machines did wrong nothing is learned in any case."""
        if self._config.failed == "drop" or outcome in (Outcome.INFRA_ERROR, Outcome.CANCELLED):
            return Verdict.failure(outcome, error)
        return Verdict(float(self._config.failed), error=error)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Tell of ends as they come, until nobody waits any more."""
        alone = time.monotonic()
        warned = False
        try:
            while True:
                self._cursor, ended = await self._desk.wait(self._cursor, LISTENING)
                self.check()
                self._tell(ended)
                if ended or await self._desk.runners():
                    alone, warned = time.monotonic(), False
                    continue
                silent = time.monotonic() - alone
                if silent > self._config.patience:
                    raise CollectionError(
                        f"No runner has spoken for {format_seconds(silent)}, and {len(self._ends)} rollouts wait for "
                        f"one. Start some with `etude runner`, or have the run start them: `agent.runners=1`."
                    )
                if silent > 2 * LISTENING and not warned:
                    warned = True
                    get_log("recipes").warning(
                        "No runner is there: %d rollouts wait for one, for %s at most.",
                        *(len(self._ends), format_seconds(self._config.patience)),
                    )
        except Exception as error:
            for end in self._ends.values():
                if not end.done():
                    end.set_exception(error)

    def _tell(self, ended: Sequence[RolloutState]) -> None:
        for state in ended:
            end = self._ends.get(state.id)
            if end is not None and not end.done():
                end.set_result(state)


def rows(turns: Sequence[Turn]) -> int:
    """Into how many token sequences turns join: one for each that does not go on from another."""
    heads: list[tuple[int, ...]] = []
    for turn in turns:
        prompt = tuple(turn.prompt.tolist())
        whole = (*prompt, *turn.completion.ids.tolist())
        goes_on = next((at for at, head in enumerate(heads) if prompt[: len(head)] == head), None)
        if goes_on is None:
            heads.append(whole)
        else:
            heads[goes_on] = whole
    return len(heads)


class Scorings:
    """Plays attempts that score the model: under names of their own, and set aside as soon as they are over."""

    def __init__(self, agents: Agents, store: Journal) -> None:
        self._agents, self._store = agents, store
        self._step = 0
        self._asked: Counter[int] = Counter()

    def scores(self, step: int) -> None:
        """The attempts that follow are made to score this step."""
        self._step = step
        self._asked.clear()

    def asked(self, task: Task) -> object:
        """The prompt, or whatever else the task says."""
        prompt = task.fields.get("prompt")
        return prompt if prompt is not None else {name: task.fields[name] for name in task.fields if name not in ADDED}

    def retold(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said after the first prompt, in its order."""
        return self._agents.retold(turns)

    async def play(self, task: Task, sampling: Sampling, seeds: Seeds) -> Played:  # noqa: ARG002
        """One attempt. How it is sampled is said at the endpoint."""
        sample = self._asked[task.ordinal]
        self._asked[task.ordinal] += 1
        ordinal = SCORED + self._step * MOST_TASKS + task.ordinal * MOST_SAMPLES + sample
        named = replace(task, ordinal=ordinal)
        await self._agents.ask([(ordinal, named, 0)], "val")
        played = await self._agents.played(ordinal, named)
        self._store.append([TaskDropped(ordinal, self._step, "it was asked to score the model")])
        return played
