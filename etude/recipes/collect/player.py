"""One attempt at a task, from the prompt to the reward: one answer, or a rollout of many turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from etude.chat import RenderedPrompt
from etude.chat.transcript import check_observation
from etude.images import PromptImages, keyed_ids
from etude.protocols import Ids, TokenGenerator
from etude.recipes.collect.environment import EnvConfig
from etude.recipes.collect.episodes import (
    ENVIRONMENT_PART,
    AnswerFunction,
    Episode,
    EpisodeEndedError,
    EpisodePlayer,
    state_number,
)
from etude.recipes.collect.rollout_images import RolloutImages
from etude.recipes.collect.rollouts import PlayedRollout
from etude.records import Completion, Outcome, SamplingParams, Task, Turn
from etude.rewards import Judge, Verdict
from etude.token_routes import find_routes_start

ANSWER_PART = "answer"
"""The part of a reward that the reward function gives as a bare number, where an environment gives rewards too."""

TurnSeeds = Callable[[int], int]
"""The seed of each turn of an attempt, by its index."""


def end_reason(turns: Sequence[Turn], truncated: bool, max_turns: int | None) -> str:
    """Return how an attempt ended.

    It is the last answer's finish reason (`stop`, `length`, `abort`). If that answer ended by itself and the attempt
    was cut off, it is `max_turns`, or `truncated` by the environment or for lack of room.
    """
    if not turns:
        return ""
    finish = turns[-1].completion.finish_reason
    if not truncated or finish == "length":
        return finish
    return "max_turns" if len(turns) == max_turns else "truncated"


class AttemptPlayer(Protocol):
    """Makes attempts at tasks."""

    async def store_images(self, task: Task) -> Task:
        """Store the images of a task, and return it without their bytes, for `play`."""
        ...

    async def play(self, task: Task, sampling: SamplingParams, seeds: TurnSeeds) -> PlayedRollout:
        """Make one attempt. Errors of the attempt are outcomes."""
        ...

    def prompt_of(self, task: Task) -> object:
        """Return the prompt of a task, to show it to users."""
        ...

    def start_scoring(self, step: int) -> None:
        """Use the attempts that follow to score this step."""
        ...

    def end_scoring(self) -> None:
        """Take notice that all attempts of this step have ended."""
        ...


class TimeoutEngine:
    """Calls an engine, and gives each answer `seconds` from the moment that the engine begins with it.

    An engine with little memory lets most requests wait, and that wait is no fault of the answer. It is bounded all the
    same. Each running answer ends within its time, so an engine that neither begins nor ends an answer for twice as
    long has stalled.
    """

    def __init__(self, engine: TokenGenerator, seconds: float) -> None:
        self._engine = engine
        self._seconds = seconds
        self._waiting: set[asyncio.Timeout] = set()
        self._last_activity = 0.0  # time when the engine last began or ended an answer, or got a request
        self._timer: asyncio.TimerHandle | None = None  # one timer for all waiting requests

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] = lambda: None,
    ) -> Completion:
        """Return the engine's answer. Raises `TimeoutError`. on_start: called on any thread when the engine begins."""
        loop = asyncio.get_running_loop()

        def start_timeout() -> None:
            if timeout in self._waiting and not timeout.expired():
                self._remove(timeout)
                timeout.reschedule(loop.time() + self._seconds)

        def on_engine_start() -> None:  # called on an engine thread
            on_start()
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(start_timeout)

        async with asyncio.timeout(None) as timeout:
            self._waiting.add(timeout)
            self._last_activity = loop.time()
            if self._timer is None:
                self._check_stalled()
            try:
                return await self._engine.generate(prompt, sampling, images=images, on_start=on_engine_start)
            finally:
                self._remove(timeout)

    def _remove(self, timeout: asyncio.Timeout) -> None:
        """Take a request out of the waiting ones. The engine is active, so the others may wait longer."""
        self._waiting.discard(timeout)
        self._last_activity = asyncio.get_running_loop().time()
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_stalled(self) -> None:
        """End all waits if the engine has stalled; else check again when it may have."""
        loop = asyncio.get_running_loop()
        deadline = self._last_activity + 2 * self._seconds
        if loop.time() < deadline:
            self._timer = loop.call_at(deadline, self._check_stalled)
            return
        self._timer = None
        for timeout in self._waiting:
            if not timeout.expired():
                timeout.reschedule(loop.time())


