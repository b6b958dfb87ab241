"""Answers that continue: from words that the agent gives, from an answer that was cut off, by the ids of items, and
with thinking that came back changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import numpy as np
import pytest

from etude.agents.proxy import session as session_module
from etude.chat import ChatRenderer
from etude.records import Message, SamplingParams, Turn
from etude.store.queue.rollout_queue import AttemptId, RolloutPurpose
from tests.agents.proxy.test_exact import CLAUDE, FLAT
from tests.agents.proxy.world import Scripted, World, chat_of, serving
from tests.agents.sdks import anthropic, openai
from tests.chat.conversations import WEATHER
from tests.sweeps import later, sweep

ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
SAID = "<think>\n I must\nlook. \n</think>\n\nIt is raining, 🌧 and the sky is grey.<|im_end|>"


def rest_of(prompt: str) -> str:
    """Return the part of the answer that the prompt does not have yet."""
    prefix = prompt.rpartition("<|im_start|>assistant\n")[2]
    if prefix.endswith("�"):  # cut within a character
        return SAID.partition("🌧")[2]
    if prefix and not prefix.startswith("<think>"):
        prefix = SAID[: SAID.index("It is")] + prefix
    return SAID.removeprefix(prefix) if SAID.startswith(prefix) else "Yes.<|im_end|>"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    chat = chat_of("qwen3")
    with serving(Scripted(chat.tokenizer, rest_of), chat, train=SamplingParams(max_tokens=300)) as world:
        yield world


def goes_on(turns: Sequence[Turn]) -> list[bool]:
    """Return whether each turn begins with all of the one before."""
    wholes = [np.concatenate([turn.prompt, turn.completion.ids]) for turn in turns]
    return [
        np.array_equal(turn.prompt[: len(whole)], whole) for whole, turn in zip(wholes[:-1], turns[1:], strict=True)
    ]


def branches(world: World) -> float:
    return world.endpoint.metrics().get("endpoint/turns_branched", 0.0)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_continues_the_words_that_an_agent_gives(world: World, streamed: bool) -> None:
    claim, before = world.attempt(), branches(world)
    prefill = {"role": "assistant", "content": "It is rain"}
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
        request: dict[str, Any] = {"model": "policy", "max_tokens": 300, "messages": [*ASK, prefill]}
        if streamed:
            with client.messages.stream(**request) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**request)
        (block,) = answer.content
        assert block.type == "text" and block.text == "ing, 🌧 and the sky is grey."
        whole = {"role": "assistant", "content": "It is rain" + block.text}
        client.messages.create(**request | {"messages": [*ASK, whole, {"role": "user", "content": "So?"}]})
    turns = world.turns(claim.attempt_id)
    shown = world.endpoint.chat.tokenizer.decode(turns[0].prompt, keep_special_tokens=True)
    assert shown.endswith("<|im_start|>assistant\nIt is rain"), "and no reasoning is added"
    assert goes_on(turns) == [True] and branches(world) == before


@pytest.mark.parametrize("streamed", later([False, True]))
@sweep("most", [4, 10, 18, 32, 36, 37, 38, 50])
def test_an_answer_that_was_cut_off_continues_with_its_exact_ids(world: World, most: int, streamed: bool) -> None:
    """The cut may be within the thinking, the text, or a character."""
    claim, before = world.attempt(), branches(world)
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
        first = client.messages.create(model="policy", max_tokens=most, messages=ASK)
        assert first.stop_reason == "max_tokens"
        prefill = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
        request: dict[str, Any] = {"model": "policy", "max_tokens": 300, "messages": [*ASK, prefill]}
        if streamed:
            with client.messages.stream(**request) as stream:
                second = stream.get_final_message()
        else:
            second = client.messages.create(**request)
    turns = world.turns(claim.attempt_id)
    assert goes_on(turns) == [True] and branches(world) == before
    assert np.array_equal(turns[1].prompt, np.concatenate([turns[0].prompt, turns[0].completion.ids]))
    texts = [block.text for message in (first, second) for block in message.content if block.type == "text"]
    text = "It is raining, 🌧 and the sky is grey."
    assert "".join(texts) == text or ("�" in texts[0] and texts[1] in text)


def test_an_answer_that_had_ended_continues_without_its_end(world: World) -> None:
    claim = world.attempt()
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
        request: dict[str, Any] = {"model": "policy", "max_tokens": 300}
        first = client.messages.create(**request, messages=ASK)
        prefill = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
        client.messages.create(**request, messages=[*ASK, prefill])
    one, other = world.turns(claim.attempt_id)
    assert np.array_equal(other.prompt, np.concatenate([one.prompt, one.completion.ids[:-1]]))


def test_chat_completions_may_go_on_from_a_message(world: World) -> None:
    claim = world.attempt()
    prefill = {"role": "assistant", "content": "It is "}
    request: dict[str, Any] = {"model": "policy", "messages": [*ASK, prefill], "tools": [WEATHER]}
    more = {"continue_final_message": True, "add_generation_prompt": False}
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        message = client.chat.completions.create(**request, extra_body=more).choices[0].message
        assert message.content == "raining, 🌧 and the sky is grey."
        with pytest.raises(openai.BadRequestError, match="cannot require a call"):
            client.chat.completions.create(**request, extra_body=more, tool_choice="required")
        client.chat.completions.create(**request)
    decode = world.endpoint.chat.tokenizer.decode
    assert decode(world.turns(claim.attempt_id)[-1].prompt, keep_special_tokens=True).endswith("assistant\n"), (
        "another answer, as before"
    )


def test_an_assistant_message_by_the_agent_begins_a_conversation(world: World) -> None:
    claim, before = world.attempt(), branches(world)
    greeting = [{"role": "assistant", "content": "Hello! What can I do?"}]
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:

        def ask(messages: list[Any]) -> dict[str, Any]:
            answer = client.chat.completions.create(model="policy", messages=messages)
            return answer.choices[0].message.model_dump(exclude_none=True)

        first = ask([*greeting, *ASK])
        ask([*greeting, {"role": "user", "content": "Another question."}])
        assert branches(world) == before
        ask([*greeting, *ASK, first, *ASK])
        assert branches(world) == before
        ask([*greeting, *ASK, {"role": "assistant", "content": "Other words."}, *ASK])
        assert branches(world) == before + 1, "the model had answered there"
        ask([{"role": "user", "content": "?"}, first, *ASK])
        assert branches(world) == before + 2, "and this is its answer to another question"


THINKING: dict[str, Any] = {"type": "thinking", "thinking": "I must\nlook. "}


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_is_signed(world: World, streamed: bool) -> None:
    claim, before = world.attempt(), branches(world)
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
        request: dict[str, Any] = {"model": "policy", "max_tokens": 300, "messages": ASK}
        if streamed:
            with client.messages.stream(**request) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**request)
        thinking, text = (block.model_dump() for block in answer.content)
        assert len(thinking["signature"]) > 20 and thinking["thinking"] == " I must\nlook. "
        for changed in (thinking, thinking | {"signature": ""}, thinking | {"thinking": "I must act."}):
            messages = [*ASK, {"role": "assistant", "content": [changed, text]}, *ASK]
            response = client.messages.with_raw_response.create(**request | {"messages": messages})
            assert ("x-etude-ignored" in response.headers) == (changed != thinking)
    turns = world.turns(claim.attempt_id)
    assert [goes_on([turns[0], turn]) for turn in turns[1:]] == [[True]] * 3 and branches(world) == before
    decode = world.endpoint.chat.tokenizer.decode
    assert "I must act" not in decode(turns[-1].prompt)


@pytest.mark.parametrize("back", [" I must\nlook. ", "", "look. ", "I must\nlook.", "I must look."])
def test_thinking_may_come_back_whole_cut_or_stripped(world: World, back: str) -> None:
    claim, before = world.attempt(), branches(world)
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        answer = client.chat.completions.create(model="policy", messages=ASK).choices[0].message
        sent: Any = {"role": "assistant", "content": answer.content, "reasoning_content": back}
        client.chat.completions.create(model="policy", messages=[*ASK, sent, *ASK])
    assert goes_on(world.turns(claim.attempt_id)) == [True] and branches(world) == before


CALL = (
    '<think>\nI look.\n</think>\n\nWait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
)


@pytest.mark.parametrize("streamed", [False, True])
def test_items_may_be_sent_by_their_ids_alone(streamed: bool) -> None:
    """The second step of Vercel's AI SDK sends only their ids by default."""
    chat = chat_of("qwen3")
    upstream = Scripted(chat.tokenizer, lambda prompt: ("Rain." if "rain" in prompt else CALL) + "<|im_end|>")
    with serving(upstream, chat, train=SamplingParams(max_tokens=300)) as world:
        claim, other = world.attempt(), world.attempt()
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
            request: dict[str, Any] = {"model": "policy", "input": ASK, "tools": [FLAT]}
            if streamed:
                with client.responses.stream(**request) as stream:
                    answer = stream.get_final_response()
            else:
                answer = client.responses.create(**request)
            assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
            names: list[Any] = [{"type": "item_reference", "id": item.id} for item in answer.output]
            call = json.loads(answer.output[-1].model_dump_json())["call_id"]
            result = {"type": "function_call_output", "call_id": call, "output": "rain"}
            last = client.responses.create(**request | {"input": [*ASK, *names, result]})
            assert last.output_text == "Rain." and goes_on(world.turns(claim.attempt_id)) == [True]
            for id in ("msg_resp_0-0-99", "rs_none", f"fc_{answer.id}_call7", f"{answer.id}_call" + "9" * 5000):
                with pytest.raises(openai.NotFoundError, match="has no item"):
                    client.responses.create(**request | {"input": [*ASK, {"type": "item_reference", "id": id}]})
        response = httpx2.post(
            f"{world.url}/responses",
            json=request | {"input": [*ASK, *names]},
            headers={"authorization": f"Bearer {other.model_key}"},
        )
        assert response.status_code == 404, "another attempt's"


