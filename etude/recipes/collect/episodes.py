"""Rollouts of several turns: the model answers, the environment responds, and so on until the episode ends.

    reset ─► observation ─► the model's answer ─► its tool calls, or `step` ─► observation ─► …

The tokens that the model wrote stay unchanged in later prompts (`chat.transcript`). A rollout ends where the
environment says so, or where an answer calls no tool and there is no environment. It is truncated after
`env.max_turns`, or where an observation leaves no room for an answer. Errors and timeouts of an environment are
outcomes, not crashes.

In self-play an observation may name another player (`Observation.opponent`). It is answered by the same policy, and not
recorded: to the trained player it is a part of what the environment shows.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from etude.agents.hubs.pool import HubPool
from etude.agents.task_images import load_task_images
from etude.call_task import CallTask, TimeLimitError
from etude.chat import CallThread, ChatRenderer, RenderedPrompt, Transcript
from etude.chat.toolbox import ERROR_PREFIX
from etude.chat.transcript import ObservationContent, check_observation, observation_text
from etude.errors import ChatError, EnvError, GuestLostError, ImageError, RewardError
from etude.observe import get_logger
from etude.protocols import Env, Observation
from etude.recipes.collect.environment import Environment
from etude.recipes.collect.rollout_images import RolloutImages
from etude.records import Completion, Message, Outcome, Task, Turn
from etude.rewards import parse_score
from etude.rewards.base import describe_task
from etude.rewards.verdict import describe_exception

NOTHING_TRAINED = "the trained player had not answered yet: there is nothing to train on"
ENVIRONMENT_PART = "environment"
"""The part of a reward that an environment gives as a bare number."""


class AnswerFunction(Protocol):
    """Returns the model's answers."""

    async def __call__(self, prompt: RenderedPrompt, turn: int, room: int, *, recorded: bool = True) -> Completion:
        """Return the answer to a prompt, of at most `room` tokens. Raises `EpisodeEndedError` if there is none.

        turn: the number of answers before. recorded: false for an answer of another player, which is no turn."""
        ...


class EpisodeEndedError(Exception):
    """Ends a rollout that did not succeed."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome


@dataclass
class Episode:
    """One rollout, as far as it has come."""

    turns: list[Turn] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    """The sum of the environment's rewards, by part."""
    truncated: bool = False
    role: int = 0
    outcome: Outcome = Outcome.SUCCEEDED
    error: str = ""
    waited: float = 0.0
    """Seconds spent in the environment and the tools."""
    calls: int = 0
    """Number of tool calls; `failed_calls` counts those that failed."""
    failed_calls: int = 0

    def add_reward(self, reward: Any) -> None:
        """Add a reward to the last turn: that of its answer, or in self-play of another player's answer after it."""
        if reward is None:
            return
        amount, parts = parse_score(reward)
        for name, value in (parts or {ENVIRONMENT_PART: amount}).items():
            self.rewards[name] = self.rewards.get(name, 0.0) + value
        last = self.turns[-1]
        self.turns[-1] = replace(last, reward=amount if last.reward is None else last.reward + amount)


