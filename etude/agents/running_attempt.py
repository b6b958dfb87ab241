"""One active attempt: calls the agent, enforces its time limit, and makes a report of the outcome.

consumes       a claim
produces       the attempt's report
waits for      the agent, and then for the rollout queue to take the last emissions
unblocked by   the agent's end; the time limit or `stop`, which cancel it; and `cancel_s` later, when it is abandoned
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from etude.agents.agent import Agent, CallSignature, RolloutInfo, get_llm
from etude.agents.attempt_context import AttemptContext, parse_reward
from etude.agents.error_classification import classify_error, excuse_if_unreachable
from etude.agents.hooks import Hook, HookEvent
from etude.agents.task_images import load_task_images
from etude.agents.worker_threads import WorkerThreads
from etude.errors import AgentError, IllegalTransitionError
from etude.observe.log import get_logger
from etude.records import Outcome
from etude.store.queue.rollout_queue import AttemptReport, Claim, RolloutQueue

log = get_logger("agents")

FLUSH_TIMEOUT = 30.0
"""Seconds that the rollout queue has, at the end, to take the remaining emissions."""
READY_AFTER = 0.2
"""Seconds after which a running attempt is reported as ready; a shorter attempt is not."""
MAX_ERROR_CHARACTERS = 8000
"""The most characters kept of an error: its end, which has the cause, and a part of its beginning."""
_PACKAGE = str(Path(__file__).parent)


class RunningAttempt:
    """An attempt that this process plays."""

    def __init__(
        self,
        agent: Agent,
        claim: Claim,
        queue: RolloutQueue,
        threads: WorkerThreads,
        hooks: Mapping[HookEvent, list[Hook]],
        *,
        cancel_s: float,
        uncounted_s: Callable[[], float] = lambda: 0.0,
        store_url: str = "",
    ) -> None:
        """hooks: called around the agent. uncounted_s: the seconds so far that do not count against limits, because the
        queue did not answer."""
        self.claim = claim
        self.is_abandoned = False
        """True if its coroutine still runs after it was cancelled."""
        self._agent = agent
        self._hooks = hooks
        self._queue = queue
        self._threads = threads
        self._cancel_s = cancel_s
        self._uncounted_s = uncounted_s
        self._store_url = store_url
        self._loop = asyncio.get_running_loop()
        self._context = AttemptContext(queue, claim.attempt_id)
        self._report: asyncio.Future[AttemptReport] = self._loop.create_future()
        self._stop_report: AttemptReport | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._work: asyncio.Task[AttemptReport] | None = None

    async def run(self) -> AttemptReport:
        """Have the agent play the attempt; return the report."""
        if self._stop_report is not None:
            return self._stop_report
        limits = [seconds for seconds in (self.claim.limits.timeout_s, self._agent.timeout_s) if seconds is not None]
        limit = min(limits) if limits else None
        if limit is None or limit > READY_AFTER:
            self._call_later(READY_AFTER, self._report_running, limit)
        else:
            self._call_later(limit, self._time_out, limit, self._uncounted_s())
        self._work = self._loop.create_task(self._play())
        self._work.add_done_callback(self._on_done)
        try:
            report = await self._report
        except asyncio.CancelledError:
            self._work.cancel()
            raise
        finally:
            for timer in self._timers:
                timer.cancel()
        checked = self._check_emitted(report, await self._context.close(FLUSH_TIMEOUT))
        return replace(checked, error=self._without_keys(checked.error))

    def stop(self, report: AttemptReport) -> None:
        """End the attempt with this report, unless it has ended by itself."""
        if self._stop_report is None and not self._report.done():
            self._stop_report = report
            if self._work is not None:  # None before `run` was called
                self._work.cancel()
                self._call_later(self._cancel_s, self._abandon)

    def on_late_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` when an abandoned coroutine ends after all."""
        if self._work is not None:
            self._work.add_done_callback(lambda _: callback())

    # -- the agent's call ----------------------------------------------------------------------------------------------

    async def _play(self) -> AttemptReport:
        """Call the agent and its hooks. This always ends with a report: no error may reach the event loop."""
        report = await self._guarded(self._call_agent)
        if self._stop_report is not None or not (self._hooks["turn"] or self._hooks["attempt_end"]):
            return report
        ended = await self._guarded(partial(self._call_end_hooks, report))
        if report.outcome is Outcome.SUCCEEDED or self._stop_report is not None:
            return ended
        if ended is not report:
            log.warning("A hook of a failed attempt failed too: %s", self._without_keys(ended.error))
        return report

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, AttemptReport]]) -> AttemptReport:
        """Return the report that this work makes, or that of its error."""
        try:
            return await work()
        except _NoEndpointError as error:
            return AttemptReport(Outcome.INFRA_ERROR, str(error))
        except BaseException as error:
            if self._stop_report is not None:
                return self._describe_stop(self._stop_report, error)
            return AttemptReport(classify_error(error, self.claim.resources), self._format_error(error))

    async def _call_agent(self) -> AttemptReport:
        self.claim = replace(self.claim, task=await load_task_images(self.claim.task, self._queue))
        for hook in self._hooks["attempt_start"]:
            await self._call(hook.function, hook.signature)
        signature = self._agent.call_signature()
        result = await self._call(self._agent.run, signature)
        report = self._stop_report or self._make_report(result)
        return await excuse_if_unreachable(report, self.claim.resources) if "llm" in signature.parameters else report

    async def _call_end_hooks(self, report: AttemptReport) -> AttemptReport:
        if self._hooks["turn"]:
            for index, turn in enumerate(await self._queue.turns(*self.claim.attempt_id)):
                for hook in self._hooks["turn"]:
                    await self._call(hook.function, hook.signature, turn=turn, index=index)
        for hook in self._hooks["attempt_end"]:
            await self._call(hook.function, hook.signature, report=report)
        return report

    async def _call(self, function: Callable[..., Any], signature: CallSignature, **given: Any) -> Any:
        """Call the agent or a hook with the arguments that it takes, on a thread if it is no coroutine. given: those
        that not every call has."""
        names = signature.parameters
        arguments = {name: given[name] if name in given else self._argument(name) for name in names}
        if signature.is_async:
            with self._context.activate():
                return await function(**arguments)
        result = await self._threads.call(lambda: self._call_in_context(function, arguments))
        if inspect.isawaitable(result):
            with self._context.activate():
                result = await result
        return result

    def _call_in_context(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        with self._context.activate():
            return function(**arguments)

    def _argument(self, name: str) -> Any:
        claim = self.claim
        match name:
            case "task":
                return claim.task
            case "rollout":
                return RolloutInfo(claim.attempt_id.rollout, claim.attempt_id.attempt, claim.use)
            case "resources":
                return claim.resources
            case "llm":
                llm = get_llm(claim)
                if llm is None:
                    raise _NoEndpointError(
                        f"The agent {self._agent.title} takes `llm`, but the run has no model endpoint: the store has "
                        "no resource named `endpoint`."
                    )
                return llm
            case "claim":
                return claim
            case "store_url":
                return self._store_url
        raise AssertionError(f"an agent has no argument {name}")

    def _make_report(self, result: Any) -> AttemptReport:
        """Return the report of an attempt whose agent returned this."""
        if isinstance(result, AttemptReport):
            returned, reward = result, result.reward
        else:
            returned, reward = AttemptReport(Outcome.SUCCEEDED), result
        if reward is None:
            return returned
        if self._context.has_final_reward:
            return AttemptReport(
                Outcome.FAILED,
                f"The agent {self._agent.title} gave its final reward twice: by `etude.emit.reward`, and by its return "
                f"value ({reward!r}). Use one of the two. Emit the reward of a single turn with `turn=`.",
            )
        try:
            return replace(returned, reward=parse_reward(reward, f"The agent {self._agent.title} returned"))
        except AgentError as error:
            return AttemptReport(Outcome.FAILED, str(error))

    # -- the end of the attempt ----------------------------------------------------------------------------------------

    def _call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._timers.append(self._loop.call_later(seconds, call, *args))

    def _report_running(self, limit: float | None) -> None:
        """Report the attempt as ready. Most attempts of a quick agent have ended by now, and need no second timer."""
        if not self._report.done():
            self._context.emit(lambda queue, attempt_id: queue.ready(attempt_id))
            if limit is not None:
                self._call_later(limit - READY_AFTER, self._time_out, limit, self._uncounted_s())

    def _time_out(self, limit: float, uncounted_s: float) -> None:
        """Stop the attempt, or give it the seconds that did not count since there were `uncounted_s` of them."""
        now_uncounted_s = self._uncounted_s()
        if now_uncounted_s > uncounted_s:
            self._call_later(now_uncounted_s - uncounted_s, self._time_out, limit, now_uncounted_s)
            return
        self.stop(AttemptReport(Outcome.TIMED_OUT, f"It did not end within {limit:g} s."))

    def _on_done(self, work: asyncio.Task[AttemptReport]) -> None:
        if work.cancelled():
            report = self._stop_report or AttemptReport(Outcome.INFRA_ERROR, "It was cancelled before it started.")
        else:
            report = work.result()
        if not self._report.done():
            self._report.set_result(report)

    def _abandon(self) -> None:
        """Stop waiting for a cancelled coroutine that still runs."""
        if not self._report.done() and self._stop_report is not None:
            self.is_abandoned = True
            message = f"{self._stop_report.error} It was cancelled, ran on for {self._cancel_s:g} s, and was abandoned."
            self._report.set_result(replace(self._stop_report, error=message))

    def _check_emitted(self, report: AttemptReport, error: Exception | None) -> AttemptReport:
        """Return the report, or a failure if an emission may be lost."""
        if error is None or report.outcome is not Outcome.SUCCEEDED:
            return report
        outcome = Outcome.FAILED if isinstance(error, IllegalTransitionError) else Outcome.INFRA_ERROR
        return AttemptReport(outcome, f"Its emitted rewards or events were not stored: {type(error).__name__}: {error}")

    def _describe_stop(self, report: AttemptReport, error: BaseException) -> AttemptReport:
        """Return the report of a stopped attempt, with how far it came: the notes of the error (such as a command's
        last lines), or the agent's current line."""
        notes = getattr(error, "__notes__", ())
        if isinstance(error, asyncio.CancelledError) and notes:
            return replace(report, error=" ".join([report.error, *notes]))
        frames = traceback.extract_tb(_strip_own_frames(error.__traceback__))
        if not frames:  # it had not started, or is a function on a thread, which cannot be interrupted
            return report
        last = next(frame for frame in reversed(frames) if frame.filename == frames[0].filename)
        return replace(report, error=f"{report.error} It was at {last.filename}:{last.lineno}, in {last.name}.")

    def _without_keys(self, text: str) -> str:
        for key in (self.claim.model_key, self.claim.reward_key):
            text = text.replace(key, "…") if key else text
        return text

    def _format_error(self, error: BaseException) -> str:
        if isinstance(error, asyncio.CancelledError):
            return f"The agent {self._agent.title} cancelled itself: its runner did not cancel it."
        text = "".join(traceback.format_exception(type(error), error, _strip_own_frames(error.__traceback__))).strip()
        if len(text) > MAX_ERROR_CHARACTERS:
            text = f"{text[: MAX_ERROR_CHARACTERS // 4]}\n…\n{text[-MAX_ERROR_CHARACTERS * 3 // 4 :]}"
        return text


def _strip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the agent's own frames on."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return trace


class _NoEndpointError(Exception):
    """The agent takes `llm`, and the store has no endpoint."""
