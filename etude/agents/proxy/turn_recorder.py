"""The turn recorder: writes each answer, with its prompt, to the rollout queue once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from etude.agents.proxy.metrics import EndpointMetrics
from etude.agents.proxy.request import APIDialect, APIError, CompletionChunk, ModelRequest, ReplyHeader, ReturnedPrompt
from etude.agents.proxy.session import AttemptSession, Prompt
from etude.chat.tokenizer import Tokenizer
from etude.errors import IllegalTransitionError, NotFoundError
from etude.images import PromptImages
from etude.observe import get_logger
from etude.records import Completion, SamplingParams, Turn
from etude.store.queue.rollout_queue import AttemptId, RolloutQueue
from etude.support import Support

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
    images: PromptImages | None = None
    """The images of the prompt, with their bytes."""

    def reply_header(self, tokenizer: Tokenizer, prompt: ReturnedPrompt | None = None) -> ReplyHeader:
        """Return the fields that its answers share. prompt: returned before each."""
        return ReplyHeader(self.id, self.request, len(self.prompt.input_ids), tokenizer, prompt)

    @property
    def allows_tools(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.request.tools) and self.request.tool_choice != "none"

    @property
    def labels(self) -> dict[str, Any]:
        """The fields of a note about it that name its origin."""
        return {"model": self.request.model, "tags": list(self.tags)}


class TurnRecorder:
    """Writes turns and notes. A write that has started is completed, even if its caller is cancelled."""

    def __init__(self, queue: RolloutQueue, metrics: EndpointMetrics, on_ended: Callable[[AttemptId], None]) -> None:
        """on_ended: called with an attempt that turns out to have ended."""
        self._queue = queue
        self._metrics = metrics
        self._on_ended = on_ended
        self._writes: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Wait until all is written."""
        while self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)

    async def record_turn(self, call: ModelCall, completion: Completion, began: float) -> None:
        """Write a turn, and return once that is acknowledged. began: time at which its sampling began."""
        turn = Turn(
            call.prompt.input_ids,
            completion,
            0,
            call.request.model,
            call.tags,
            anchor=call.anchor,
            observed=call.prompt.observed,
            opened=len(call.prompt.prefill_ids),
            grammar=call.sampling.grammar,
            images=call.prompt.images,
        )
        attempt_id = call.session.attempt_id
        await self._write(attempt_id, self._queue.record_turn(attempt_id, turn, began))
        counts = self._metrics.counts
        counts["turns"] += 1
        counts[f"turns_{call.prompt.how}"] += 1
        counts["tokens_rerendered"] += call.prompt.changed
        counts["prompt_tokens"] += len(call.prompt.input_ids)
        counts["completion_tokens"] += len(completion.ids)
        counts["turns_aborted"] += completion.finish_reason == "abort"

    async def note(self, attempt_id: AttemptId, name: str, data: Mapping[str, Any]) -> None:
        """Write a note about a call that became no turn."""
        await self._write(attempt_id, self._queue.record_note(attempt_id, name, data))

    def note_later(self, attempt_id: AttemptId, name: str, data: Mapping[str, Any]) -> None:
        """Write a note about a cancelled call. Returns at once."""
        self._start_write(_log_errors(attempt_id, self.note(attempt_id, name, data)))

    def record_aborted(
        self, call: ModelCall, chunks: Sequence[CompletionChunk], tokenizer: Tokenizer, began: float
    ) -> None:
        """Write the tokens that were sampled before a call was cancelled. Returns at once."""
        attempt_id = call.session.attempt_id
        if not any(len(chunk.ids) for chunk in chunks):
            self._metrics.counts["aborted_unsampled"] += 1
            self.note_later(attempt_id, "aborted", {"prompt_tokens": len(call.prompt.input_ids), **call.labels})
            return

        async def record() -> None:
            ids, logp, version = (
                np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("ids", "logp", "version")
            )
            support = Support.concat([chunk.support or len(chunk.ids) for chunk in chunks])
            alternatives: dict[str, Any] = {
                name: np.concatenate([getattr(chunk, name) for chunk in chunks if len(chunk.ids)])
                for name in ("alternative_ids", "alternative_logp")
                if all(getattr(chunk, name) is not None for chunk in chunks if len(chunk.ids))
            }
            completion = Completion(ids, logp, version, "abort", tokenizer.decode(ids), support=support, **alternatives)
            await self.record_turn(call, completion, began)

        self._start_write(_log_errors(attempt_id, record()))

    async def _write(self, attempt_id: AttemptId, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.shield(self._start_write(work))
        except (IllegalTransitionError, NotFoundError) as error:
            self._on_ended(attempt_id)
            raise attempt_over_error(attempt_id) from error

    def _start_write(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task


async def _log_errors(attempt_id: AttemptId, work: Coroutine[Any, Any, object]) -> None:
    """Wait for a write for which no caller waits."""
    try:
        await work
    except APIError as refusal:
        get_logger("agents").debug(f"An aborted call of {attempt_id} came too late: {refusal}")
    except Exception as error:
        get_logger("agents").warning(f"An aborted call of {attempt_id} could not be recorded: {error}")


def attempt_over_error(attempt_id: AttemptId) -> APIError:
    """Return the refusal of a call whose attempt has ended."""
    return APIError(
        f"Attempt {attempt_id.attempt} at rollout {attempt_id.rollout} is over, and its key is no longer valid.",
        "forbidden",
        code="attempt_over",
    )