class EpisodePlayer:
    """Plays rollouts in an environment, with its tools.

    Waits for a slot (at most `max_concurrency` rollouts at a time), for the answers, and for the environment, at most
    `timeout` seconds per step.
    """

    def __init__(
        self, environment: Environment, chat: ChatRenderer, max_total_tokens: int, hub: HubPool | None = None
    ) -> None:
        """max_total_tokens: the most tokens of a rollout, observations included. hub: the guests that play it, if it
        is that of a hub."""
        self._environment = environment
        self.options = environment.options
        self._hub = hub
        self._chat = chat
        self._max_total_tokens = min(max_total_tokens, self.options.max_tokens or max_total_tokens)
        self._tools = environment.load_toolbox()
        self._slots = asyncio.Semaphore(self.options.max_concurrency)

    async def play(self, task: Task, generate: AnswerFunction, images: RolloutImages) -> Episode:
        """Play one rollout, from its beginning to its end. images: stores those that the environment shows."""
        episode = Episode()
        async with self._slots:
            if self._hub is not None:
                await self._hub.wait_ready()
            seen = await load_task_images(task, images)
            session = _EnvironmentSession(self._environment, self._factory(), self._tools, seen, episode)
            try:
                await self._play_turns(session, task, generate, episode, images)
            except EpisodeEndedError as ended:
                episode.outcome = ended.outcome
                episode.error = str(ended)
            except (ChatError, ImageError) as error:
                message = f"The observation shown on {describe_task(task)} is invalid: {error}"
                episode.outcome = Outcome.FAILED
                episode.error = message
            finally:
                await session.close()
        return episode

    def _factory(self) -> Callable[[], Env] | None:
        """Return what makes an environment; None if there are tools only."""
        if self._hub is not None:
            return self._hub.new_env
        options = self.options
        return None if options.path is None else partial(self._environment.load_factory(), **options.kwargs)

    async def _play_turns(
        self,
        session: _EnvironmentSession,
        task: Task,
        generate: AnswerFunction,
        episode: Episode,
        images: RolloutImages,
    ) -> None:
        """Play turn after turn, until the rollout ends."""
        most = self.options.max_turns
        answered: Counter[int | None] = Counter()
        """The number of answers of each player; None is the trained one."""
        observation = await session.reset()
        conversations = _Conversations(self._chat, observation.tools)
        episode.role = observation.role
        while not (observation.done or observation.truncated):
            player = observation.opponent
            content = await images.store(check_observation(observation.content or task.fields["prompt"]))
            transcript = conversations.show(player, content)
            if answered[player] == most:
                observation = replace(observation, truncated=True)
                break
            prompt = transcript.prompt
            room = self._max_total_tokens - len(prompt.ids)
            if room < 1 and not answered[player]:
                raise self._no_room(task, prompt)
            if room < 1:
                observation = replace(observation, truncated=True)
                break
            observed = transcript.count_observed_tokens(prompt)
            completion = await generate(prompt, answered.total(), room, recorded=player is None)
            if player is None:
                state = state_number(observation.anchor, content)
                index = len(episode.turns)
                turn = Turn(prompt.ids, completion, index, anchor=state, observed=observed, images=prompt.images)
                episode.turns.append(turn)
            answered[player] += 1
            answer = transcript.add_answer(prompt, completion)
            observation = await session.step(answer, player, last=answered[player] == most)
        if not episode.turns:
            raise EpisodeEndedError(
                Outcome.FAILED,
                f"The rollout of {describe_task(task)} ended in a turn of another player, and {NOTHING_TRAINED}.",
            )
        episode.truncated = observation.truncated or episode.turns[-1].completion.finish_reason == "length"

    def _no_room(self, task: Task, prompt: RenderedPrompt) -> EpisodeEndedError:
        """Return the error of a first prompt that leaves no room for an answer."""
        return EpisodeEndedError(
            Outcome.FAILED,
            f"The first prompt of {describe_task(task)} has {len(prompt.ids)} tokens{_describe_images(prompt)}, and a "
            f"rollout may have {self._max_total_tokens} in all: nothing could follow. Show less, or raise "
            f"`{self._environment.section}.max_tokens`.",
        )


class _Conversations:
    """The transcripts of a rollout's players. The first observation decides whether all of them are text."""

    def __init__(self, chat: ChatRenderer, tools: Sequence[Mapping[str, Any]]) -> None:
        """tools: those that each player may call."""
        self._chat = chat
        self._tools = tools
        self._of_player: dict[int | None, Transcript] = {}
        self._is_text = False

    def show(self, player: int | None, content: ObservationContent) -> Transcript:
        """Show an observation to a player, and return the transcript of this player."""
        known = self._of_player.get(player)
        if known is not None:
            known.add_observation(content)
            return known
        if not self._of_player:
            self._is_text = isinstance(content, str)
        elif isinstance(content, str) and not self._is_text:
            content = (Message("user", content),)
        elif self._is_text and not isinstance(content, str):
            raise ChatError("The rollout began with text, and another player gets messages. Show text, or begin so.")
        self._of_player[player] = Transcript(self._chat, content, self._tools)
        return self._of_player[player]


