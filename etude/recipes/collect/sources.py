"""The sources of rollouts: an engine that answers the tasks of a dataset, or agents that get them as input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from etude.data import Dataset, RowOrder
from etude.data.samples import build_samples
from etude.observe import Metrics
from etude.protocols import TokenGenerator
from etude.recipes.collect.agent_rollouts import AgentRollouts, write_reward
from etude.recipes.collect.collector import Collector, FinishedAttempt, row_of
from etude.recipes.collect.config import CollectionConfig
from etude.recipes.collect.episodes import EpisodePlayer
from etude.recipes.collect.player import EnginePlayer, PromptIds
from etude.recipes.collect.rollout_rows import PutSamples, ScoredRollout
from etude.recipes.collect.sampling import SamplingConfig, derived_seed
from etude.recipes.collect.scheduler import IssueRollout
from etude.recipes.collect.statistics import ended_attempts
from etude.records import Outcome, Sample, Turn
from etude.rewards import Judge
from etude.store import Journal, Phase, RolloutState, Status, events
from etude.store.queue_state import INTERRUPTED

__all__ = ["AgentSource", "EngineSource"]


class EngineSource(Collector):
    """Collects rollouts by an engine: one answer each, or as many turns as an environment takes.

    At most `max_concurrency` answers are requested at a time, and in the order of issue, so that a group is sampled
    together. A rollout that a kill cut off is sampled again with the same random numbers.
    """

    def __init__(
        self,
        collection: CollectionConfig,
        sampling: SamplingConfig,
        *,
        seed: int,
        dataset: Dataset,
        order: RowOrder,
        prompt_ids: PromptIds,
        engine: TokenGenerator,
        judge: Judge,
        store: Journal,
        runner: asyncio.Runner,
        max_concurrency: int,
        episodes: EpisodePlayer | None = None,
        greedy: bool = False,
        min_group_size: int = 1,
        code_changed: bool = False,
        keep: PutSamples = tuple,
    ) -> None:
        """prompt_ids: encodes a task's prompt. episodes: the player of multi-turn rollouts."""
        super().__init__(
            collection,
            seed=seed,
            dataset=dataset,
            order=order,
            judge=judge,
            store=store,
            runner=runner,
            retries=collection.retries,
            episodic=episodes is not None,
            greedy=greedy,
            min_group_size=min_group_size,
            code_changed=code_changed,
            keep=keep,
        )
        self._sampling = sampling
        self._attempts: dict[int, list[Status]] = {}
        self._player = EnginePlayer(
            prompt_ids=prompt_ids,
            engine=engine,
            judge=judge,
            timeout=collection.timeout,
            max_concurrency=max_concurrency,
            episodes=episodes,
        )

    def _start_events(self, issue: IssueRollout) -> list[events.Event]:
        written: list[events.Event] = []
        rollout = self._id(issue.task, issue.sample)
        if issue.task not in self._tasks:
            new = self._task(issue.task)
            if rollout not in self._attempts:
                written.append(events.TaskIssued(issue.task, row_of(new), new.source, new.fields))
        if rollout not in self._attempts:
            written.append(events.RolloutQueued(rollout, issue.task, issue.sample))
        history = self._attempts.setdefault(rollout, [])
        written.append(events.AttemptStarted(rollout, len(history), at=time.time()))
        history.append(Status.RUNNING)
        return written

    async def _issue_attempts(self, issues: Sequence[IssueRollout]) -> None:
        """Do nothing: the engine takes requests one by one."""

    async def _run_attempt(self, task: int, sample: int) -> FinishedAttempt:
        """Make one attempt at a rollout. Attempts that a kill ended do not count in its seeds: they are made again."""
        history = self._attempts[self._id(task, sample)]
        draw = sum(status not in (Status.RUNNING, Status.INFRA_ERROR) for status in history)

        def seed(turn: int) -> int:  # the seed of the first turn is the same with and without later turns
            return derived_seed(self._seed, "train", task, sample, draw, *([turn] if turn else []))

        greedy = sample == self._config.group_size
        sampling = self._sampling.model_copy(update={"temperature": 0.0}) if greedy else self._sampling
        return FinishedAttempt(task, sample, await self._player.play(self._task(task), sampling, seed))

    def _end_events(self, end: FinishedAttempt, retry: bool) -> list[events.Event]:
        result, verdict, rollout = end.result, end.result.verdict, self._id(end.task, end.sample)
        attempt = len(self._attempts[rollout]) - 1
        now = time.time()
        written: list[events.Event] = [events.TurnRecorded(rollout, attempt, turn, now) for turn in result.turns]
        if verdict.outcome is Outcome.SUCCEEDED:
            scored = verdict.reward, verdict.parts, result.truncated, result.turn_rewards, result.role
            written.append(events.AttemptRewarded(rollout, attempt, *scored))
        else:
            self._attempts[rollout][-1] = Status(verdict.outcome.value)
        return [*written, events.AttemptEnded(rollout, attempt, verdict.outcome, verdict.error, retry, at=now)]

    def _recover(self, state: RolloutState) -> int | None:
        if state.phase is Phase.FINISHED:
            return None  # its retries are used up, and its task was to be dropped
        ended = ended_attempts(state)
        self._attempts[state.id] = [attempt.status for attempt in state.attempts]
        if state.status is Status.RUNNING:
            attempt = len(state.attempts) - 1
            interrupted = events.AttemptEnded(
                state.id, attempt, Outcome.INFRA_ERROR, INTERRUPTED, retry=True, at=time.time()
            )
            self._store.append([interrupted])
            self._attempts[state.id][-1] = Status.INFRA_ERROR
        return 0 if self._code_changed else len(ended)

    def _forget(self, task: int, but: Sequence[int] = ()) -> None:
        super()._forget(task, but)
        for id in self._ids(task):
            self._attempts.pop(id, None)