class EnginePlayer:
    """Makes attempts with an engine, any number of them at a time.

    Waits for the engine, for each answer at most `timeout` seconds from the moment that the engine begins with it.
    Waits for the environment and the judge, which have their own timeouts. At most `max_concurrency` answers are
    requested at a time, in the order in which they came.
    """

    def __init__(
        self,
        *,
        render: Callable[[Any], RenderedPrompt],
        engine: TokenGenerator,
        judge: Judge,
        timeout: float,
        max_concurrency: int,
        episodes: EpisodePlayer | None,
        episodes_of: Mapping[str, EpisodePlayer] = MappingProxyType({}),
        newest_version: Callable[[], int] | None = None,
        truncate: Callable[[Ids], Ids] = lambda ids: ids,
        max_tokens_of: Mapping[str, int] = MappingProxyType({}),
        images: RolloutImages | None = None,
    ) -> None:
        """render: encodes a prompt; `truncate` then cuts one that is too long. episodes: the player of multi-turn
        rollouts; with None, an attempt is one answer. episodes_of: instead, the player of those of a data source.
        newest_version: returns the engine's newest policy version, which
        an attempt keeps from its first request on; None for an engine that has the newest weights only. max_tokens_of:
        the most tokens of an answer to a task of a data source."""
        self._render = render
        self._images = images or RolloutImages()
        self._truncate = truncate
        self._max_tokens_of = max_tokens_of
        self._judge = judge
        self._timeout = timeout
        self._engine = TimeoutEngine(engine, timeout)
        self._episodes = episodes
        self._episodes_of = episodes_of
        self._slots = asyncio.Semaphore(max_concurrency)
        self._newest_version = newest_version

    async def store_images(self, task: Task) -> Task:
        """Store the images of a task for `play`, and return it without their bytes."""
        if not task.images:
            return task
        await self._images.put(list(task.images.values()))
        return replace(task, images={})

    def prompt_of(self, task: Task) -> object:
        """Return the prompt."""
        return task.fields["prompt"]

    def start_scoring(self, step: int) -> None:
        """Use the attempts that follow to score this step. An engine that keeps versions draws them with its
        version."""
        if self._newest_version is not None:
            self._newest_version = lambda: step

    def end_scoring(self) -> None:
        """Do nothing: these attempts are not recorded."""

    async def play(self, task: Task, sampling: SamplingParams, seeds: TurnSeeds) -> PlayedRollout:
        """Make one attempt: sample, then judge. Errors of the attempt are outcomes; errors of the engine are raised."""
        times: list[tuple[float, float]] = []
        version: int | None = None
        routed = np.empty(0, np.int32)  # keys of the last prompt and answer, whose experts are recorded

        async def ask(prompt: RenderedPrompt, turn: int, room: int, *, recorded: bool = True) -> Completion:
            nonlocal version, routed
            began = 0.0
            images = await self._images.find(prompt)
            keys = keyed_ids(prompt.ids, prompt.images)
            known = len(routed) if np.array_equal(keys[: len(routed)], routed) else 0
            routes_start = find_routes_start(sampling.routes_start, known)

            def on_start() -> None:
                nonlocal began
                began = time.time()

            try:
                async with self._slots:
                    if version is None and self._newest_version is not None:
                        version = self._newest_version()
                    most = min(sampling.max_tokens, self._max_tokens_of.get(task.source, room), room)
                    params = replace(
                        sampling, seed=seeds(turn), max_tokens=most, version=version, routes_start=routes_start
                    )
                    on_start()  # an engine may not say when it begins
                    completion = await self._engine.generate(prompt.ids, params, images=images, on_start=on_start)
                    if not recorded:
                        return completion
                    times.append((began, time.time()))
                    if completion.routes is not None:
                        routed = np.concatenate([keys, completion.ids])
                    return completion
            except TimeoutError as error:
                message = f"No answer within `collect.timeout` = {self._timeout:g} seconds."
                raise EpisodeEndedError(Outcome.TIMED_OUT, message) from error

        episodes = self._episodes_of.get(task.source, self._episodes)
        if episodes is not None:
            episode = await episodes.play(task, ask, self._images)
            return replace(await self._judge_episode(task, episode, episodes.options), times=tuple(times))
        return replace(await self._play_answer(task, ask, sampling.max_tokens), times=tuple(times))

    async def _play_answer(self, task: Task, ask: AnswerFunction, max_tokens: int) -> PlayedRollout:
        """Make an attempt of one answer."""
        rendered = self._render(task.fields["prompt"])
        cut = self._truncate(rendered.ids)
        assert len(cut) == len(rendered.ids) or not rendered.images, "the data refuse to cut prompts with images"
        prompt = RenderedPrompt(cut, rendered.images)
        try:
            completion = await ask(prompt, 0, max_tokens)
        except EpisodeEndedError as ended:
            return PlayedRollout((), Verdict.failure(ended.outcome, str(ended)))
        verdict = await self._judge.judge(task, completion.text)
        finish = completion.finish_reason
        # in a mix, the turns of played sources name the states in which they began
        anchor = state_number(None, check_observation(task.fields["prompt"])) if self._episodes_of else None
        turns = (Turn(prompt.ids, completion, 0, anchor=anchor, images=prompt.images),)
        return PlayedRollout(turns, verdict, finish == "length", finish)

    async def _judge_episode(self, task: Task, episode: Episode, options: EnvConfig) -> PlayedRollout:
        """Judge the last answer of a multi-turn rollout, and return the attempt's result."""
        if episode.outcome is Outcome.SUCCEEDED:
            verdict = await self._judge.judge(task, episode.turns[-1].completion.text)
            if options.gives_rewards:
                verdict = replace(verdict, parts=self._reward_parts(task, episode.rewards, verdict))
        else:
            verdict = Verdict.failure(episode.outcome, episode.error)
        episode_fields = {
            name: getattr(episode, name) for name in ("truncated", "role", "waited", "calls", "failed_calls")
        }
        finish = end_reason(episode.turns, episode.truncated, options.max_turns)
        return PlayedRollout(tuple(episode.turns), verdict, finish=finish, **episode_fields)

    def _reward_parts(self, task: Task, paid: Mapping[str, float], verdict: Verdict) -> dict[str, float]:
        """Return all reward parts, those of the environment and those of the reward function."""
        if not self._judge.scores(task):
            return {} if paid.keys() <= {ENVIRONMENT_PART} else dict(paid)
        parts = dict(paid) or {ENVIRONMENT_PART: 0.0}
        for name, value in (verdict.parts or {ANSWER_PART: verdict.reward}).items():
            parts[name] = parts.get(name, 0.0) + value
        return parts
