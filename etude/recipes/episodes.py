"""Rollouts of several turns: the model answers, somebody says what comes of it, and so on until it is over.

    reset ─► what is shown ─► the model answers ─► its calls are made, or `step` ─► what is shown ─► …

What the model wrote stays the ids that it wrote (`chat.transcript`). A rollout ends where the environment says so,
where an answer calls no tool and there is no environment, after `env.max_turns`, or where what is shown leaves no room
for an answer; the last two truncate it. What an environment does wrong, raises or is too long about is an outcome.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from etude.chat import Aside, Chat, Transcript, retold
from etude.chat.calls import FAILED
from etude.chat.transcript import Shown, checked, text_of_shown
from etude.errors import ChatError, EnvError, RewardError
from etude.observe import get_log
from etude.protocols import Env, Ids, Observation
from etude.recipes.environment import EnvConfig
from etude.records import Completion, Message, Outcome, Task, Turn
from etude.rewards import score_of
from etude.rewards.base import named
from etude.rewards.verdict import raised

__all__ = ["ENVIRONMENT", "Ask", "EndedError", "Episode", "Episodes"]

ENVIRONMENT = "environment"
"""The part of a reward that an environment pays without a name of its own."""


class Ask(Protocol):
    """Whoever answers for the model."""

    async def __call__(self, prompt: Ids, turn: int, room: int) -> Completion:
        """The answer to a prompt, of at most so many tokens. Raises `EndedError` where there will be none."""
        ...


class EndedError(Exception):
    """The rollout is over, and did not succeed."""

    def __init__(self, outcome: Outcome, error: str) -> None:
        super().__init__(error)
        self.outcome = outcome


@dataclass
class Episode:
    """One rollout, as far as it has come."""

    turns: list[Turn] = field(default_factory=list)
    paid: dict[str, float] = field(default_factory=dict)
    """What the environment paid in all, by the names that it gave."""
    truncated: bool = False
    role: int = 0
    outcome: Outcome = Outcome.SUCCEEDED
    error: str = ""
    waited: float = 0.0
    """Seconds that the environment took, and the tools."""
    calls: int = 0
    """How often tools were called, and how many of the calls failed."""
    failed_calls: int = 0

    def pay(self, reward: Any) -> None:
        """Give the last turn what its answer earned."""
        if reward is None:
            return
        amount, parts = score_of(reward)
        for name, value in (parts or {ENVIRONMENT: amount}).items():
            self.paid[name] = self.paid.get(name, 0.0) + value
        self.turns[-1] = replace(self.turns[-1], reward=amount)


class Episodes:
    """Plays rollouts with whom the options name.

    Waits for a seat (`env.at_once` rollouts are played at a time), for whoever answers, and for the environment, at
    most `env.timeout` seconds a step.
    """

    def __init__(self, config: EnvConfig, chat: Chat, longest: int) -> None:
        """longest: how many tokens a rollout may have at most, all that it is shown included."""
        self.config, self._chat = config, chat
        self._longest = min(longest, config.max_tokens or longest)
        self._tools = config.toolbox()
        self._seats = asyncio.Semaphore(config.at_once)

    @property
    def pays(self) -> bool:
        """Whether there is an environment, which may pay for what is done in it."""
        return self.config.path is not None

    def retold(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """What was said in a rollout."""
        return retold(self._chat.tokenizer, turns)

    async def play(self, task: Task, ask: Ask) -> Episode:
        """One rollout, from its beginning to its end."""
        episode = Episode()
        async with self._seats:
            partner = _Partner(self.config, self._tools, task, episode)
            try:
                await self._through(partner, task, ask, episode)
            except EndedError as ended:
                episode.outcome, episode.error = ended.outcome, str(ended)
            except ChatError as error:
                told = f"What was shown on {named(task)} cannot be: {error}"
                episode.outcome, episode.error = Outcome.FAILED, told
            finally:
                await partner.close()
        return episode

    async def _through(self, partner: _Partner, task: Task, ask: Ask, episode: Episode) -> None:
        """Turn after turn, until it is over."""
        first = await partner.reset()
        shown = checked(first.shown or task.fields["prompt"])
        transcript, state = Transcript(self._chat, shown, first.tools), _state(first.anchor, shown)
        episode.role = first.role
        for index in range(self.config.max_turns):
            prompt = transcript.ids
            room = self._longest - len(prompt)
            if room < 1:
                if index == 0:
                    raise EndedError(
                        Outcome.FAILED,
                        f"What {named(task)} begins with has {len(prompt)} tokens, and a rollout may have "
                        f"{self._longest} in all: nothing could follow. Show less, or raise `env.max_tokens`.",
                    )
                break
            observed = transcript.observed(prompt)
            completion = await ask(prompt, index, room)
            answer = transcript.said(prompt, completion)
            episode.turns.append(Turn(prompt, completion, index, anchor=state, observed=observed))
            told = await partner.step(answer, last=index + 1 == self.config.max_turns)
            if told.done or told.truncated:
                episode.truncated = told.truncated or completion.finish == "length"
                return
            transcript.show(checked(told.shown))
            state = _state(told.anchor, checked(told.shown))
        episode.truncated = True


class _Partner:
    """The other side of one rollout: functions that the model may call, and behind them an environment, or nobody."""

    def __init__(self, config: EnvConfig, tools: Any, task: Task, episode: Episode) -> None:
        self._config, self._tools, self._task, self._episode = config, tools, task, episode
        self._env: Env | None = None
        self._aside = Aside("etude-env")

    async def reset(self) -> Observation:
        """What the model is shown first, and what it may call."""
        if self._config.path is None:
            return Observation(tools=self._tools.schemas)
        self._env = await self._called("be made", self._config.maker(), **self._config.options)
        told = self._checked("reset", await self._called("`reset`", self._env.reset, self._task))
        if told.done or told.truncated or told.reward is not None:
            raise self._failed("`reset` says that it is over, or pays for an answer, before there was any")
        if self._tools is None:
            return told
        if told.tools:
            raise self._failed(
                "it offers tools of its own beside `env.tools`. Offer all of them in one of the two places"
            )
        return replace(told, tools=self._tools.schemas)

    async def step(self, answer: Message, *, last: bool) -> Observation:
        """What comes of an answer. last: whether no answer will follow, so that nobody would read what a tool says."""
        if answer.tool_calls and self._tools is not None:
            if last:
                return Observation(truncated=True)
            began = time.perf_counter()
            told = Observation(await self._tools.answer(answer.tool_calls, self._task))
            self._episode.waited += time.perf_counter() - began
        elif self._env is None:
            return Observation(done=True)
        else:
            told = self._checked("step", await self._called("`step`", self._env.step, answer))
            try:
                self._episode.pay(told.reward)
            except RewardError as error:
                raise self._failed(f"the reward of `step` cannot be used: {error}") from error
        self._count(told)
        if not (told.shown or told.done or told.truncated):
            raise self._failed("`step` shows nothing, and does not say that it is over")
        return told

    async def close(self) -> None:
        """Let go of the environment. One that is still in a call is closed after it, and not waited for."""
        close = getattr(self._env, "close", None)
        if callable(close) and self._aside.idle:
            try:
                await self._called("`close`", close)
            except EndedError as ended:
                get_log("recipes").warning("%s", ended)
            close = None
        self._aside.close(partial(self._close_behind, close) if callable(close) else None)

    def _close_behind(self, close: Callable[[], Any]) -> None:
        """Close, on the thread of a call that has ended at last, where no event loop runs."""
        try:
            found = close()
            if inspect.isawaitable(found):
                asyncio.run(_awaited(found))
        except Exception as error:
            get_log("recipes").warning("%s", self._failed(f"`close` failed: {raised(error)}"))

    async def _called(self, what: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """What one of the environment's functions returns, within its time."""
        began, bound = time.perf_counter(), asyncio.timeout(self._config.timeout)
        try:
            async with bound:
                if inspect.iscoroutinefunction(function):
                    return await function(*given, **options)
                found = await self._aside.call(function, *given, **options)
                return await found if inspect.isawaitable(found) else found
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            if bound.expired():
                where = f"The environment {self._config.path} took longer than `env.timeout` ="
                told = f"{where} {self._config.timeout:g} seconds for {what} on {named(self._task)}."
                raise EndedError(Outcome.TIMED_OUT, told) from error
            raise self._failed(f"{what} failed: {raised(error)}") from error
        finally:
            self._episode.waited += time.perf_counter() - began

    def _checked(self, method: str, told: Any) -> Observation:
        if not isinstance(told, Observation):
            raise self._failed(f"`{method}` returned a value of type {type(told).__name__}; it returns an Observation")
        for name, kind in (("role", int), ("anchor", str | None), ("tools", Sequence)):
            if not isinstance(getattr(told, name), kind):
                raise self._failed(f"`{method}` gave {getattr(told, name)!r} for `{name}`, which is no such thing")
        return replace(told, shown=checked(told.shown))

    def _count(self, told: Observation) -> None:
        """Count the calls whose results are shown."""
        for each in () if isinstance(told.shown, str) else told.shown:
            if isinstance(each, Message) and each.role == "tool":
                self._episode.calls += 1
                self._episode.failed_calls += str(each.content).startswith(FAILED)

    def _failed(self, what: str) -> EndedError:
        text = f"The environment {self._config.path} failed on {named(self._task)}: {what.rstrip('.')}."
        return EndedError(Outcome.FAILED, text)


async def _awaited(found: Awaitable[Any]) -> Any:
    return await found


def _state(name: str | None, shown: Shown) -> int:
    """A number for the state that a turn begins in: of its name, or of what is shown."""
    text = f"named {name}" if name is not None else f"shown {text_of_shown(shown)}"
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
