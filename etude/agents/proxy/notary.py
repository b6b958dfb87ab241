"""Writes down what the model was shown and what it said, at the desk, once for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from etude.agents.proxy.asked import Asked, Dialect, Refusal, Reply
from etude.agents.proxy.meter import Meter
from etude.agents.proxy.record import Prompt, Sitting
from etude.agents.proxy.upstream import Gained
from etude.chat import Chat
from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import IllegalMoveError, UnknownError
from etude.observe import get_log
from etude.records import Completion, SamplingParams, Turn
from etude.store.desk import Desk, Key

__all__ = ["Call", "Notary", "over"]

T = TypeVar("T")


@dataclass(eq=False)
class Call:
    """One call, once it is known what it asks for."""

    id: str
    dialect: Dialect
    asked: Asked
    sitting: Sitting
    prompt: Prompt
    sampling: SamplingParams
    ignored: tuple[str, ...]
    """The fields of the request that the answer does not follow."""
    tags: tuple[str, ...]
    began: float
    anchor: int
    """Names the state that it was made in, for credit that compares what was done in the same state."""
    shown: Ids = field(init=False)
    """All that the model is shown."""

    def __post_init__(self) -> None:
        self.shown = self.prompt.shown

    def reply(self, tokenizer: Tokenizer) -> Reply:
        """What its answers have in common."""
        return Reply(self.id, self.asked, len(self.shown), tokenizer)

    @property
    def calls(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.asked.tools) and self.asked.choice != "none"


class Seated(Protocol):
    """What somebody asked who sits at the endpoint."""

    @property
    def sitting(self) -> Sitting:
        """Whose attempt it is of."""
        ...


class Notary:
    """Writes turns and notes. What it has begun to write it writes to the end, whoever stops waiting for it."""

    def __init__(self, desk: Desk, model: str, meter: Meter, ended: Callable[[Key], None]) -> None:
        """ended: is told of an attempt that turns out to be over."""
        self._desk, self._model, self._meter, self._ended = desk, model, meter, ended
        self._writing: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Wait until all is written."""
        while self._writing:
            await asyncio.gather(*self._writing, return_exceptions=True)

    async def turn(self, call: Call, completion: Completion) -> int:
        """Write a turn; its index. Returns once it is acknowledged."""
        turn = Turn(
            call.shown,
            completion,
            0,
            self._model,
            call.tags,
            anchor=call.anchor,
            observed=call.prompt.observed,
            opened=len(call.prompt.opened),
        )
        index = await self._written(call, self._desk.turn(call.sitting.key, turn))
        counts = self._meter.counts
        counts["turns"] += 1
        counts[f"turns_{call.prompt.how}"] += 1
        counts["tokens_rerendered"] += call.prompt.changed
        counts["prompt_tokens"] += len(call.shown)
        counts["completion_tokens"] += len(completion.ids)
        counts["turns_aborted"] += completion.finish == "abort"
        return index

    async def note(self, call: Call, name: str, told: Mapping[str, Any]) -> None:
        """Write a note about a call that became no turn."""
        told = {**told, "model": self._model, "tags": list(call.tags)}
        await self._written(call, self._desk.note(call.sitting.key, name, told))

    def aborted(self, call: Call, gained: Sequence[Gained], chat: Chat) -> None:
        """Write down what was sampled of an answer that nobody waits for any more; returns at once."""
        self._begun(self._abort(call, gained, chat))

    async def _abort(self, call: Call, gained: Sequence[Gained], chat: Chat) -> None:
        try:
            if not any(len(each.ids) for each in gained):
                self._meter.counts["aborted_unsampled"] += 1
                await self.note(call, "aborted", {"prompt_tokens": len(call.shown)})
                return
            ids, logp, version = (
                np.concatenate([getattr(each, name) for each in gained]) for name in ("ids", "logp", "version")
            )
            await self.turn(call, Completion(ids, logp, version, "abort", chat.tokenizer.decode(ids)))
        except Refusal as refusal:
            get_log("agents").debug(f"An aborted turn of {call.sitting.key} came too late: {refusal}")
        except Exception as error:  # nobody is there to be told
            get_log("agents").warning(f"An aborted turn of {call.sitting.key} could not be written: {error}")

    async def external(self, call: Seated, told: Mapping[str, Any]) -> None:
        """Write down a call to a model of somebody else's."""
        await self._written(call, self._desk.note(call.sitting.key, "external", dict(told)))

    def external_later(self, call: Seated, told: Mapping[str, Any]) -> None:
        """The same where nobody waits for it any more; returns at once."""
        self._begun(self._unheard(call, told))

    async def _unheard(self, call: Seated, told: Mapping[str, Any]) -> None:
        try:
            await self._desk.note(call.sitting.key, "external", dict(told))
        except Exception as error:  # nobody is there to be told
            get_log("agents").debug(f"A call of {call.sitting.key} to another model came too late to be kept: {error}")

    async def _written(self, call: Seated, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await asyncio.shield(self._begun(work))
        except (IllegalMoveError, UnknownError) as error:
            self._ended(call.sitting.key)
            raise over(call.sitting.key) from error

    def _begun(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task


def over(key: Key) -> Refusal:
    """The refusal of a call that came after its attempt's end."""
    return Refusal(
        f"Attempt {key.attempt} at rollout {key.rollout} is over, and its key opens nothing any more.",
        "forbidden",
        code="attempt_over",
    )
