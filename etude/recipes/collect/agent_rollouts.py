"""Rollouts made by agents: requested from the rollout queue, executed by runners, and read back when they ended."""

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
"""From this ordinal on tasks are used only to score the model; no step trains on them."""
MOST_SAMPLES, MOST_TASKS, MOST_STEPS, MAX_EVALUATIONS = 2**10, 2**30, 2**20, 2**12
"""The most answers to one task, and answers in all, that score a step; the most steps; the number of distinct
evaluation ids."""
ADDED_FIELDS = ("prompt", "row", "ground_truth", "extra_info")
"""Fields that Etude adds to those of a task's file."""
CONTEXT_LENGTH_METRIC = "endpoint/context_length"
"""The metric that counts refusals of a prompt that is longer than the model's context."""
POLL_INTERVAL_S = 5.0
"""Seconds between two checks that runners are alive."""
PAGE = 256
FAILED_STATUSES = (Status.FAILED, Status.TIMED_OUT, Status.UNRESPONSIVE)
"""Statuses of attempts that failed by their own fault."""


class AgentConfig(Config):
    """The agent that makes rollouts, its runners, and its limits."""

    path: str | None = Field(
        None, description="path/to/file.py:name or module:name: a function or class, `@etude.agent`"
    )
    strategy: Literal["shm", "cs"] = Field(
        "shm", description="shm: runners are threads of this process; cs: runners are separate processes"
    )
    runners: int = Field(1, ge=0, description="runners to start; 0 waits for runners that join from elsewhere")
    max_concurrency: int = Field(
        16, ge=1, description="attempts that each runner makes at a time; more need more memory and model calls"
    )
    timeout: float = Field(
        600.0, gt=0, description="seconds that an attempt may take; smaller fails slow attempts earlier"
    )
    heartbeat_timeout: float = Field(
        60.0,
        gt=0,
        description="seconds without a heartbeat after which a runner's attempts are lost; smaller retries "
        "them earlier",
    )
    runner_timeout: float = Field(
        300.0, gt=0, description="seconds to wait for a runner while there is none, before the run fails"
    )
    failed_reward: float | Literal["drop"] = Field(
        "drop", description="reward of an attempt whose last retry failed; drop trains on none"
    )
    tags: tuple[str, ...] = Field((), description="train only on turns with one of these tags; empty trains on all")
    parameters: Literal["force", "default"] = Field(
        "force", description="force: the run's sampling parameters apply; default: the agent's own, where it sets them"
    )
    strict: bool = Field(
        False, description="refuse requests with fields that the run sets or cannot serve; false ignores those fields"
    )
    max_calls: int = Field(256, ge=1, description="model calls that are answered at a time; more calls wait")
    external: Path | None = Field(
        None, description="a YAML file of other providers' models that agents may call: recorded, never trained"
    )
    store: str | None = Field(
        None,
        description="address of a store (`etude store DIRECTORY`) that keeps the rollouts; its admin key is read "
        "from ETUDE_STORE_KEY. null keeps them in this process",
    )
    listen: str = Field(
        "127.0.0.1:0",
        pattern=r"^\S+:\d{1,5}$",
        description="address and port of the endpoint, and of this process's own store; port 0 is a free one",
    )


