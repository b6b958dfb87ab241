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

from etude.chat import Tokenizer, decode_conversation
from etude.config import Config
from etude.data.samples import count_joined_rows
from etude.errors import CollectionError
from etude.observe import Mean, Metrics, Sum, format_seconds, get_logger
from etude.recipes.collect.failure_messages import endpoint_errors
from etude.recipes.collect.player import AttemptResult, TurnSeeds, end_reason
from etude.recipes.collect.sampling import SamplingConfig
from etude.records import Outcome, Task, Turn
from etude.rewards import Judge, Verdict
from etude.store import AttemptRewarded, Journal, Phase, RolloutState, Status, TaskDropped, TaskState
from etude.store.rollout_queue import RolloutLimits, RolloutQuery, RolloutQueue, RolloutRequest

__all__ = [
    "FIRST_EVALUATION_ORDINAL",
    "AgentConfig",
    "AgentPlayer",
    "AgentRollouts",
    "AttemptStatistics",
    "effective_reward",
    "seed_ordinal",
    "task_prompt",
    "write_reward",
]

FIRST_EVALUATION_ORDINAL = 2**40
"""From this ordinal on tasks are asked only to score the model; no step trains on them."""
MOST_SAMPLES, MOST_TASKS, MOST_STEPS, MAX_EVALUATIONS = 2**10, 2**30, 2**20, 2**12
"""Answers to one task, and answers in all, by which a step is scored at most; steps; ways of scoring told apart."""
ADDED_FIELDS = ("prompt", "row", "ground_truth", "extra_info")
"""Fields that a task has beside those of its file."""
CONTEXT_LENGTH_METRIC = "endpoint/context_length"
"""How often the endpoint has refused a prompt that is longer than the model's context."""
POLL_INTERVAL_S = 5.0
"""Seconds after which it is looked whether anybody is there to play."""
PAGE = 256
FAILED_STATUSES = (Status.FAILED, Status.TIMED_OUT, Status.UNRESPONSIVE)
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
    max_concurrency: int = Field(16, ge=1, description="attempts that each of them has under way")
    timeout: float = Field(600.0, gt=0, description="seconds that an attempt may take")
    heartbeat_timeout: float = Field(
        60.0, gt=0, description="seconds without a word from its runner, after which it is lost"
    )
    runner_timeout: float = Field(300.0, gt=0, description="seconds to wait for a runner where there is none")
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
    max_calls: int = Field(256, ge=1, description="calls to the model that are answered at once; more of them wait")
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
class AttemptStatistics:
    """What became of the attempts at a step's rollouts, by every way in which one can be lost."""

    ended: Counter[str] = field(default_factory=Counter)
    """Attempts, by how they ended; and rollouts that ended without one."""
    retried: int = 0
    without_turns: int = 0
    without_reward: int = 0
    turns: int = 0
    rows: int = 0
    rollouts: int = 0
    reused: int = 0
    """Tokens of prompts that the model had been shown or had written before, and that are the same."""

    def add(self, state: RolloutState, turns: Sequence[Turn]) -> None:
        """Count a rollout that ended."""
        self.rollouts += 1
        self.retried += max(len(state.attempts) - 1, 0)
        self.ended.update(attempt.status.value for attempt in state.attempts)
        if not state.attempts:
            self.ended[state.status.value] += 1
        rows, reused = count_joined_rows(turns)
        self.turns += len(turns)
        self.without_turns += not turns
        self.rows += rows
        self.reused += reused

    def warn(self) -> None:
        """Tell of what no number of the console tells: that there is nothing to learn from."""
        if self.rollouts and self.without_turns == self.rollouts and self.ended[Outcome.SUCCEEDED.value]:
            get_logger("recipes").warning(
                "None of the %d rollouts of this step called the model, so nothing was learned from them. Does the "
                "agent ask at `llm.base_url`, or, as a program, at OPENAI_BASE_URL?",
                self.rollouts,
            )

    def metrics(self) -> Metrics:
        """The numbers."""
        metrics = Metrics(
            {
                "agents/retried": Sum.of(self.retried),
                "agents/empty": Sum.of(self.without_turns),
                "agents/no_reward": Sum.of(self.without_reward),
                "agents/turns": Mean.over(self.turns, self.rollouts),
                "agents/branches": Mean.over(self.rows, self.rollouts),
                "agents/tokens_reused": Sum.of(self.reused),
            }
        )
        for outcome in Outcome:
            metrics.add(f"agents/{outcome.value}", Sum.of(self.ended[outcome.value]))
        return metrics


