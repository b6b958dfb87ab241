"""The memory of an attempt's session at the endpoint, and the threads that render its conversations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest

from etude.agents.proxy import session as session_module
from etude.agents.proxy.request import ModelRequest, count_characters
from etude.agents.proxy.session import BoundedCache
from etude.chat import answer_index
from etude.records import Completion, Message, ToolCall
from etude.store.queue.rollout_queue import AttemptId
from tests.agents.proxy.world import Scripted, World, chat_of, serving
from tests.agents.sdks import openai
from tests.chat.conversations import WEATHER


class Counted(ThreadPoolExecutor):
    """A thread pool that counts its tasks."""

    count = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.count += 1
        return super().submit(fn, *args, **kwargs)


def make_session(threads: ThreadPoolExecutor | None = None) -> session_module.AttemptSession:
    return session_module.AttemptSession(AttemptId(0, 0), "train", chat_of(), threads=threads)


def request(*messages: Message, **more: Any) -> ModelRequest:
    return ModelRequest(model="policy", messages=messages, **more)


def completion(text: str = "Yes.<|im_end|>") -> Completion:
    ids = chat_of().tokenizer.encode(text)
    return Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), "stop", text)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    chat = chat_of()
    with serving(Scripted(chat.tokenizer, lambda _: "Yes.<|im_end|>"), chat, context=400) as world:
        yield world


# -- which thread renders a conversation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "beside"),
    [
        (request(Message("user", "a")), 0),
        (request(*[Message("user" if n % 2 == 0 else "assistant", "") for n in range(40)]), 2),
        (request(Message("user", "a"), tools=(WEATHER,) * 12), 2),
        (request(Message("user", "a" * 3000)), 2),
    ],
)
def test_a_long_conversation_is_rendered_on_a_thread(call: ModelRequest, beside: int) -> None:
    """The number of messages and tools counts as well, however short they are."""
    with Counted(1) as threads:
        attempt = make_session(threads)

        async def called() -> None:
            prompt = await attempt.build_prompt(call, count_rerendered=True)
            await attempt.remember_answer(call, prompt, completion(), Message("assistant", "Yes."))

        asyncio.run(called())
        assert threads.count == beside


def test_a_cancelled_call_holds_its_conversation_until_the_thread_is_done() -> None:
    """Otherwise the attempt's next call would change the conversation at the same time."""
    free = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(free.wait, 10)
        attempt, long = make_session(threads), request(Message("user", "a" * 3000))

        async def cancelled() -> None:
            task = asyncio.create_task(attempt.build_prompt(long, count_rerendered=True))
            await asyncio.sleep(0)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            free.set()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
def test_more_messages_than_a_context_can_hold_are_refused_before_rendering(world: World, path: str) -> None:
    claim = world.attempt()
    body = {"model": "policy", "max_tokens": 3, "messages": [{"role": "user", "content": ""}] * 101}
    headers = {"authorization": f"Bearer {claim.model_key}"}
    refused = httpx2.post(f"{world.url}/{path}", headers=headers, json=body)
    assert refused.status_code == 400 and "in 101 messages; this model's maximum context length is 400" in refused.text


def test_the_size_of_a_message_counts_all_its_parts() -> None:
    call = ToolCall("c", "weather", "x" * 500)
    empty, calling = Message("assistant", ""), Message("assistant", "", tool_calls=(call,))
    assert count_characters([empty] * 30) > 1000
    assert count_characters([calling]) >= 500 + count_characters([empty])
    thinking = Message("assistant", "b" * 7, reasoning="a" * 100)
    assert request(thinking).characters == count_characters([thinking]) == 107 + count_characters([empty])


# -- limits of memory --------------------------------------------------------------------------------------------------


def test_stored_answers_are_bounded_also_by_the_arguments_of_their_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "MAX_ANSWER_CHARACTERS", 1000)
    attempt, call = make_session(), ToolCall("c", "weather", "x" * 600)
    for name in ("first", "second"):
        attempt.store_conversation(name, (Message("assistant", "", tool_calls=(call,)),))
    assert attempt.find_answer("first") is None and attempt.find_answer("second") is not None