def test_answers_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_ANSWERS", 3)
    monkeypatch.setattr(session_module, "MAX_ANSWER_CHARACTERS", 600)
    use: RolloutPurpose = "train"
    session = session_module.AttemptSession(AttemptId(0, 0), use, chat_of())
    for n in range(5):
        session.store_conversation(str(n), (Message("assistant", str(n)),))
    assert [session.find_answer(str(n)) is not None for n in range(5)] == [False, False, True, True, True]
    session.store_conversation("long", (Message("user", "a" * 600), Message("assistant", "long")))
    assert session.find_answer("4") is None and session.find_answer("long") == Message("assistant", "long")
    session.store_conversation("5", (Message("assistant", "5"),))
    assert session.find_answer("long") is None and session.find_conversation("5") == (Message("assistant", "5"),)


@pytest.mark.parametrize("thinks", [None, True, False])
def test_a_required_call_adds_no_reasoning(thinks: bool | None) -> None:
    variables = {} if thinks is None else {"enable_thinking": thinks}
    chat = ChatRenderer(chat_of("qwen3").tokenizer, template_kwargs=variables)
    upstream = Scripted(chat.tokenizer, lambda _: '{"city": "Bern"}}\n</tool_call><|im_end|>')
    with serving(upstream, chat, train=SamplingParams(max_tokens=100)) as world:
        claim = world.attempt()
        with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
            request: dict[str, Any] = {"model": "policy", "max_tokens": 99, "messages": ASK, "tools": [CLAUDE]}
            answer = client.messages.create(**request, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        (block,) = answer.content
        assert block.type == "tool_use" and block.input == {"city": "Bern"}
        shown = chat.tokenizer.decode(world.turns(claim.attempt_id)[0].prompt, keep_special_tokens=True)
    prefix = shown.rpartition("<|im_start|>assistant\n")[2]
    empty = "<think>\n\n</think>\n\n" if thinks is False else ""  # as the template writes it
    assert prefix == empty + '<tool_call>\n{"name": "weather", "arguments": '
