"""Rollouts made by agents: requested from the rollout queue, executed by runners, and read back when they ended."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from etude.data.samples import count_joined_rows
from etude.errors import CollectionError
from etude.observe import Mean, Metrics, Sum, format_seconds, get_logger
from etude.recipes.collect.agent_config import AgentConfig
from etude.recipes.collect.failure_messages import endpoint_errors
from etude.recipes.collect.player import end_reason
from etude.recipes.collect.rollouts import PlayedRollout, WantedRollout, cancel_queued
from etude.records import Outcome, Task, Turn
from etude.rewards import Judge, Verdict
from etude.running_time import running_time
from etude.store import AttemptRewarded, Journal, RolloutState, Status
from etude.store.queue.rollout_queue import RolloutLimits, RolloutQuery, RolloutQueue, RolloutRequest

CONTEXT_LENGTH_METRIC = "endpoint/context_length"
"""The metric that counts refusals of a prompt that is longer than the model's context."""
POLL_INTERVAL_S = 5.0
"""Seconds between two checks that runners are alive."""
PAGE = 256
FailedReward: TypeAlias = float | Literal["drop"]
FAILED_STATUSES = (Status.FAILED, Status.TIMED_OUT, Status.UNRESPONSIVE)
"""Statuses of attempts that failed by their own fault."""


@dataclass(slots=True)
class AttemptStatistics:
    """Counts of the attempts at a step's rollouts, by every way in which one can be lost."""

    ended: Counter[str] = field(default_factory=Counter)
    """Attempts by their status; and rollouts that ended without an attempt."""
    retried: int = 0
    without_turns: int = 0
    without_reward: int = 0
    judged: int = 0
    """Rollouts whose last answer the run's reward judged, because the agent gave no reward."""
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