def test_an_attempt_keeps_only_the_newest_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (session_module, "MAX_ANSWERS", 3),
        (session_module, "MAX_KNOWN_PREFIXES", 3),
        (session_module, "MAX_COUNTED_PROMPTS", 3),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(answer_index, "MAX_ANSWERS", 3)
    attempt, calls = make_session(), [request(Message("user", str(n))) for n in range(5)]
    texts = [ModelRequest(model="policy", prompt=f"{n}: ") for n in range(5)]

    async def played() -> list[str]:
        for n, call in enumerate((*calls, *texts)):
            prompt = await attempt.build_prompt(call, count_rerendered=True)
            assert attempt.count_occurrence(prompt) == 0
            await attempt.remember_answer(call, prompt, completion(f"{n}!<|im_end|>"), Message("assistant", f"{n}!"))
        goes_on = [(*calls[n].messages, Message("assistant", f"{n}!"), Message("user", "So?")) for n in range(5)]
        return [(await attempt.build_prompt(request(*messages), count_rerendered=False)).how for messages in goes_on]

    assert asyncio.run(played()) == ["begun"] * 2 + ["branched"] * 3, "the texts came last: only their ids are known"
    caches = (attempt._known_prefixes, attempt._texts, attempt._prompt_counts, attempt._conversation._answers)
    assert [len(cache) for cache in caches] == [3, 3, 3, 3]


def test_a_conversation_is_bounded_by_its_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_index, "MAX_IDS", 100)
    chat = chat_of()
    conversation, answer = chat.start_conversation(), completion()
    for n in range(6):
        messages = [Message("user", f"{n} " + "b" * (200 if n == 5 else 10))]
        conversation.remember_answer(
            messages, [], conversation.render(messages).ids, answer.ids, Message("assistant", "Yes.")
        )
        assert len(conversation._answers) == 1 or conversation._answers._num_ids <= 100
    assert len(conversation._answers) == 1, "the newest is kept, however long it is"


def test_a_lookup_compares_only_with_answers_to_the_same_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(answer_index, "is_same_message", lambda one, other: compared.append(one) or one == other)
    chat, conversation, answer = chat_of(), chat_of().start_conversation(), completion()
    for n in range(200):
        messages = [Message("user", str(n))]
        conversation.remember_answer(messages, [], chat.render(messages).ids, answer.ids, Message("assistant", f"{n}!"))
    compared.clear()
    more = [Message("user", "150"), Message("assistant", "150!"), Message("user", "So?")]
    assert conversation.render(more).ids.tolist()[: len(answer.ids)] and len(compared) < 10


def test_recent_entries() -> None:
    recent: BoundedCache[str, int] = BoundedCache(3, 10)
    for name, weight in (("a", 1), ("b", 1), ("a", 9)):
        recent.put(name, weight, weight)
    assert list(recent) == ["b", "a"] and recent.values() == [1, 9]
    recent.put("c", 3, 3)
    assert list(recent) == ["c"] and recent.get("a") is None
    recent.put("d", 50, 50)
    assert list(recent) == ["d"], "the newest is kept, of any size"


def test_the_id_of_an_answer_is_never_used_again(world: World) -> None:
    """Not even after an attempt was forgotten. Otherwise a client could continue another attempt's conversation."""
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        first = client.responses.create(model="policy", input="a")
        world.loop.call_soon_threadsafe(world.endpoint.forget, claim.attempt_id)
        second = client.responses.create(model="policy", input="b")
        assert first.id != second.id
        with pytest.raises(openai.NotFoundError, match="no answer"):
            client.responses.create(model="policy", input="c", previous_response_id=first.id)
    with serving(Scripted(chat_of().tokenizer, lambda _: "No.<|im_end|>"), chat_of()) as other:
        claim = other.attempt()
        with openai.OpenAI(base_url=other.url, api_key=claim.model_key) as client:
            names = {client.responses.create(model="policy", input="a").id for _ in range(3)}
    assert len(names) == 3 and not names & {first.id, second.id}, "nor by a process that comes after"