class _EnvironmentSession:
    """The environment side of one rollout: the tools that the model may call, and the environment, if any."""

    def __init__(
        self, environment: Environment, factory: Callable[[], Env] | None, tools: Any, task: Task, episode: Episode
    ) -> None:
        self._options = environment.options
        self._section = environment.section
        self._factory = factory
        self._tools = tools
        self._task = task
        self._episode = episode
        self._env: Env | None = None
        self._call_thread = CallThread("etude-env")
        self._call_task = CallTask(f"The environment {self._options.title}")

    async def reset(self) -> Observation:
        """Return the first observation, with the tools that the model may call."""
        if self._factory is None:
            return Observation(tools=self._tools.schemas)
        self._env = await self._call("be made", self._factory)
        assert self._env is not None, "an error is raised"
        observation = self._check_observation("reset", await self._call("`reset`", self._env.reset, self._task))
        if observation.done or observation.truncated or observation.reward is not None:
            raise self._environment_error("`reset` says that it is over, or gives a reward, before there was an answer")
        if self._tools is None:
            return observation
        if observation.tools:
            raise self._environment_error(
                f"it offers its own tools beside `{self._section}.tools`. Offer all of them in one of the two places"
            )
        return replace(observation, tools=self._tools.schemas)

    async def step(self, answer: Message, player: int | None, *, last: bool) -> Observation:
        """Return the observation after an answer. player: gave it; None is the trained one. last: the last answer of
        this player, who would not read a tool's result."""
        if answer.tool_calls and self._tools is not None:
            if last:
                return Observation(truncated=True)
            began = time.perf_counter()
            observation = Observation(await self._tools.run_calls(answer.tool_calls, self._task), opponent=player)
            self._episode.waited += time.perf_counter() - began
        elif self._env is None:
            return Observation(done=True)
        else:
            observation = self._check_observation("step", await self._call("`step`", self._env.step, answer))
            if observation.reward is not None and not self._episode.turns:
                raise self._environment_error(f"it gave a reward in the turn of player {player}, and {NOTHING_TRAINED}")
            try:
                self._episode.add_reward(observation.reward)
            except RewardError as error:
                raise self._environment_error(f"the reward of `step` cannot be used: {error}") from error
        self._count(observation)
        if not (observation.content or observation.done or observation.truncated):
            raise self._environment_error("`step` shows nothing, and does not say that it is over")
        return observation

    async def close(self) -> None:
        """Close the environment. One that is still in a call on its thread is closed after it, without a wait. One
        that is in an abandoned coroutine is not closed."""
        close = None if self._call_task.is_abandoned else getattr(self._env, "close", None)
        try:
            if callable(close) and self._call_thread.is_idle:
                await self._call("`close`", close)
                close = None
        except EpisodeEndedError as ended:
            get_logger("recipes").warning("%s", ended)
            close = None
        finally:
            self._call_task.close()
        self._call_thread.close(partial(self._close_in_thread, close) if callable(close) else None)

    def _close_in_thread(self, close: Callable[[], Any]) -> None:
        """Close the environment on the call's own thread, after a late call has ended, where no event loop runs."""
        try:
            result = close()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Exception as error:
            get_logger("recipes").warning("%s", self._environment_error(f"`close` failed: {describe_exception(error)}"))

    async def _call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the environment within its timeout, and return its result."""

        async def invoke() -> Any:
            if inspect.iscoroutinefunction(function):
                return await function(*args)
            result = await self._call_thread.call(function, *args)
            return await result if inspect.isawaitable(result) else result

        began = time.perf_counter()
        try:
            return await self._call_task.call(invoke, self._options.timeout)
        except EnvError:
            raise
        except GuestLostError as error:
            raise EpisodeEndedError(Outcome.INFRA_ERROR, str(error)) from error
        except TimeLimitError as error:
            cause = f"The environment {self._options.title} took longer than `{self._section}.timeout` ="
            message = f"{cause} {self._options.timeout:g} seconds for {what} on {describe_task(self._task)}."
            raise EpisodeEndedError(Outcome.TIMED_OUT, message) from error
        except (Exception, SystemExit) as error:
            raise self._environment_error(f"{what} failed: {describe_exception(error)}") from error
        finally:
            self._episode.waited += time.perf_counter() - began

    def _check_observation(self, method: str, value: Any) -> Observation:
        if not isinstance(value, Observation):
            raise self._environment_error(
                f"`{method}` returned a value of type {type(value).__name__}; it returns an Observation"
            )
        for name, kind in (("role", int), ("opponent", int | None), ("anchor", str | None), ("tools", Sequence)):
            if not isinstance(getattr(value, name), kind):
                raise self._environment_error(
                    f"`{method}` gave {getattr(value, name)!r} for `{name}`, which has another type"
                )
        try:
            content = check_observation(value.content)
        except ImageError as error:
            raise self._environment_error(f"`{method}` gave an image that cannot be sent: {error}") from error
        return replace(value, content=content)

    def _count(self, observation: Observation) -> None:
        """Count the tool calls whose results are shown."""
        for message in () if isinstance(observation.content, str) else observation.content:
            if isinstance(message, Message) and message.role == "tool":
                self._episode.calls += 1
                self._episode.failed_calls += str(message.content).startswith(ERROR_PREFIX)

    def _environment_error(self, what: str) -> EpisodeEndedError:
        text = f"The environment {self._options.title} failed on {describe_task(self._task)}: {what.rstrip('.')}."
        return EpisodeEndedError(Outcome.FAILED, text)


def _describe_images(prompt: RenderedPrompt) -> str:
    """Return the part of a sentence that counts the tokens of images; nothing without images."""
    tokens = sum(span.stop - span.start for span in prompt.images)
    return f", {tokens} of them of images" if tokens else ""


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def state_number(name: str | None, content: ObservationContent) -> int:
    """Return a number for the state that a turn begins in: a hash of its name, or of the observation."""
    text = f"named {name}" if name is not None else f"shown {observation_text(content)}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