class AgentSource:
    """Requests rollouts from the rollout queue, and returns how each ended. Lives in one event loop.

    The queue writes the events of attempts, and retries them. This source writes the reward, if the agent gives none.
    It follows from the journal and the options alone, so a later reading gives the same. After a kill of the trainer,
    its running rollouts are over. Its queued ones wait until they are started again, and with them the weights that
    sample them.

    Waits for the queue. The limits of a rollout bound it while a runner executes it. Raises `CollectionError` if there
    is no runner for `agent.runner_timeout` seconds.
    """

    def __init__(
        self,
        config: AgentConfig,
        retries: int,
        queue: RolloutQueue,
        judge: Judge,
        store: Journal,
        cursor: int = 0,
        *,
        reward: str = "",
        check_runners: Callable[[], None] = lambda: None,
        endpoint_metrics: Callable[[], Metrics] = Metrics,
        new_client: Callable[[], RolloutQueue] | None = None,
    ) -> None:
        """retries: further attempts at a rollout that failed. cursor: the current position of the queue; rollouts that
        ended before it are looked up when they are requested. reward: the name of the run's reward, if the user chose
        one. check_runners: raises the error that ended the runners,
        if none of the started ones is left. endpoint_metrics: returns the metrics of the model endpoint. new_client:
        makes another client of the same queue, for any event loop."""
        self._config = config
        self._queue = queue
        self._judge = judge
        self._store = store
        self._limits = RolloutLimits(config.timeout, config.heartbeat_timeout, max_attempts=1 + retries)
        self._pending: dict[int, asyncio.Future[RolloutState]] = {}
        self._cursor = cursor
        self._waiter: asyncio.Task[None] | None = None
        self._statistics = AttemptStatistics()
        self._refused = 0.0
        self._idle_reward = reward
        """The reward that the user chose, as long as it has judged nothing and no warning has said so."""
        self._check_runners = check_runners
        self._endpoint_metrics = endpoint_metrics
        self.new_client = new_client or (lambda: queue)

    def pop_metrics(self) -> Metrics:
        """Return the metrics of the rollouts that ended since the last call."""
        statistics = self._statistics
        self._statistics = AttemptStatistics()
        statistics.warn()
        self._warn_of_idle_reward(statistics)
        metrics, endpoint_metrics = statistics.metrics(), self._endpoint_metrics()
        metrics.merge(endpoint_metrics)
        refused = endpoint_metrics.reduce().get(CONTEXT_LENGTH_METRIC, 0.0)
        metrics.add("agents/over_long", Sum.of(refused - self._refused))
        self._refused = refused
        return metrics

    def _warn_of_idle_reward(self, statistics: AttemptStatistics) -> None:
        """Warn once if the agent gave all rewards of the first step, so that the run's own reward judged nothing."""
        succeeded = statistics.ended[Outcome.SUCCEEDED.value]
        if not (self._idle_reward and succeeded):
            return
        if not statistics.judged:
            get_logger("recipes").warning(
                "`reward` (%s) has no effect so far: the agent itself gave a reward to each of the %d rollouts of this "
                "step, and an agent's reward counts. Leave `reward` out, or have the agent return None.",
                self._idle_reward,
                succeeded,
            )
        self._idle_reward = ""

    async def start(self, wanted: Sequence[WantedRollout], use: Literal["train", "val"] = "train") -> None:
        """Request these rollouts: they are in the queue when this returns. Requesting one again has no effect."""
        loop = asyncio.get_running_loop()
        for each in wanted:
            self._pending.setdefault(each.id, loop.create_future())
        ids = [each.id for each in wanted]
        known = await self._find(ids)  # a rollout that ended before the request is not reported again
        first_limits = {id: state.limits or self._limits for id, state in known.items()}
        requests = [
            RolloutRequest(
                each.task, each.sample, each.id, use, first_limits.get(each.id, self._limits), floor=each.floor
            )
            for each in wanted
        ]
        await self._queue.enqueue(requests)
        ended = [state for state in known.values() if state.status not in (Status.QUEUED, Status.RUNNING)]
        self._resolve(ended)

    def start_scoring(self, step: int) -> None:
        """Do nothing: the endpoint draws with the newest weights."""

    async def close(self) -> None:
        """Stop waiting for the queue."""
        if self._waiter is not None:
            self._waiter.cancel()

    async def result(self, wanted: WantedRollout) -> PlayedRollout:
        """Return how a requested rollout ended, once its reward is in the journal."""
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.create_task(self._watch_queue())
        try:
            state = await self._pending[wanted.id]
        finally:
            self._pending.pop(wanted.id, None)
            if not self._pending and self._waiter is not None:
                self._waiter.cancel()
                self._waiter = None
        return await self._read_result(state, wanted)

    async def cancel(self, ids: Sequence[int], why: str) -> None:
        """Cancel in the queue and in the journal those rollouts that have not ended."""
        await self._queue.cancel(list(await self._find(ids)), why)
        cancel_queued(self._store, ids, why)  # the queue may be another store's

    def recall(self, state: RolloutState) -> PlayedRollout | None:
        """Return how a rollout ended, by the journal; None if it must be read from the queue again.

        An unsealed one is read as if it had ended now, because it may still get rewards.
        """
        return recall_agent_rollout(self._store, state, self._config.failed_reward)

    async def _find(self, ids: Sequence[int]) -> dict[int, RolloutState]:
        """Return those of these rollouts that the queue has."""
        found: dict[int, RolloutState] = {}
        for at in range(0, len(ids), PAGE):
            page = await self._queue.find(RolloutQuery(ids=tuple(ids[at : at + PAGE]), limit=PAGE))
            found |= {state.id: state for state in page.rollouts}
        return found

    # -- results ------------------------------------------------------------------------------------------------------

    async def _read_result(self, state: RolloutState, wanted: WantedRollout) -> PlayedRollout:
        """Return how a rollout ended, and write the reward that it gets here.

        It is sealed first, so that later readings give the same result.
        """
        (state,) = await self._queue.seal([state.id])
        last = state.last
        turns = tuple(await self._queue.turns(state.id)) if last is not None and last.turns else ()
        if state.use == "train":
            self._statistics.add(state, turns)
        verdict = _known_verdict(state, self._config.failed_reward)
        if verdict is None:
            self._statistics.judged += state.use == "train" and self._judge.scores_answers
            verdict = await self._judge_result(state, wanted.task, turns)
        if state.attempts and state.status in FAILED_STATUSES:
            notes = [note for note in await self._queue.notes(state.id) if note["attempt"] == len(state.attempts) - 1]
            verdict = replace(verdict, error="\n".join([verdict.error, *endpoint_errors(notes)]))
        played = _played_rollout(state, turns, verdict)
        self._write_reward(state.id, played)
        return played

    async def _judge_result(self, state: RolloutState, task: Task, turns: Sequence[Turn]) -> Verdict:
        """Return the verdict on a rollout that succeeded without a reward of the agent."""
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
        return _failure(
            self._config.failed_reward,
            Outcome.FAILED,
            f"The agent ended rollout {state.id} without a reward. Have it return a number, call `etude.emit.reward`, "
            "or give the run a `reward` that judges its last answer.",
        )

    def _write_reward(self, id: int, played: PlayedRollout) -> None:
        """Write the reward that the run gave a rollout, if the agent gave it none."""
        with self._store.transaction() as writing:
            state = writing.state(RolloutState, id)
            assert state is not None, "a rollout that ended is in the journal"
            has_reward = state.last is None or state.last.reward is not None
            if has_reward or state.closed is not None or not played.succeeded:
                return
            verdict = played.verdict
            attempt = len(state.attempts) - 1
            rewarded = AttemptRewarded(id, attempt, verdict.reward, verdict.parts, played.truncated, role=played.role)
            writing.append([rewarded])

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def _watch_queue(self) -> None:
        """Resolve the futures of rollouts as they end, until none is pending."""
        alone = running_time()
        warned = False
        try:
            while True:
                self._cursor, ended = await self._queue.wait(self._cursor, POLL_INTERVAL_S)
                self._check_runners()
                self._resolve(ended)
                silences = [runner.silent_s for runner in await self._queue.runners()]
                if ended or min(silences, default=math.inf) < self._config.heartbeat_timeout:
                    alone, warned = running_time(), False
                    continue
                silent = max(running_time() - alone, min(silences, default=0.0))
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
                        len(self._pending),
                        format_seconds(self._config.runner_timeout),
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


