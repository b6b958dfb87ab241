"""The turn recorder: writes each answer, with its prompt, to the rollout queue once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from etude.agents.proxy.metrics import EndpointMetrics
from etude.agents.proxy.request import APIDialect, APIError, ModelRequest, ReplyHeader
from etude.agents.proxy.session import AttemptSession, Prompt
from etude.agents.proxy.upstream import CompletionChunk
from etude.chat import ChatRenderer
from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import IllegalTransitionError, NotFoundError
from etude.observe import get_logger
from etude.records import Completion, SamplingParams, Turn
from etude.store.rollout_queue import AttemptId, RolloutQueue

T = TypeVar("T")


@dataclass(eq=False)
class ModelCall:
    """One parsed call."""

    id: str
    dialect: APIDialect
    request: ModelRequest
    session: AttemptSession
    prompt: Prompt
    sampling: SamplingParams
    ignored: tuple[str, ...]
    """The fields of the request that the answer does not follow."""
    tags: tuple[str, ...]
    began: float
    anchor: int
    """Identifies the state of the call, for credit assignment that compares actions in the same state."""
    input_ids: Ids = field(init=False)
    """All ids that the model gets."""

    def __post_init__(self) -> None:
        self.input_ids = self.prompt.input_ids

    def reply_header(self, tokenizer: Tokenizer) -> ReplyHeader:
        """Return the fields that its answers share."""
        return ReplyHeader(self.id, self.request, len(self.input_ids), tokenizer)

    @property
    def allows_tools(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.request.tools) and self.request.tool_choice != "none"


class SessionCall(Protocol):
    """A call of an attempt that has a session."""

    @property
    def session(self) -> AttemptSession:
        """The session of its attempt."""
        ...


class TurnRecorder:
    """Writes turns and notes. A write that has started is completed, even if its caller is cancelled."""

    def __init__(
        self, queue: RolloutQueue, model: str, metrics: EndpointMetrics, on_ended: Callable[[AttemptId], None]
    ) -> None:
        """on_ended: called with an attempt that turns out to have ended."""
        self._queue, self._model, self._metrics, self._on_ended = queue, model, metrics, on_ended
        self._writes: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Wait until all is written."""
        while self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)

    async def record_turn(self, call: ModelCall, completion: Completion, began: float) -> int:
        """Write a turn, and return its index once that is acknowledged. began: time at which its sampling began."""
        turn = Turn(
            call.input_ids,
            completion,
            0,
            self._model,
            call.tags,
            anchor=call.anchor,
            observed=call.prompt.observed,
            opened=len(call.prompt.prefill_ids),
        )
        index = await self._write(call, self._queue.record_turn(call.session.attempt_id, turn, began))
        counts = self._metrics.counts
        counts["turns"] += 1
        counts[f"turns_{call.prompt.how}"] += 1
        counts["tokens_rerendered"] += call.prompt.changed
        counts["prompt_tokens"] += len(call.input_ids)
        counts["completion_tokens"] += len(completion.ids)
        counts["turns_aborted"] += completion.finish_reason == "abort"
        return index

    async def note(self, call: ModelCall, name: str, data: Mapping[str, Any]) -> None:
        """Write a note about a call that became no turn."""
        data = {**data, "model": self._model, "tags": list(call.tags)}
        await self._write(call, self._queue.record_note(call.session.attempt_id, name, data))

    def record_aborted(
        self, call: ModelCall, chunks: Sequence[CompletionChunk], chat: ChatRenderer, began: float
    ) -> None:
        """Write the tokens that were sampled before a call was cancelled. Returns at once."""
        self._start_write(self._record_aborted(call, chunks, chat, began))

    async def _record_aborted(
        self, call: ModelCall, chunks: Sequence[CompletionChunk], chat: ChatRenderer, began: float
    ) -> None:
        try:
            if not any(len(chunk.ids) for chunk in chunks):
                self._metrics.counts["aborted_unsampled"] += 1
                await self.note(call, "aborted", {"prompt_tokens": len(call.input_ids)})
                return
            ids, logp, version = (
                np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("ids", "logp", "version")
            )
            completion = Completion(ids, logp, version, "abort", chat.tokenizer.decode(ids))
            await self.record_turn(call, completion, began)
        except APIError as refusal:
            get_logger("agents").debug(f"An aborted turn of {call.session.attempt_id} came too late: {refusal}")
        except Exception as error:  # no caller waits
            get_logger("agents").warning(f"An aborted turn of {call.session.attempt_id} could not be written: {error}")

    async def record_external(self, call: SessionCall, data: Mapping[str, Any]) -> None:
        """Write a call to an external model."""
        await self._write(call, self._queue.record_note(call.session.attempt_id, "external", dict(data)))

    def record_external_later(self, call: SessionCall, data: Mapping[str, Any]) -> None:
        """Write a cancelled call to an external model. Returns at once."""
        self._start_write(self._record_late_external(call, data))

    async def _record_late_external(self, call: SessionCall, data: Mapping[str, Any]) -> None:
        try:
            await self._queue.record_note(call.session.attempt_id, "external", dict(data))
        except Exception as error:  # no caller waits
            get_logger("agents").debug(
                f"A call of {call.session.attempt_id} to an external model came too late to be recorded: {error}"
            )

    async def _write(self, call: SessionCall, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.shield(self._start_write(work))
        except (IllegalTransitionError, NotFoundError) as error:
            self._on_ended(call.session.attempt_id)
            raise attempt_over_error(call.session.attempt_id) from error

    def _start_write(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task


def attempt_over_error(attempt_id: AttemptId) -> APIError:
    """Return the refusal of a call whose attempt has ended."""
    return APIError(
        f"Attempt {attempt_id.attempt} at rollout {attempt_id.rollout} is over, and its key is no longer valid.",
        "forbidden",
        code="attempt_over",
    )