class AgentRollouts:
    """Asks for rollouts at a desk and tells how each ended. Lives in one event loop.

    Waits for the desk; a rollout's own limits bound it where a runner plays it, and where no runner is there for
    `patience` seconds that is a `CollectionError` which says so.
    """

    def __init__(
        self,
        config: AgentConfig,
        retries: int,
        queue: RolloutQueue,
        judge: Judge,
        tokenizer: Tokenizer,
        cursor: int = 0,
    ) -> None:
        """retries: further attempts at a rollout that failed. cursor: where the desk stands; what ended before is
        looked up when it is asked for."""
        self._config, self._queue, self._judge, self._tokenizer = config, queue, judge, tokenizer
        self._limits = RolloutLimits(config.timeout, config.heartbeat_timeout, max_attempts=1 + retries)
        self._pending: dict[int, asyncio.Future[RolloutState]] = {}
        self._cursor = cursor
        self._waiter: asyncio.Task[None] | None = None
        self._statistics = AttemptStatistics()
        self._refused = 0.0
        self.check_runners: Callable[[], None] = lambda: None
        """Raises what ended the runners, where none of those is left that were started."""
        self.endpoint_metrics: Callable[[], Metrics] = Metrics
        """How the endpoint does that they call."""
        self.new_client: Callable[[], RolloutQueue] = lambda: queue
        """Another desk at the same rollouts, for any event loop."""

    def pop_metrics(self) -> Metrics:
        """What became of the rollouts that ended since this was last asked."""
        statistics, self._statistics = self._statistics, AttemptStatistics()
        statistics.warn()
        metrics, endpoint_metrics = statistics.metrics(), self.endpoint_metrics()
        metrics.merge(endpoint_metrics)
        refused = endpoint_metrics.reduce().get(CONTEXT_LENGTH_METRIC, 0.0)
        metrics.add("agents/over_long", Sum.of(refused - self._refused))
        self._refused = refused
        return metrics

    def decode_conversation(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said after the first prompt, in its order."""
        return decode_conversation(self._tokenizer, turns)

    async def enqueue(self, rollouts: Sequence[tuple[int, Task, int]], use: Literal["train", "val"] = "train") -> None:
        """Have rollouts made: the id of each, its task, and which try at it is meant. Asking again does no harm."""
        loop = asyncio.get_running_loop()
        for id, _, _ in rollouts:
            self._pending.setdefault(id, loop.create_future())
        ids = [id for id, _, _ in rollouts]
        known: dict[int, RolloutState] = {}
        for at in range(0, len(ids), PAGE):  # one that had ended before it was asked for is not told of again
            page = await self._queue.find(RolloutQuery(ids=tuple(ids[at : at + PAGE]), limit=PAGE))
            known |= {state.id: state for state in page.rollouts}
        limits = {id: state.limits or self._limits for id, state in known.items()}  # as they were when it was asked for
        requests = [
            RolloutRequest(task, sample, id, use, limits.get(id, self._limits)) for id, task, sample in rollouts
        ]
        await self._queue.enqueue(requests)
        self._resolve([state for state in known.values() if state.status not in (Status.QUEUED, Status.RUNNING)])

    async def wait_for(self, id: int, task: Task) -> AttemptResult:
        """How a rollout ended that was asked for."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.create_task(self._watch_queue())
        try:
            state = await self._pending[id]
        finally:
            self._pending.pop(id, None)
            if not self._pending and self._waiter is not None:
                self._waiter.cancel()
                self._waiter = None
        return await self._read_result(state, task)

    @property
    def tags(self) -> tuple[str, ...]:
        """Turns with one of these are learned from; all, where there are none."""
        return self._config.tags

    def has_score(self, state: RolloutState) -> bool:
        """Whether a rollout that ended has a score, as the journal tells it."""
        if state.status is Status.SUCCEEDED:
            return state.last is not None and state.last.reward is not None
        return self._unsuccessful_verdict(state).outcome is Outcome.SUCCEEDED

    def replay(self, state: RolloutState, turns: Sequence[Turn]) -> AttemptResult:
        """A rollout that counts, as the journal has it; the same as when it was played."""
        verdict = self._known_verdict(state)
        assert verdict is not None and verdict.outcome is Outcome.SUCCEEDED, f"rollout {state.id} has no score"
        return _attempt_result(state, turns, verdict)

    # -- what came of them --------------------------------------------------------------------------------------------

    async def _read_result(self, state: RolloutState, task: Task) -> AttemptResult:
        """A rollout that ended, as those know it who learn from it. It earns nothing more from now on, so that what is
        read here is what is read again."""
        (state,) = await self._queue.seal([state.id])
        last = state.last
        turns = tuple(await self._queue.turns(state.id)) if last is not None and last.turns else ()
        if state.use == "train":
            self._statistics.add(state, turns)
        verdict = await self._judge_result(state, task, turns)
        if state.attempts and state.status in FAILED_STATUSES:
            notes = [note for note in await self._queue.notes(state.id) if note["attempt"] == len(state.attempts) - 1]
            verdict = replace(verdict, error="\n".join([verdict.error, *endpoint_errors(notes)]))
        return _attempt_result(state, turns, verdict)

    async def _judge_result(self, state: RolloutState, task: Task, turns: Sequence[Turn]) -> Verdict:
        known_verdict, last = self._known_verdict(state), state.last
        if known_verdict is not None:
            return known_verdict
        assert last is not None, "who succeeded has tried"
        if self._judge.scores_answers:
            answers = [turn.completion.text for turn in turns if turn.completion.finish_reason != "abort"]
            judged = await self._judge.judge(task, answers[-1] if answers else "")
            if judged.outcome is Outcome.SUCCEEDED:
                return judged
            why = "The agent ended without a reward, and the run's `reward` could not judge its last answer instead. "
            return replace(judged, error=f"{why}{judged.error}")
        if any(turn.reward is not None for turn in turns):
            return Verdict(0.0)
        self._statistics.without_reward += state.use == "train"
        return self._failure(
            Outcome.FAILED,
            f"The agent ended rollout {state.id} without a reward. Have it return a number, call `etude.emit.reward`, "
            f"or give the run a `reward` that judges its last answer.",
        )

    def _known_verdict(self, state: RolloutState) -> Verdict | None:
        """What a rollout that ended is worth, where nobody is to be asked."""
        if state.status is not Status.SUCCEEDED:
            return self._unsuccessful_verdict(state)
        assert state.last is not None, "who succeeded has tried"
        return None if state.last.reward is None else Verdict(state.last.reward, state.last.parts)

    def _unsuccessful_verdict(self, state: RolloutState) -> Verdict:
        """What one that did not succeed is worth."""
        error = state.why or (state.last.error if state.last else "")
        return self._failure(Outcome(state.status.value), error or f"Rollout {state.id} ended {state.status}.")

    def _failure(self, outcome: Outcome, error: str) -> Verdict:
        """A failure, or what it is to count for. Of what the machines did wrong nothing is learned in any case."""
        if self._config.failed == "drop" or outcome in (Outcome.INFRA_ERROR, Outcome.CANCELLED):
            return Verdict.failure(outcome, error)
        return Verdict(float(self._config.failed), error=error)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _watch_queue(self) -> None:
        """Tell of ends as they come, until nobody waits any more."""
        alone = time.monotonic()
        warned = False
        try:
            while True:
                self._cursor, ended = await self._queue.wait(self._cursor, POLL_INTERVAL_S)
                self.check_runners()
                self._resolve(ended)
                silences = [runner.silent_s for runner in await self._queue.runners()]
                if ended or min(silences, default=math.inf) < self._config.heartbeat_timeout:
                    alone, warned = time.monotonic(), False
                    continue
                silent = max(time.monotonic() - alone, min(silences, default=0.0))
                if silent > self._config.runner_timeout:
                    raise CollectionError(
                        f"No runner has spoken for {format_seconds(silent)}, and {len(self._pending)} rollouts wait "
                        f"for one. Start some with `etude runner`, or have the run start them: `agent.runners=1`."
                    )
                if silent > 2 * POLL_INTERVAL_S and not warned:
                    warned = True
                    get_logger("recipes").warning(
                        "No runner is there: %d rollouts wait for one, for %s at most.",
                        *(len(self._pending), format_seconds(self._config.runner_timeout)),
                    )
        except Exception as error:
            for end in self._pending.values():
                if not end.done():
                    end.set_exception(error)

    def _resolve(self, ended: Sequence[RolloutState]) -> None:
        for state in ended:
            end = self._pending.get(state.id)
            if end is not None and not end.done():
                end.set_result(state)


def _attempt_result(state: RolloutState, turns: Sequence[Turn], verdict: Verdict) -> AttemptResult:
    """A rollout as those know it who learn from it. What failed counts for what is said, and its turns for nothing."""
    if state.status is not Status.SUCCEEDED:
        turns = [replace(turn, reward=None) for turn in turns]
    truncated = any(turn.completion.finish_reason == "length" for turn in turns[-1:])
    return AttemptResult(tuple(turns), verdict, truncated, end_reason(turns, truncated, None))


def write_reward(store: Journal, id: int, result: AttemptResult) -> None:
    """Write what the run makes of a rollout that its agent gave no reward."""
    with store.transaction() as writing:
        state = writing.state(RolloutState, id)
        assert state is not None, "who played has been asked for"
        has_reward = state.last is None or state.last.reward is not None
        if has_reward or state.settled is not None or result.verdict.outcome is not Outcome.SUCCEEDED:
            return
        scored = result.verdict.reward, result.verdict.parts, result.truncated
        writing.append([AttemptRewarded(id, len(state.attempts) - 1, *scored)])


def effective_reward(state: RolloutState, failed: float | Literal["drop"]) -> float | None:
    """What the rollout of an agent counted for, where failures do as `failed` says; None for nothing. What its attempt
    had earned before it failed is not that."""
    if state.status is Status.SUCCEEDED:
        return None if state.last is None else state.last.total
    return float(failed) if state.status in FAILED_STATUSES and failed != "drop" else None


def seed_ordinal(rollout: int) -> int:
    """What a rollout's seeds follow from. The same weights are scored by the same answers, whatever the step."""
    return (
        rollout
        if rollout < FIRST_EVALUATION_ORDINAL
        else FIRST_EVALUATION_ORDINAL + (rollout - FIRST_EVALUATION_ORDINAL) % MOST_TASKS
    )


def task_prompt(fields: Mapping[str, Any]) -> Any:
    """What a task asks: its prompt, or whatever else it says."""
    prompt = fields.get("prompt")
    return prompt if prompt is not None else {name: fields[name] for name in fields if name not in ADDED_FIELDS}


class AgentPlayer:
    """Plays attempts that score the model: under names of their own, and set aside as soon as they are over.

    What a stop cut off goes on under the same names: an answer that was there is not drawn again.
    """

    def __init__(self, agents: AgentRollouts, store: Journal, evaluation_id: str) -> None:
        """yardstick: what names a way of scoring; another one asks other rollouts."""
        self._agents, self._store = agents, store
        self._edition = int.from_bytes(blake2b(evaluation_id.encode(), digest_size=8).digest(), "big") % MAX_EVALUATIONS
        self._step = 0
        self._num_samples: Counter[int] = Counter()

    def start_scoring(self, step: int) -> None:
        """The attempts that follow are made to score this step."""
        self._step = step
        self._num_samples.clear()

    def prompt_of(self, task: Task) -> object:
        """The prompt, or whatever else the task says."""
        return task_prompt(task.fields)

    def decode_conversation(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said after the first prompt, in its order."""
        return self._agents.decode_conversation(turns)

    async def play(self, task: Task, sampling: SamplingConfig, seeds: TurnSeeds) -> AttemptResult:  # noqa: ARG002
        """One attempt. How it is sampled is said at the endpoint."""
        sample = self._num_samples[task.ordinal]
        self._num_samples[task.ordinal] += 1
        offset = task.ordinal * MOST_SAMPLES + sample
        ordinal = FIRST_EVALUATION_ORDINAL + (self._edition * MOST_STEPS + self._step) * MOST_TASKS + offset
        named = replace(task, ordinal=ordinal)
        await self._agents.enqueue([(ordinal, named, 0)], "val")
        result = await self._agents.wait_for(ordinal, named)
        write_reward(self._store, ordinal, result)
        with self._store.transaction() as writing:
            known = writing.state(TaskState, ordinal)
            if known is not None and known.phase is Phase.OPEN:
                writing.append([TaskDropped(ordinal, self._step, "it was asked to score the model")])
        return result