@dataclass(slots=True)
class AttemptStatistics:
    """Counts of the attempts at a step's rollouts, by every way in which one can be lost."""

    ended: Counter[str] = field(default_factory=Counter)
    """Attempts by their status; and rollouts that ended without an attempt."""
    retried: int = 0
    without_turns: int = 0
    without_reward: int = 0
    turns: int = 0
    rows: int = 0
    rollouts: int = 0
    reused: int = 0
    """Prompt tokens that repeat tokens which the model had read or written before."""

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
        """Warn if no rollout called the model, which no metric on the console shows."""
        if self.rollouts and self.without_turns == self.rollouts and self.ended[Outcome.SUCCEEDED.value]:
            get_logger("recipes").warning(
                "None of the %d rollouts of this step called the model, so nothing was learned from them. Does the "
                "agent call `llm.base_url`, or, as a program, OPENAI_BASE_URL?",
                self.rollouts,
            )

    def metrics(self) -> Metrics:
        """Return the counts as metrics."""
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
    """Requests rollouts from the rollout queue, and returns the result of each. Lives in one event loop.

    Waits for the queue. The limits of a rollout bound it while a runner executes it. Raises `CollectionError` if there
    is no runner for `agent.runner_timeout` seconds.
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
        """retries: further attempts at a rollout that failed. cursor: the current position of the queue; rollouts that
        ended before it are looked up when they are requested."""
        self._config, self._queue, self._judge, self._tokenizer = config, queue, judge, tokenizer
        self._limits = RolloutLimits(config.timeout, config.heartbeat_timeout, max_attempts=1 + retries)
        self._pending: dict[int, asyncio.Future[RolloutState]] = {}
        self._cursor = cursor
        self._waiter: asyncio.Task[None] | None = None
        self._statistics = AttemptStatistics()
        self._refused = 0.0
        self.check_runners: Callable[[], None] = lambda: None
        """Raises the error that ended the runners, if none of the started ones is left."""
        self.endpoint_metrics: Callable[[], Metrics] = Metrics
        """Returns the metrics of the model endpoint."""
        self.new_client: Callable[[], RolloutQueue] = lambda: queue
        """Makes another client of the same queue, for any event loop."""

    def pop_metrics(self) -> Metrics:
        """Return the metrics of the rollouts that ended since the last call."""
        statistics, self._statistics = self._statistics, AttemptStatistics()
        statistics.warn()
        metrics, endpoint_metrics = statistics.metrics(), self.endpoint_metrics()
        metrics.merge(endpoint_metrics)
        refused = endpoint_metrics.reduce().get(CONTEXT_LENGTH_METRIC, 0.0)
        metrics.add("agents/over_long", Sum.of(refused - self._refused))
        self._refused = refused
        return metrics

    def decode_conversation(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """Return the messages after the first prompt, in order."""
        return decode_conversation(self._tokenizer, turns)

    async def enqueue(self, rollouts: Sequence[tuple[int, Task, int]], use: Literal["train", "val"] = "train") -> None:
        """Request rollouts: the id of each, its task, and its sample number. Requesting one again has no effect."""
        loop = asyncio.get_running_loop()
        for id, _, _ in rollouts:
            self._pending.setdefault(id, loop.create_future())
        ids = [id for id, _, _ in rollouts]
        known: dict[int, RolloutState] = {}
        for at in range(0, len(ids), PAGE):  # a rollout that ended before the request is not reported again
            page = await self._queue.find(RolloutQuery(ids=tuple(ids[at : at + PAGE]), limit=PAGE))
            known |= {state.id: state for state in page.rollouts}
        limits = {
            id: state.limits or self._limits for id, state in known.items()
        }  # the limits of the first request stay
        requests = [
            RolloutRequest(task, sample, id, use, limits.get(id, self._limits)) for id, task, sample in rollouts
        ]
        await self._queue.enqueue(requests)
        self._resolve([state for state in known.values() if state.status not in (Status.QUEUED, Status.RUNNING)])

    async def wait_for(self, id: int, task: Task) -> AttemptResult:
        """Wait for a requested rollout, and return its result."""
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
        """Train only on turns with one of these tags; on all, if empty."""
        return self._config.tags

    def has_score(self, state: RolloutState) -> bool:
        """Return whether a rollout that ended has a score, by the journal."""
        if state.status is Status.SUCCEEDED:
            return state.last is not None and state.last.reward is not None
        return self._unsuccessful_verdict(state).outcome is Outcome.SUCCEEDED

    def replay(self, state: RolloutState, turns: Sequence[Turn]) -> AttemptResult:
        """Return the result of a scored rollout from the journal, equal to that of its first reading."""
        verdict = self._known_verdict(state)
        assert verdict is not None and verdict.outcome is Outcome.SUCCEEDED, f"rollout {state.id} has no score"
        return _attempt_result(state, turns, verdict)

    # -- results ------------------------------------------------------------------------------------------------------

    async def _read_result(self, state: RolloutState, task: Task) -> AttemptResult:
        """Return the training result of a rollout that ended. The rollout is sealed first, so that later readings give
        the same result."""
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
        assert last is not None, "a succeeded rollout has an attempt"
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
            "or give the run a `reward` that judges its last answer.",
        )

    def _known_verdict(self, state: RolloutState) -> Verdict | None:
        """Return the verdict on a rollout that ended, or None if its last answer must be judged."""
        if state.status is not Status.SUCCEEDED:
            return self._unsuccessful_verdict(state)
        assert state.last is not None, "a succeeded rollout has an attempt"
        return None if state.last.reward is None else Verdict(state.last.reward, state.last.parts)

    def _unsuccessful_verdict(self, state: RolloutState) -> Verdict:
        """Return the verdict on a rollout that did not succeed."""
        error = state.why or (state.last.error if state.last else "")
        return self._failure(Outcome(state.status.value), error or f"Rollout {state.id} ended {state.status}.")

    def _failure(self, outcome: Outcome, error: str) -> Verdict:
        """Return a failure, or a success with the reward `agent.failed_reward`. Infrastructure errors are always
        failures, and nothing is learned from them."""
        if self._config.failed_reward == "drop" or outcome in (Outcome.INFRA_ERROR, Outcome.CANCELLED):
            return Verdict.failure(outcome, error)
        return Verdict(float(self._config.failed_reward), error=error)

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _watch_queue(self) -> None:
        """Resolve the futures of rollouts as they end, until none is pending."""
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
                        f"No runner has sent a heartbeat for {format_seconds(silent)}, and {len(self._pending)} "
                        "rollouts wait for one. Start some with `etude runner`, or have the run start them: "
                        "`agent.runners=1`."
                    )
                if silent > 2 * POLL_INTERVAL_S and not warned:
                    warned = True
                    get_logger("recipes").warning(
                        "No runner is connected: %d rollouts wait for one, for %s at most.",
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
    """Return the training result of a rollout. A failed one keeps the reward of its verdict, and its turns have
    none."""
    if state.status is not Status.SUCCEEDED:
        turns = [replace(turn, reward=None) for turn in turns]
    truncated = any(turn.completion.finish_reason == "length" for turn in turns[-1:])
    return AttemptResult(tuple(turns), verdict, truncated, end_reason(turns, truncated, None))


def write_reward(store: Journal, id: int, result: AttemptResult) -> None:
    """Write the reward that the run gave a rollout, if the agent gave it none."""
    with store.transaction() as writing:
        state = writing.state(RolloutState, id)
        assert state is not None, "a rollout that ended is in the journal"
        has_reward = state.last is None or state.last.reward is not None
        if has_reward or state.settled is not None or result.verdict.outcome is not Outcome.SUCCEEDED:
            return
        scored = result.verdict.reward, result.verdict.parts, result.truncated
        writing.append([AttemptRewarded(id, len(state.attempts) - 1, *scored)])


def effective_reward(state: RolloutState, failed_reward: float | Literal["drop"]) -> float | None:
    """Return the reward that an agent's rollout counted for, with `failed_reward` for failures; None if it was dropped.
    Rewards of an attempt before it failed do not count."""
    if state.status is Status.SUCCEEDED:
        return None if state.last is None else state.last.total
    return float(failed_reward) if state.status in FAILED_STATUSES and failed_reward != "drop" else None


def seed_ordinal(rollout: int) -> int:
    """Return the number that a rollout's seeds derive from. It is the same at any step, so the same weights give the
    same answers when they are scored."""
    return (
        rollout
        if rollout < FIRST_EVALUATION_ORDINAL
        else FIRST_EVALUATION_ORDINAL + (rollout - FIRST_EVALUATION_ORDINAL) % MOST_TASKS
    )


def task_prompt(fields: Mapping[str, Any]) -> Any:
    """Return the prompt of a task, or all its own fields if it has none."""
    prompt = fields.get("prompt")
    return prompt if prompt is not None else {name: fields[name] for name in fields if name not in ADDED_FIELDS}


class AgentPlayer:
    """Makes the attempts that score the model, as tasks with ordinals of their own range, dropped from training
    afterwards.

    Attempts that a stop cut off go on under the same ids: an answer that exists is not drawn again.
    """

    def __init__(self, agents: AgentRollouts, store: Journal, evaluation_id: str) -> None:
        """evaluation_id: the way of scoring; another id requests other rollouts."""
        self._agents, self._store = agents, store
        self._edition = int.from_bytes(blake2b(evaluation_id.encode(), digest_size=8).digest(), "big") % MAX_EVALUATIONS
        self._step = 0
        self._num_samples: Counter[int] = Counter()

    def start_scoring(self, step: int) -> None:
        """Use the attempts that follow to score this step."""
        self._step = step
        self._num_samples.clear()

    def prompt_of(self, task: Task) -> object:
        """Return the prompt, or all fields of a task without one."""
        return task_prompt(task.fields)

    def decode_conversation(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """Return the messages after the first prompt, in order."""
        return self._agents.decode_conversation(turns)

    async def play(self, task: Task, sampling: SamplingConfig, seeds: TurnSeeds) -> AttemptResult:  # noqa: ARG002
        """Make one attempt. The endpoint decides its sampling parameters."""
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