class AgentSource(Collector):
    """Collects rollouts by agents: requested from the rollout queue, executed by a runner, and read back when they
    ended.

    The queue writes the events of attempts, and retries them. This source writes the run's own decisions: the reward,
    if the agent gives none, the admission and the drop. These follow from the journal and the options alone, so a later
    reading gives the same. After a kill of the trainer, its running rollouts are over. Its queued ones wait until the
    step that needs them runs again, and with it the weights that sample them.
    """

    def __init__(
        self,
        collection: CollectionConfig,
        agents: AgentRollouts,
        *,
        seed: int,
        dataset: Dataset,
        order: RowOrder,
        judge: Judge,
        store: Journal,
        runner: asyncio.Runner,
        min_group_size: int = 1,
        code_changed: bool = False,
        keep: PutSamples = tuple,
    ) -> None:
        super().__init__(
            collection,
            seed=seed,
            dataset=dataset,
            order=order,
            judge=judge,
            store=store,
            runner=runner,
            retries=0,
            episodic=True,
            min_group_size=min_group_size,
            code_changed=code_changed,
            keep=keep,
        )
        self._agents = agents

    def _start_events(self, issue: IssueRollout) -> list[events.Event]:
        self._task(issue.task)  # moves the order on
        return []

    async def _issue_attempts(self, issues: Sequence[IssueRollout]) -> None:
        rollouts = [(self._id(issue.task, issue.sample), self._task(issue.task), issue.sample) for issue in issues]
        await self._agents.enqueue(rollouts)

    async def _run_attempt(self, task: int, sample: int) -> FinishedAttempt:
        id = self._id(task, sample)
        result = await self._agents.wait_for(id, self._task(task))
        write_reward(self._store, id, result)
        return FinishedAttempt(task, sample, result)

    def _end_events(self, end: FinishedAttempt, retry: bool) -> list[events.Event]:  # noqa: ARG002
        assert not retry, "the queue retries, and not the scheduler"
        return []

    def _has_score(self, ended: RolloutState) -> bool:
        """Return whether a rollout has a final score. An unsealed one is read as if it had ended now, because it may
        still earn more."""
        return ended.sealed and self._agents.has_score(ended)

    def _read_scored(self, state: RolloutState) -> ScoredRollout:
        result = self._agents.replay(state, self._store.turns(state.id))
        return self._scored_rollout(result, state.id, state.task)

    def _samples(self, turns: Sequence[Turn], rollout: int) -> list[Sample]:
        return build_samples(turns, rollout, self._agents.tags)

    def _recover(self, state: RolloutState) -> int:  # noqa: ARG002
        return 0

    def _metrics(self) -> Metrics:
        return self._agents.pop_metrics()
