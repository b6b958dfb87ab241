"""A model endpoint on a real socket: a rollout queue, attempts with keys, and an upstream."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import uvicorn

from etude.agents.proxy import ModelEndpoint, Upstream
from etude.agents.proxy.app import create_app
from etude.chat import ChatRenderer, Tokenizer
from etude.chat.tokenizer import Ids
from etude.errors import ConfigError
from etude.images import PromptImages
from etude.records import Completion, SamplingParams, Task, Turn
from etude.rollout.request import Delta
from etude.running_time import EventLoop
from etude.store.journal.journal import Journal
from etude.store.journal.memory import MemoryJournal
from etude.store.queue.keys import Keyring
from etude.store.queue.local_queue import LocalRolloutQueue
from etude.store.queue.rollout_queue import AttemptId, Claim, RolloutLimits, RolloutPurpose, RolloutRequest
from tests.chat.made import byte_level, ends_of, published, save

T = TypeVar("T")
END = "<|im_end|>"


@cache
def chat_of(name: str = "qwen3", history: str = "served") -> ChatRenderer:
    """Build a renderer with a published template and a small tokenizer."""
    template, ends = published()[name], ends_of(name)
    with TemporaryDirectory(prefix="etude-chat-") as directory:
        tokenizer = Tokenizer.load(save(Path(directory), byte_level(template, ends), template, ends))
    return ChatRenderer(tokenizer, "template" if history == "template" else "served")


class Scripted:
    """An upstream that answers from a script, character by character: tokens that no tokenizer would choose.

    It gives answers that no small model gives. `says` is called with the text of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, says: Callable[[str], str], *, pause: float = 0.0) -> None:
        self._tokenizer, self._script, self._pause = tokenizer, says, pause
        self.asked: list[SamplingParams] = []
        self.shown: list[PromptImages | None] = []
        """The images of each prompt."""
        self.streamed = 0
        """How many tokens were given out one by one."""

    def _completion(self, prompt: Ids, sampling: SamplingParams) -> Completion:
        self.asked.append(sampling)
        text, ends = self._script(self._tokenizer.decode(prompt, keep_special_tokens=True)), self._tokenizer.eos_tokens
        ids: list[int] = []
        finish = "length"
        while text and len(ids) < sampling.max_tokens:
            special = next((piece for piece in (*ends, *_markup(self._tokenizer)) if text.startswith(piece)), text[0])
            text = text[len(special) :]
            ids += self._tokenizer.encode(special).tolist()
            text_so_far = self._tokenizer.decode(ids)
            if special in ends or any(stop in text_so_far for stop in sampling.stop):
                finish = "stop"
                break
        text_so_far = min(
            (text_so_far[: text_so_far.index(stop)] for stop in sampling.stop if stop in text_so_far),
            key=len,
            default=text_so_far,
        )
        count = len(ids)
        top = np.tile(np.arange(sampling.top_logprobs, dtype=np.int32), (count, 1)) if sampling.top_logprobs else None
        return Completion(
            ids=np.array(ids, np.int32),
            logp=np.linspace(-1, -0.5, count, dtype=np.float32),
            version=np.full(count, 7, np.int32),
            finish_reason=finish,
            text=text_so_far,
            top_ids=top,
            top_logp=None if top is None else -1 - top.astype(np.float32),
        )

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        """Return the whole answer."""
        self.shown.append(images)
        await asyncio.sleep(self._pause)
        return self._completion(prompt, sampling)

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Yield the answer token by token."""
        self.shown.append(images)
        whole = self._completion(prompt, sampling)
        for n in range(len(whole.ids)):
            await asyncio.sleep(self._pause)
            self.streamed += 1
            last = n == len(whole.ids) - 1
            columns = whole.ids[n : n + 1], whole.logp[n : n + 1], whole.version[n : n + 1]
            yield Delta(*columns, "", whole.finish_reason if last else None, whole if last else None)


def _markup(tokenizer: Tokenizer) -> Sequence[str]:
    names = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    return [name for name in names if tokenizer.token_to_id(name) is not None]


@dataclass
class World:
    """The endpoint as tests use it."""

    root: str
    endpoint: ModelEndpoint
    queue: LocalRolloutQueue
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.root}/v1"

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the endpoint's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def attempt(self, use: RolloutPurpose = "train") -> Claim:
        """Enqueue a rollout and claim it: a new attempt that runs."""

        async def claimed() -> Claim:
            (id,) = await self.queue.enqueue(
                [RolloutRequest(Task(self._next(), {}), use=use, limits=RolloutLimits(max_attempts=1))]
            )
            (claim,) = await self.queue.claim("tests", 1, 5)
            assert claim.attempt_id.rollout == id
            return claim

        return self.do(claimed())

    def turns(self, attempt_id: AttemptId) -> list[Turn]:
        """Return the recorded turns of an attempt."""
        return self.do(self.queue.turns(*attempt_id))

    def notes(self, attempt_id: AttemptId) -> list[dict[str, Any]]:
        """Return the recorded notes of an attempt."""
        return self.do(self.queue.notes(*attempt_id))

    def _next(self) -> int:
        self._count = getattr(self, "_count", -1) + 1
        return self._count


@contextmanager
def serving(
    upstream: Upstream,
    chat: ChatRenderer,
    *,
    held: int | None = None,
    journal: Journal | None = None,
    **options: Any,
) -> Iterator[World]:
    """Serve on loopback during the block. held: the size of the send buffer for a client that does not read."""
    keyring = Keyring("a-secret-of-tests-alone")
    queue = LocalRolloutQueue(journal or MemoryJournal(), keyring)
    try:
        endpoint = ModelEndpoint(queue, keyring, chat, upstream, **options)
    except ConfigError:
        asyncio.run(queue.close())
        raise
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if held is not None:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, held)
        server = uvicorn.Server(uvicorn.Config(create_app(endpoint), log_level="warning", timeout_graceful_shutdown=5))
        loop = EventLoop()
        began = threading.Event()

        async def serve() -> None:
            loop.call_later(0.01, began.set)
            await server.serve(sockets=[listening])
            await queue.close()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        began.wait(10)
        try:
            yield World(f"http://127.0.0.1:{listening.getsockname()[1]}", endpoint, queue, loop)
        finally:
            server.should_exit = True
            thread.join(20)
            loop.close()