def recall_agent_rollout(store: Journal, state: RolloutState, failed_reward: FailedReward) -> PlayedRollout | None:
    """Return how a rollout by an agent ended with a score, by the journal; None if that is not final."""
    if not state.sealed or state.status in (Status.QUEUED, Status.RUNNING):
        return None
    verdict = _known_verdict(state, failed_reward)
    if verdict is None or verdict.outcome is not Outcome.SUCCEEDED:
        return None
    return _played_rollout(state, store.turns(state.id), verdict)


def _known_verdict(state: RolloutState, failed_reward: FailedReward) -> Verdict | None:
    """Return the verdict on a rollout that ended, or None if its last answer must be judged."""
    if state.status is not Status.SUCCEEDED:
        error = state.why or (state.last.error if state.last else "") or f"Rollout {state.id} ended {state.status}."
        return _failure(failed_reward, Outcome(state.status.value), error)
    assert state.last is not None, "a succeeded rollout has an attempt"
    return None if state.last.reward is None else Verdict(state.last.reward, state.last.parts)


def _failure(failed_reward: FailedReward, outcome: Outcome, error: str) -> Verdict:
    """Return a failure, or a success with the reward `agent.failed_reward`. Infrastructure errors are always failures,
    and nothing is learned from them."""
    if failed_reward == "drop" or outcome in (Outcome.INFRA_ERROR, Outcome.CANCELLED):
        return Verdict.failure(outcome, error)
    return Verdict(float(failed_reward), error=error)


def _played_rollout(state: RolloutState, turns: Sequence[Turn], verdict: Verdict) -> PlayedRollout:
    """Return how a rollout ended. A failed one keeps the reward of its verdict, and its turns have
    none."""
    if state.status is not Status.SUCCEEDED:
        turns = [replace(turn, reward=None) for turn in turns]
    last = state.last
    truncated = any(turn.completion.finish_reason == "length" for turn in turns[-1:]) or (
        last is not None and last.truncated
    )
    role = 0 if last is None else last.role
    return PlayedRollout(tuple(turns), verdict, truncated, end_reason(turns, truncated, None), role)


def effective_reward(state: RolloutState, failed_reward: FailedReward) -> float | None:
    """Return the reward that an agent's rollout counted for, with `failed_reward` for failures; None if it was dropped.
    Rewards of an attempt before it failed do not count."""
    if state.status is Status.SUCCEEDED:
        return None if state.last is None else state.last.total
    return float(failed_reward) if state.status in FAILED_STATUSES and failed_reward != "drop" else None
