"""One attempt at a task, from asking the model to what that earned, be it one answer or a rollout of many turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from etude.protocols import Ids, TokenGenerator
from etude.recipes.collect.episodes import ENVIRONMENT_PART, Episode, EpisodeEndedError, EpisodePlayer
from etude.recipes.collect.sampling import SamplingConfig
from etude.recipes.collect.timeout_engine import TimeoutEngine
from etude.records import Completion, Outcome, Task, Turn
from etude.rewards import Judge, Verdict

__all__ = ["ANSWER_PART", "AttemptPlayer", "AttemptResult", "EnginePlayer", "PromptIds", "TurnSeeds", "end_reason"]

ANSWER_PART = "answer"
"""The part of a reward that the reward function gives as a bare number, where an environment pays as well."""

PromptIds = Callable[[Task], Ids]
TurnSeeds = Callable[[int], int]
"""The seed of each turn of an attempt, by its index."""


@dataclass(frozen=True, slots=True, eq=False)
class AttemptResult:
    """How one attempt ended."""

    turns: tuple[Turn, ...]
    """Each with what it was paid; also those before a failure."""
    verdict: Verdict
    """What the last answer earned by the reward function, and the named parts of all that was earned."""
    truncated: bool = False
    finish: str = ""
    """How it ended, as `ending` says; empty where nothing was answered."""
    role: int = 0
    waited: float = 0.0
    """Seconds that the environment took, and the tools."""
    calls: int = 0
    """How often tools were called, and how many of the calls failed."""
    failed_calls: int = 0

    @property
    def turn_rewards(self) -> float:
        """What its turns were paid."""
        return sum((turn.reward for turn in self.turns if turn.reward is not None), 0.0)

    @property
    def total(self) -> float:
        """All that it earned."""
        return self.verdict.reward + self.turn_rewards


def end_reason(turns: Sequence[Turn], truncated: bool, max_turns: int | None) -> str:
    """Return how an attempt ended: as its last answer did (`stop`, `length`, `abort`), or, where that ended by itself
    and the attempt was cut off, `max_turns`, or `truncated` by its environment or for lack of room."""
    if not turns:
        return ""
    finish = turns[-1].completion.finish_reason
    if not truncated or finish == "length":
        return finish
    return "max_turns" if len(turns) == max_turns else "truncated"


class AttemptPlayer(Protocol):
    """Whoever makes attempts at tasks."""

    async def play(self, task: Task, sampling: SamplingConfig, seeds: TurnSeeds) -> AttemptResult:
        """One attempt. What goes wrong with it is an outcome."""
        ...

    def decode_conversation(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said in an attempt of several turns; nothing where an attempt is one answer."""
        ...

    def prompt_of(self, task: Task) -> object:
        """What a task asks, to be shown to people."""
        ...

    def start_scoring(self, step: int) -> None:
        """The attempts that follow are made to score this step."""
        ...


class EnginePlayer:
    """Plays attempts, any number of them at a time.

    Waits for the engine, for each answer at most `timeout` seconds from the moment that it begins with it, for the
    environment, and for the judge, which bound themselves. At most `max_concurrency` answers are asked for at a time,
    in the order in which they came.
    """

    def __init__(
        self,
        *,
        prompt_ids: PromptIds,
        engine: TokenGenerator,
        judge: Judge,
        timeout: float,
        max_concurrency: int,
        episodes: EpisodePlayer | None,
    ) -> None:
        """episodes: who plays rollouts of several turns; with nobody, an attempt is one answer."""
        self._prompt_ids, self._judge, self._timeout = prompt_ids, judge, timeout
        self._engine, self._episodes = TimeoutEngine(engine, timeout), episodes
        self._slots = asyncio.Semaphore(max_concurrency)

    @property
    def episodic(self) -> bool:
        """Whether attempts may have several turns."""
        return self._episodes is not None

    def decode_conversation(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said in an attempt of several turns; nothing where an attempt is one answer."""
        return [] if self._episodes is None else self._episodes.decode_conversation(turns)

    def prompt_of(self, task: Task) -> object:
        """The prompt."""
        return task.fields["prompt"]

    def start_scoring(self, step: int) -> None:
        """Attempts are the same, whatever they are made for."""

    async def play(self, task: Task, sampling: SamplingConfig, seeds: TurnSeeds) -> AttemptResult:
        """One attempt: ask, judge. What goes wrong with it is an outcome; what goes wrong with the engine is raised."""

        async def ask(prompt: Ids, turn: int, room: int) -> Completion:
            params = sampling.params(seeds(turn))
            try:
                async with self._slots:
                    return await self._engine.generate(prompt, replace(params, max_tokens=min(params.max_tokens, room)))
            except TimeoutError as error:
                message = f"No answer within `collect.timeout` = {self._timeout:g} seconds."
                raise EpisodeEndedError(Outcome.TIMED_OUT, message) from error

        if self._episodes is not None:
            return await self._judge_episode(task, await self._episodes.play(task, ask), self._episodes)
        prompt = self._prompt_ids(task)
        try:
            completion = await ask(prompt, 0, sampling.max_tokens)
        except EpisodeEndedError as ended:
            return AttemptResult((), Verdict.failure(ended.outcome, str(ended)))
        verdict = await self._judge.judge(task, completion.text)
        finish = completion.finish_reason
        return AttemptResult((Turn(prompt, completion, 0),), verdict, finish == "length", finish)

    async def _judge_episode(self, task: Task, episode: Episode, episodes: EpisodePlayer) -> AttemptResult:
        """A rollout of several turns and what its last answer earned."""
        if episode.outcome is Outcome.SUCCEEDED:
            verdict = await self._judge.judge(task, episode.turns[-1].completion.text)
            if episodes.has_environment:
                verdict = replace(verdict, parts=self._reward_parts(episode.rewards, verdict))
        else:
            verdict = Verdict.failure(episode.outcome, episode.error)
        episode_fields = {
            name: getattr(episode, name) for name in ("truncated", "role", "waited", "calls", "failed_calls")
        }
        finish = end_reason(episode.turns, episode.truncated, episodes.config.max_turns)
        return AttemptResult(tuple(episode.turns), verdict, finish=finish, **episode_fields)

    def _reward_parts(self, paid: Mapping[str, float], verdict: Verdict) -> dict[str, float]:
        """All that was earned, by names: those of the environment, and those of the reward function."""
        if not self._judge.scores_answers:
            return {} if paid.keys() <= {ENVIRONMENT_PART} else dict(paid)
        parts = dict(paid) or {ENVIRONMENT_PART: 0.0}
        for name, value in (verdict.parts or {ANSWER_PART: verdict.reward}).items():
            parts[name] = parts.get(name, 0.0) + value
        return parts
