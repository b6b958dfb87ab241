"""One attempt while it is played: the agent is called, kept within its time, and what came of it is put into words.

consumes       a claim
produces       how it ended
waits for      the agent, and then for the desk to hear what was said on the way
unblocked by   the agent's end; its time limit, or `stop`, which cancel it; and `cancel_s` after that, when it is left
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from etude.agents.agent import Agent, RolloutInfo, llm_of
from etude.agents.blame import excused, outcome_of
from etude.agents.earned import earned
from etude.agents.hands import Hands
from etude.agents.scope import Scope
from etude.errors import AgentError, IllegalMoveError
from etude.records import Outcome
from etude.store.desk import Claim, Desk, Ended

__all__ = ["Playing"]

TOLD = 30.0
"""Seconds that the desk may take, in the end, to hear what was said on the way."""
LASTING = 0.2
"""Seconds after which an attempt says that it runs; one that is over sooner need not."""
LONGEST = 8000
"""Characters of an error that are kept: its end, where the cause stands, and a part of its beginning."""
_OURS = str(Path(__file__).parent)


class Playing:
    """An attempt that this process plays."""

    def __init__(
        self, agent: Agent, claim: Claim, desk: Desk, hands: Hands, *, cancel_s: float, store_url: str = ""
    ) -> None:
        self.claim = claim
        self.left = False
        """Whether its coroutine goes on although it was cancelled."""
        self._agent, self._hands, self._cancel_s, self._store_url = agent, hands, cancel_s, store_url
        self._loop = asyncio.get_running_loop()
        self._scope = Scope(desk, claim.key)
        self._over: asyncio.Future[Ended] = self._loop.create_future()
        self._ending: Ended | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._work: asyncio.Task[Ended] | None = None

    async def play(self) -> Ended:
        """Have the agent play it, to whatever end."""
        if self._ending is not None:
            return self._ending
        limits = [each for each in (self.claim.limits.timeout_s, self._agent.timeout_s) if each is not None]
        limit = min(limits) if limits else None
        if limit is None or limit > LASTING:
            self._after(LASTING, self._lasts, limit)
        else:
            self._after(limit, self._late, limit)
        self._work = self._loop.create_task(self._called())
        self._work.add_done_callback(self._came)
        try:
            ended = await self._over
        except asyncio.CancelledError:
            self._work.cancel()
            raise
        finally:
            for timer in self._timers:
                timer.cancel()
        heard = self._heard(ended, await self._scope.close(TOLD))
        return replace(heard, error=self._without_keys(heard.error))

    def stop(self, ended: Ended) -> None:
        """Have it end so, unless it has ended by itself."""
        if self._ending is None and not self._over.done():
            self._ending = ended
            if self._work is not None:  # else it was claimed, and has not begun
                self._work.cancel()
                self._after(self._cancel_s, self._leave)

    def forsaken(self, ended: Callable[[], None]) -> None:
        """Have it told when a coroutine that was left to itself has ended after all."""
        if self._work is not None:
            self._work.add_done_callback(lambda _: ended())

    # -- the agent's call ----------------------------------------------------------------------------------------------

    async def _called(self) -> Ended:
        """Call the agent. Whatever it does, this ends with a word on it: nothing else may reach the loop."""
        wants = self._agent.wants()
        try:
            given = {name: self._given(name) for name in wants.names}
            if wants.waits:
                with self._scope.entered():
                    result = await self._agent.run(**given)
            else:
                result = await self._hands.call(lambda: self._within(given))
                if inspect.isawaitable(result):
                    with self._scope.entered():
                        result = await result
            ended = self._ending or self._valued(result)
            return await excused(ended, self.claim.resources) if "llm" in wants.names else ended
        except _NoEndpointError as error:
            return Ended(Outcome.INFRA_ERROR, str(error))
        except BaseException as error:
            if self._ending is not None:
                return self._stopped(self._ending, error)
            return Ended(outcome_of(error, self.claim.resources), self._told(error))

    def _within(self, given: dict[str, Any]) -> Any:
        """Call it, on its own thread."""
        with self._scope.entered():
            return self._agent.run(**given)

    def _given(self, name: str) -> Any:
        claim = self.claim
        match name:
            case "task":
                return claim.task
            case "rollout":
                return RolloutInfo(claim.key.rollout, claim.key.attempt, claim.use)
            case "resources":
                return claim.resources
            case "llm":
                llm = llm_of(claim)
                if llm is None:
                    raise _NoEndpointError(
                        f"The agent {self._agent.title} asks for `llm`, and no endpoint is there: the store has no "
                        "resource named `endpoint`."
                    )
                return llm
            case "claim":
                return claim
            case "store_url":
                return self._store_url
        raise AssertionError(f"nobody gives {name}")

    def _valued(self, result: Any) -> Ended:
        """How an attempt ended whose agent returned this."""
        if isinstance(result, Ended):
            returned, reward = result, result.reward
        else:
            returned, reward = Ended(Outcome.SUCCEEDED), result
        if reward is None:
            return returned
        if self._scope.rewarded:
            return Ended(
                Outcome.FAILED,
                f"The agent {self._agent.title} gave its final reward twice: by `etude.emit.reward`, and by what it "
                f"returned ({reward!r}). Do one of the two; what a turn earned is emitted with `turn=`.",
            )
        try:
            return replace(returned, reward=earned(reward, f"The agent {self._agent.title} returned"))
        except AgentError as error:
            return Ended(Outcome.FAILED, str(error))

    # -- its end -------------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._timers.append(self._loop.call_later(seconds, call, *args))

    def _lasts(self, limit: float | None) -> None:
        """Say that it runs. Most attempts of a quick agent are over by now, and need no second timer either."""
        if not self._over.done():
            self._scope.say(lambda desk, key: desk.ready(key))
            if limit is not None:
                self._after(limit - LASTING, self._late, limit)

    def _late(self, limit: float) -> None:
        self.stop(Ended(Outcome.TIMED_OUT, f"It was not over after {limit:g} s."))

    def _came(self, work: asyncio.Task[Ended]) -> None:
        if work.cancelled():
            ended = self._ending or Ended(Outcome.INFRA_ERROR, "It was cancelled before it began.")
        else:
            ended = work.result()
        if not self._over.done():
            self._over.set_result(ended)

    def _leave(self) -> None:
        """Wait no longer for a coroutine that was cancelled and goes on."""
        if not self._over.done() and self._ending is not None:
            self.left = True
            told = (
                f"{self._ending.error} It was cancelled, and went on for {self._cancel_s:g} s: it was left to itself."
            )
            self._over.set_result(replace(self._ending, error=told))

    def _heard(self, ended: Ended, error: Exception | None) -> Ended:
        """How it ended, if the desk may not have heard all that was said on the way."""
        if error is None or ended.outcome is not Outcome.SUCCEEDED:
            return ended
        outcome = Outcome.FAILED if isinstance(error, IllegalMoveError) else Outcome.INFRA_ERROR
        return Ended(outcome, f"What it emitted was not written down: {type(error).__name__}: {error}")

    def _stopped(self, ending: Ended, error: BaseException) -> Ended:
        """How an attempt ended that was stopped, and how far it had come: what the error's notes say, such as a
        command's last lines, or its line in the agent."""
        notes = getattr(error, "__notes__", ())
        if isinstance(error, asyncio.CancelledError) and notes:
            return replace(ending, error=" ".join([ending.error, *notes]))
        frames = traceback.extract_tb(_of_the_agent(error.__traceback__))
        if not frames:  # it had not begun, or is a function on a thread, which nothing interrupts
            return ending
        last = next(frame for frame in reversed(frames) if frame.filename == frames[0].filename)
        return replace(ending, error=f"{ending.error} It was at {last.filename}:{last.lineno}, in {last.name}.")

    def _without_keys(self, text: str) -> str:
        """A text without the keys that the agent was given."""
        for key in (self.claim.model_key, self.claim.reward_key):
            text = text.replace(key, "…") if key else text
        return text

    def _told(self, error: BaseException) -> str:
        """The traceback of what the agent raised."""
        if isinstance(error, asyncio.CancelledError):
            return f"The agent {self._agent.title} was cancelled, and by nobody here: it cancelled itself."
        text = "".join(traceback.format_exception(type(error), error, _of_the_agent(error.__traceback__))).strip()
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 4]}\n…\n{text[-LONGEST * 3 // 4 :]}"
        return text


def _of_the_agent(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the agent's own call on."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace


class _NoEndpointError(Exception):
    """An agent that asks for the model is played where nobody serves one."""
