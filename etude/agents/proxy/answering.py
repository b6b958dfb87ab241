"""How a call is answered: it gets its place, the upstream samples, the turn is written, and the answer is given.

Nothing of an answer's end is given before its turn is acknowledged. What ends otherwise leaves something too: a stream
that its client dropped, or that took too long, is an aborted turn with what was sampled; an engine that failed is a
note.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from etude.agents.proxy.asked import Body, Refusal, Said, Writer
from etude.agents.proxy.gate import Gate
from etude.agents.proxy.meter import Meter
from etude.agents.proxy.notary import Call, Notary
from etude.agents.proxy.policy import Seeds
from etude.agents.proxy.upstream import Gained, Upstream
from etude.chat import Called, Chat, Content, Piece, Reader, Reasoning
from etude.chat.streaming import Teller
from etude.errors import ConfigError, DataError, EngineError
from etude.observe import get_log
from etude.records import Completion, Message, SamplingParams

__all__ = ["Answering", "Write"]

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]


class Answering:
    """Answers calls. Any number may be under way; each may be cancelled at any await."""

    def __init__(
        self,
        chat: Chat,
        upstream: Upstream,
        gate: Gate,
        meter: Meter,
        notary: Notary,
        seeds: Seeds,
        *,
        timeout_s: float,
    ) -> None:
        self._chat, self._upstream, self._gate, self._meter = chat, upstream, gate, meter
        self._notary, self._seeds, self._timeout = notary, seeds, timeout_s

    async def whole(self, call: Call) -> Body:
        """The answers to a call in one piece."""
        async with self._under_way(call):
            began = time.perf_counter()
            async with self._gate.entered(call.asked.n) as places:
                said = await _all([self._answered(call, params) for params in self._params(call)], places)
            sampled = max(each.sampled for each in said) - began
        self._finished(call, said)
        body = call.dialect.whole(call.reply(self._chat.tokenizer), said)
        self._meter.took(time.perf_counter() - call.began, sampled)
        return body

    async def stream(self, call: Call, start: Callable[[], Awaitable[None]], write: Write) -> None:
        """Write the answers as they come. `start` is called before the first byte, once the call has its place: what
        goes wrong before is raised, what goes wrong later is written in the dialect's words."""
        writer = call.dialect.writer(call.reply(self._chat.tokenizer))
        started = False
        try:
            async with self._under_way(call):
                async with self._gate.entered(call.asked.n) as places:
                    await start()
                    started = True
                    await write(writer.begin())
                    params = self._params(call)
                    works = [self._streamed(call, writer, n, each, write) for n, each in enumerate(params)]
                    said = await _all(works, places)
                self._finished(call, said)
                self._meter.took(time.perf_counter() - call.began)
                await write(writer.close(said))
        except Refusal as refusal:
            if not started:
                raise
            await write(writer.failed(refusal))

    @asynccontextmanager
    async def _under_way(self, call: Call) -> AsyncIterator[None]:
        """A call within its time, and within that of its attempt."""
        task = asyncio.current_task()
        assert task is not None, "calls are answered on an event loop"
        self._meter.counts["calls"] += 1
        call.sitting.under_way.add(task)
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError as error:
            self._meter.counts["timed_out"] += 1
            told = f"The call took longer than {self._timeout:g} seconds, waiting for its turn included."
            raise Refusal(told, "timeout") from error
        finally:
            call.sitting.under_way.discard(task)

    def _params(self, call: Call) -> list[SamplingParams]:
        """The parameters of each answer. Where the agent's seed holds, its further answers count on from it."""
        sitting, prompt, own = call.sitting, call.prompt, call.sampling.seed
        if own is not None:
            seeds = [(own + n) % 2**63 for n in range(call.asked.n)]
        else:
            asked = range(call.asked.n)
            of = sitting.key.rollout, sitting.draw, prompt.hash
            seeds = [self._seeds(*of, sitting.occurrence(prompt)) for _ in asked]
        return [replace(call.sampling, seed=seed) for seed in seeds]

    async def _answered(self, call: Call, params: SamplingParams) -> Said:
        """One answer, recorded as soon as it is whole, whatever becomes of the call's others."""
        completion = await self._sampled(call, params)
        sampled = time.perf_counter()
        said = await self._heard(call, completion, self._reader(call)[0].whole(completion.ids))
        return replace(said, sampled=sampled)

    async def _sampled(self, call: Call, params: SamplingParams) -> Completion:
        try:
            return await self._upstream.generate(call.shown, params)
        except Exception as error:
            raise await self._failed(call, error) from error
        except BaseException:  # the client has gone, or time is up
            self._notary.aborted(call, (), self._chat)
            raise

    async def _streamed(self, call: Call, writer: Writer, index: int, params: SamplingParams, write: Write) -> Said:
        """One answer, written as it comes up to its end, then recorded, then ended."""
        (reader, told), rest_of = self._reader(call), _Rest(self._begun(call))
        rest_of.new(told)
        gained: list[Gained] = []
        completion = None
        try:
            async with aclosing(self._upstream.stream(call.shown, params)) as stream:
                async for each in stream:
                    gained.append(each)
                    completion = each.completion
                    if completion is None:
                        await _given(write, writer, index, rest_of.new(reader.push(each.ids)))
        except Exception as error:
            self._notary.aborted(call, gained, self._chat)
            raise await self._failed(call, error) from error
        except BaseException:  # the client has gone, or time is up
            self._notary.aborted(call, gained, self._chat)
            raise
        assert completion is not None, "a stream ends with the whole"
        rest = [*reader.push(gained[-1].ids), *reader.finish()]
        said = await self._heard(call, completion, reader.message)
        await _given(write, writer, index, rest_of.new(rest))
        await write(writer.end(index, said))
        return said

    def _reader(self, call: Call) -> tuple[Reader, list[Piece]]:
        """Tells what the model says, and has told how that begins."""
        if call.asked.prompt is not None:
            special = self._chat.tokenizer.special_ids
            return Reader(Teller(None), self._chat.tokenizer, lambda id: id not in special, call.sampling), []
        reader = self._chat.reader(call.prompt.ids, call.asked.tools, call.sampling, calls=call.calls)
        return reader, reader.begin(call.prompt.opened)

    def _begun(self, call: Call) -> Message:
        """The beginning of the answer that the agent gave, as it is read."""
        if call.asked.begun is None:
            return Message("assistant", "")
        reader, _ = self._reader(call)
        reader.finish()
        return reader.message

    async def _heard(self, call: Call, completion: Completion, message: Message) -> Said:
        """Write the turn of an answer down. An answer is given only once that is acknowledged."""
        turn = await self._notary.turn(call, completion)
        if completion.finish == "abort":
            raise Refusal("The engine gave this answer up. Try again.", "failed")
        stop = self._stop(completion, call.sampling)
        await call.sitting.heard(call.asked, call.prompt, completion, message, stop)
        return Said(_Rest(self._begun(call)).of(message), completion, len(call.shown), stop, turn)

    def _stop(self, completion: Completion, sampling: SamplingParams) -> str | None:
        """The stop string that an answer ended with: the first of those that end within its last token."""
        if not sampling.stop or completion.finish != "stop":
            return None
        decode = self._chat.tokenizer.decode
        text, before = decode(completion.ids), len(decode(completion.ids[:-1]).rstrip("\ufffd"))
        found = [(at, stop) for stop in sampling.stop if (at := text.find(stop, max(0, before - len(stop) + 1))) >= 0]
        return min(found)[1] if found else None

    async def _failed(self, call: Call, error: Exception) -> Refusal:
        """What the upstream says, as a refusal."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, DataError | ConfigError):
            return Refusal(str(error))
        self._meter.counts["upstream_failed"] += 1
        if not isinstance(error, EngineError):
            get_log("agents").error(f"Sampling failed: {error!r}")
        told = str(error) or repr(error)
        await self._notary.note(call, "upstream_failed", {"error": told})
        return Refusal(f"The model cannot answer now: {told}", "failed")

    def _finished(self, call: Call, said: Sequence[Said]) -> None:
        if call.asked.keep:
            call.sitting.keep(call.id, (*call.asked.messages[call.asked.lead :], said[0].message))
        self._meter.counts["answered"] += 1


class _Rest:
    """The part of an answer that is new to an agent that gave its beginning."""

    def __init__(self, begun: Message) -> None:
        known = {Content: str(begun.content), Reasoning: begun.reasoning}
        self._known = {kind: text.rstrip("\ufffd") for kind, text in known.items()}  # it may end within a character

    def of(self, message: Message) -> Message:
        """The rest of a whole answer."""
        content = str(message.content).removeprefix(self._known[Content])
        return replace(message, content=content, reasoning=message.reasoning.removeprefix(self._known[Reasoning]))

    def new(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The rest of an answer that comes piece by piece."""
        return [new for piece in pieces if isinstance(new := self._new(piece), Called) or new.text]

    def _new(self, piece: Piece) -> Piece:
        if isinstance(piece, Called):
            return piece
        known = self._known[type(piece)]
        self._known[type(piece)] = known[len(piece.text) :] if known.startswith(piece.text) else ""
        return replace(piece, text="" if known.startswith(piece.text) else piece.text.removeprefix(known))


async def _given(write: Write, writer: Writer, index: int, pieces: Sequence[Piece]) -> None:
    if pieces:
        await write(b"".join(writer.piece(index, piece) for piece in pieces))


async def _all(works: Sequence[Coroutine[Any, Any, T]], places: int) -> list[T]:
    """What some coroutines return, of which so many are under way at once. Where one fails, the others are cancelled,
    and have ended."""
    if len(works) == 1:
        return [await works[0]]
    room = asyncio.Semaphore(places)

    async def placed(work: Coroutine[Any, Any, T]) -> T:
        try:
            async with room:
                return await work
        finally:
            work.close()  # one that never had its turn

    tasks = [asyncio.ensure_future(placed(work)) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
