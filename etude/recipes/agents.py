"""Rollouts that agents make: asked for at a desk, played by runners, and read back when they have ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from etude.chat import Tokenizer, retold
from etude.config import Config
from etude.data.adapt import joined
from etude.errors import CollectionError
from etude.observe import Mean, Metrics, Sum, format_seconds, get_log
from etude.recipes.causes import sentences
from etude.recipes.play import Played, Seeds, ending
from etude.recipes.sampling import Sampling
from etude.records import Outcome, Task, Turn
from etude.rewards import Judge, Verdict
from etude.store import Journal, Phase, Rewarded, RolloutState, Status, TaskDropped, TaskState
from etude.store.desk import Desk, Find, Limits, Wanted

__all__ = ["SCORED", "AgentConfig", "Agents", "Losses", "Scorings", "asked_of", "counted", "place_of", "rewarded"]

SCORED = 2**40
"""From this ordinal on tasks are asked only to score the model; no step trains on them."""
MOST_SAMPLES, MOST_TASKS, MOST_STEPS, YARDSTICKS = 2**10, 2**30, 2**20, 2**12
"""Answers to one task, and answers in all, by which a step is scored at most; steps; ways of scoring told apart."""
ADDED = ("prompt", "row", "ground_truth", "extra_info")
"""Fields that a task has beside those of its file."""
OVERLONG = "endpoint/context_length"
"""How often the endpoint has refused a prompt that is longer than the model's context."""
LISTENING = 5.0
"""Seconds after which it is looked whether anybody is there to play."""
PAGE = 256
BLAMED = (Status.FAILED, Status.TIMED_OUT, Status.UNRESPONSIVE)
"""Ends that an attempt is blamed for."""


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
    strict: bool = Field(
        False, description="refuse requests whose fields the run decides or cannot serve, in place of ignoring those"
    )
    calls: int = Field(256, ge=1, description="calls to the model that are answered at once; more of them wait")
    external: Path | None = Field(
        None, description="a YAML file of other providers' models that agents may ask for: recorded, never trained"
    )
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
    """What became of the attempts at a step's rollouts, by every way in which one can be lost."""

    ended: Counter[str] = field(default_factory=Counter)
    """Attempts, by how they ended; and rollouts that ended without one."""
    retried: int = 0
    empty: int = 0
    unrewarded: int = 0
    turns: int = 0
    rows: int = 0
    rollouts: int = 0
    reused: int = 0
    """Tokens of prompts that the model had been shown or had written before, and that are the same."""

    def of(self, state: RolloutState, turns: Sequence[Turn]) -> None:
        """Count a rollout that ended."""
        self.rollouts += 1
        self.retried += max(len(state.attempts) - 1, 0)
        self.ended.update(attempt.status.value for attempt in state.attempts)
        if not state.attempts:
            self.ended[state.status.value] += 1
        rows, reused = joined(turns)
        self.turns += len(turns)
        self.empty += not turns
        self.rows += rows
        self.reused += reused

    def warn(self) -> None:
        """Tell of what no number of the console tells: that there is nothing to learn from."""
        if self.rollouts and self.empty == self.rollouts and self.ended[Outcome.SUCCEEDED.value]:
            get_log("recipes").warning(
                "None of the %d rollouts of this step called the model, so nothing was learned from them. Does the "
                "agent ask at `llm.base_url`, or, as a program, at OPENAI_BASE_URL?",
                self.rollouts,
            )

    def metrics(self) -> Metrics:
        """The numbers."""
        told = Metrics(
            {
                "agents/retried": Sum.of(self.retried),
                "agents/empty": Sum.of(self.empty),
                "agents/no_reward": Sum.of(self.unrewarded),
                "agents/turns": Mean.over(self.turns, self.rollouts),
                "agents/branches": Mean.over(self.rows, self.rollouts),
                "agents/tokens_reused": Sum.of(self.reused),
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
        self._refused = 0.0
        self.check: Callable[[], None] = lambda: None
        """Raises what ended the runners, where none of those is left that were started."""
        self.endpoint: Callable[[], Metrics] = Metrics
        """How the endpoint does that they call."""
        self.client: Callable[[], Desk] = lambda: desk
        """Another desk at the same rollouts, for any event loop."""

    def spent(self) -> Metrics:
        """What became of the rollouts that ended since this was last asked."""
        lost, self._losses = self._losses, Losses()
        lost.warn()
        found, told = lost.metrics(), self.endpoint()
        found.merge(told)
        refused = told.reduce().get(OVERLONG, 0.0)
        found.add("agents/over_long", Sum.of(refused - self._refused))
        self._refused = refused
        return found

    def retold(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said after the first prompt, in its order."""
        return retold(self._tokenizer, turns)

    async def ask(self, wanted: Sequence[tuple[int, Task, int]], use: Literal["train", "val"] = "train") -> None:
        """Have rollouts made: the id of each, its task, and which try at it is meant. Asking again does no harm."""
        loop = asyncio.get_running_loop()
        for id, _, _ in wanted:
            self._ends.setdefault(id, loop.create_future())
        ids = [id for id, _, _ in wanted]
        known: dict[int, RolloutState] = {}
        for at in range(0, len(ids), PAGE):  # one that had ended before it was asked for is not told of again
            page = await self._desk.find(Find(ids=tuple(ids[at : at + PAGE]), limit=PAGE))
            known |= {state.id: state for state in page.rollouts}
        limits = {id: state.limits or self._limits for id, state in known.items()}  # as they were when it was asked for
        asked = [Wanted(task, sample, id, use, limits.get(id, self._limits)) for id, task, sample in wanted]
        await self._desk.enqueue(asked)
        self._tell([state for state in known.values() if state.status not in (Status.QUEUED, Status.RUNNING)])

    async def played(self, id: int, task: Task) -> Played:
        """How a rollout ended that was asked for."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.create_task(self._listen())
        try:
            state = await self._ends[id]
        finally:
            self._ends.pop(id, None)
            if not self._ends and self._waiter is not None:
                self._waiter.cancel()
                self._waiter = None
        return await self._read(state, task)

    @property
    def tags(self) -> tuple[str, ...]:
        """Turns with one of these are learned from; all, where there are none."""
        return self._config.tags

    def counts(self, state: RolloutState) -> bool:
        """Whether a rollout that ended has a score, as the journal tells it."""
        if state.status is Status.SUCCEEDED:
            return state.last is not None and state.last.reward is not None
        return self._lost(state).outcome is Outcome.SUCCEEDED

    def replayed(self, state: RolloutState, turns: Sequence[Turn]) -> Played:
        """A rollout that counts, as the journal has it; the same as when it was played."""
        verdict = self._told(state)
        assert verdict is not None and verdict.outcome is Outcome.SUCCEEDED, f"rollout {state.id} has no score"
        return _played(state, turns, verdict)

    # -- what came of them --------------------------------------------------------------------------------------------

    async def _read(self, state: RolloutState, task: Task) -> Played:
        """A rollout that ended, as those know it who learn from it. It earns nothing more from now on, so that what is
        read here is what is read again."""
        (state,) = await self._desk.seal([state.id])
        last = state.last
        turns = tuple(await self._desk.turns(state.id)) if last is not None and last.turns else ()
        if state.use == "train":
            self._losses.of(state, turns)
        verdict = await self._verdict(state, task, turns)
        if state.attempts and state.status in BLAMED:
            notes = [note for note in await self._desk.events(state.id) if note["attempt"] == len(state.attempts) - 1]
            verdict = replace(verdict, error="\n".join([verdict.error, *sentences(notes)]))
        return _played(state, turns, verdict)

    async def _verdict(self, state: RolloutState, task: Task, turns: Sequence[Turn]) -> Verdict:
        told, last = self._told(state), state.last
        if told is not None:
            return told
        assert last is not None, "who succeeded has tried"
        if self._judge.judges:
            answers = [turn.completion.text for turn in turns if turn.completion.finish != "abort"]
            judged = await self._judge.judge(task, answers[-1] if answers else "")
            if judged.outcome is Outcome.SUCCEEDED:
                return judged
            why = "The agent ended without a reward, and the run's `reward` could not judge its last answer instead. "
            return replace(judged, error=f"{why}{judged.error}")
        if any(turn.reward is not None for turn in turns):
            return Verdict(0.0)
        self._losses.unrewarded += state.use == "train"
        return self._failure(
            Outcome.FAILED,
            f"The agent ended rollout {state.id} without a reward. Have it return a number, call `etude.emit.reward`, "
            f"or give the run a `reward` that judges its last answer.",
        )

    def _told(self, state: RolloutState) -> Verdict | None:
        """What a rollout that ended is worth, where nobody is to be asked."""
        if state.status is not Status.SUCCEEDED:
            return self._lost(state)
        assert state.last is not None, "who succeeded has tried"
        return None if state.last.reward is None else Verdict(state.last.reward, state.last.parts)

    def _lost(self, state: RolloutState) -> Verdict:
        """What one that did not succeed is worth."""
        error = state.why or (state.last.error if state.last else "")
        return self._failure(Outcome(state.status.value), error or f"Rollout {state.id} ended {state.status}.")

    def _failure(self, outcome: Outcome, error: str) -> Verdict:
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
                silences = [runner.silent_s for runner in await self._desk.runners()]
                if ended or min(silences, default=math.inf) < self._config.silence:
                    alone, warned = time.monotonic(), False
                    continue
                silent = max(time.monotonic() - alone, min(silences, default=0.0))
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


def _played(state: RolloutState, turns: Sequence[Turn], verdict: Verdict) -> Played:
    """A rollout as those know it who learn from it. What failed counts for what is said, and its turns for nothing."""
    if state.status is not Status.SUCCEEDED:
        turns = [replace(turn, reward=None) for turn in turns]
    truncated = any(turn.completion.finish == "length" for turn in turns[-1:])
    return Played(tuple(turns), verdict, truncated, ending(turns, truncated, None))


def rewarded(store: Journal, id: int, played: Played) -> None:
    """Write what the run makes of a rollout that its agent gave no reward."""
    with store.writing() as writing:
        state = writing.state(RolloutState, id)
        assert state is not None, "who played has been asked for"
        given = state.last is None or state.last.reward is not None
        if given or state.settled is not None or played.verdict.outcome is not Outcome.SUCCEEDED:
            return
        told = played.verdict.reward, played.verdict.parts, played.truncated
        writing.take([Rewarded(id, len(state.attempts) - 1, *told)])


def counted(state: RolloutState, failed: float | Literal["drop"]) -> float | None:
    """What the rollout of an agent counted for, where failures do as `failed` says; None for nothing. What its attempt
    had earned before it failed is not that."""
    if state.status is Status.SUCCEEDED:
        return None if state.last is None else state.last.total
    return float(failed) if state.status in BLAMED and failed != "drop" else None


def place_of(rollout: int) -> int:
    """What a rollout's seeds follow from. The same weights are scored by the same answers, whatever the step."""
    return rollout if rollout < SCORED else SCORED + (rollout - SCORED) % MOST_TASKS


def asked_of(fields: Mapping[str, Any]) -> Any:
    """What a task asks: its prompt, or whatever else it says."""
    prompt = fields.get("prompt")
    return prompt if prompt is not None else {name: fields[name] for name in fields if name not in ADDED}


class Scorings:
    """Plays attempts that score the model: under names of their own, and set aside as soon as they are over.

    What a stop cut off goes on under the same names: an answer that was there is not drawn again.
    """

    def __init__(self, agents: Agents, store: Journal, yardstick: str) -> None:
        """yardstick: what names a way of scoring; another one asks other rollouts."""
        self._agents, self._store = agents, store
        self._edition = int.from_bytes(blake2b(yardstick.encode(), digest_size=8).digest(), "big") % YARDSTICKS
        self._step = 0
        self._asked: Counter[int] = Counter()

    def scores(self, step: int) -> None:
        """The attempts that follow are made to score this step."""
        self._step = step
        self._asked.clear()

    def asked(self, task: Task) -> object:
        """The prompt, or whatever else the task says."""
        return asked_of(task.fields)

    def retold(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said after the first prompt, in its order."""
        return self._agents.retold(turns)

    async def play(self, task: Task, sampling: Sampling, seeds: Seeds) -> Played:  # noqa: ARG002
        """One attempt. How it is sampled is said at the endpoint."""
        sample = self._asked[task.ordinal]
        self._asked[task.ordinal] += 1
        place = task.ordinal * MOST_SAMPLES + sample
        ordinal = SCORED + (self._edition * MOST_STEPS + self._step) * MOST_TASKS + place
        named = replace(task, ordinal=ordinal)
        await self._agents.ask([(ordinal, named, 0)], "val")
        played = await self._agents.played(ordinal, named)
        rewarded(self._store, ordinal, played)
        with self._store.writing() as writing:
            known = writing.state(TaskState, ordinal)
            if known is not None and known.phase is Phase.OPEN:
                writing.take([TaskDropped(ordinal, self._step, "it was asked to score the model")])
        return played
