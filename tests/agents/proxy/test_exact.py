"""The messages that agents send back continue, token for token, the turns they were served. This holds for every
dialect, streamed or not.

The upstream writes character by character, and Qwen3's template drops earlier thinking: no conversation that is
rendered anew has the tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from etude.data.samples import build_samples
from etude.records import SamplingParams, Turn
from tests.agents.proxy.world import Scripted, World, chat_of, serving
from tests.agents.sdks import anthropic, openai
from tests.chat.conversations import WEATHER

CALL = (
    "<think>\nI must look. \n</think>\n\nLet me look.\n\n"
    '<tool_call>\n{{"name": "weather", "arguments": {{"city":  "{}"}}}}\n</tool_call>'
)
SCRIPT = [CALL.format("Bern"), CALL.format("Zürich"), "<think>\nWell.\n</think>\n\nRain 🌧, in both. ", "Bye."]
FLAT = {"type": "function", **WEATHER["function"]}
CLAUDE = {
    "name": "weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    chat = chat_of("qwen3")
    upstream = Scripted(
        chat.tokenizer, lambda prompt: SCRIPT[min(prompt.count("<|im_start|>assistant") - 1, 3)] + "<|im_end|>"
    )
    with serving(upstream, chat, train=SamplingParams(max_tokens=400)) as world:
        yield world


def assert_exact(world: World, turns: list[Turn]) -> None:
    """Assert that every turn begins with all of the one before."""
    assert len(turns) == 4
    for before, after in pairwise(turns):
        whole = np.concatenate([before.prompt, before.completion.ids])
        assert len(after.prompt) > len(whole)
        assert np.array_equal(after.prompt[: len(whole)], whole)
        assert after.observed == len(after.prompt) - len(whole), "what it was shown since"
    assert turns[0].observed in (0, None)


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_completions(world: World, streamed: bool) -> None:
    claim, before = world.attempt(), dict(world.endpoint.metrics())
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Weather?"}]
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        for n in range(4):
            request: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [WEATHER]}
            if streamed:
                with client.chat.completions.stream(**request) as stream:
                    answer = stream.get_final_completion().choices[0]
            else:
                answer = client.chat.completions.create(**request).choices[0]
            assert answer.finish_reason == ("tool_calls" if n < 2 else "stop")
            sent = answer.message.model_dump(exclude_none=True)
            if n % 2:
                sent.pop("reasoning_content", None)  # as many agents do
            if sent.get("tool_calls"):  # as agents do that read the arguments and write them again
                function = sent["tool_calls"][0]["function"]
                function.pop("parsed_arguments", None)
                assert "  " in function["arguments"], "the very text that the model wrote"
                function["arguments"] = json.dumps(json.loads(function["arguments"]))
            messages.append(sent)
            if answer.message.tool_calls:
                call = answer.message.tool_calls[0]
                assert call.function.name == "weather"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
            else:
                messages.append({"role": "user", "content": "Thanks."})
    turns, metrics = world.turns(claim.attempt_id), world.endpoint.metrics()
    assert_exact(world, turns)
    assert answer.message.content == "Bye."
    assert metrics["endpoint/turns_continued"] - before.get("endpoint/turns_continued", 0) == 3
    assert metrics["endpoint/turns_begun"] - before.get("endpoint/turns_begun", 0) == 1
    assert metrics["endpoint/tokens_rerendered"] - before.get("endpoint/tokens_rerendered", 0) > 100


def test_a_streamed_answer_equals_the_whole_answer(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        request: dict[str, Any] = {
            "model": "policy",
            "messages": [{"role": "user", "content": "?"}],
            "tools": [WEATHER],
        }
        whole = client.chat.completions.create(**request).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**request, stream=True)]
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]  # type: ignore[attr-defined]
    texts = [delta.content for delta in deltas if delta.content]
    assert len(thoughts) > 5 and len(texts) > 5, "as they come, and not at the end"
    assert "".join(thoughts) == whole.reasoning_content == "I must look. "  # type: ignore[attr-defined]
    assert "".join(texts) == whole.content == "Let me look.\n"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert whole.tool_calls is not None and calls[0].function is not None
    assert calls[0].function.arguments == whole.tool_calls[0].function.arguments  # type: ignore[union-attr]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_responses(world: World, streamed: bool, named: bool) -> None:
    """The answer is sent back as items, or named by its id."""
    claim = world.attempt()
    items: list[Any] = [{"role": "user", "content": "Weather?"}]
    previous: str | None = None
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        for _ in range(4):
            request: dict[str, Any] = {"model": "policy", "instructions": "Be kind.", "tools": [FLAT], "input": items}
            if named and previous is not None:
                request["previous_response_id"] = previous
            if streamed:
                with client.responses.stream(**request) as stream:
                    answer = stream.get_final_response()
            else:
                answer = client.responses.create(**request)
            previous = answer.id
            history = [] if named else [*items, *(item.model_dump(exclude_none=True) for item in answer.output)]
            calls = [item for item in answer.output if item.type == "function_call"]
            items = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
            items = [*history, *(items or [{"role": "user", "content": "Thanks."}])]
    assert answer.output_text == "Bye."
    assert_exact(world, world.turns(claim.attempt_id))


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic(world: World, streamed: bool) -> None:
    claim = world.attempt()
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
        for n in range(4):
            request: dict[str, Any] = {"model": "policy", "max_tokens": 400, "messages": messages, "tools": [CLAUDE]}
            if streamed:
                with client.messages.stream(**request, system="Be kind.") as stream:
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**request, system="Be kind.")
            assert answer.stop_reason == ("tool_use" if n < 2 else "end_turn")
            messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
            messages.append({"role": "user", "content": results or "Thanks."})
    kinds = [block["type"] for block in messages[1]["content"]]
    assert kinds == ["thinking", "text", "tool_use"]
    assert messages[1]["content"][2]["input"] == {"city": "Bern"}
    assert_exact(world, world.turns(claim.attempt_id))


def test_async_clients_stream_tools(world: World) -> None:
    """The asynchronous client of each dialect, all at once: calls arrive whole, and every turn continues."""
    claims = [world.attempt() for _ in range(3)]

    async def chat(key: str) -> None:
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        async with openai.AsyncOpenAI(base_url=world.url, api_key=key) as client:
            for _ in range(4):
                async with client.chat.completions.stream(model="policy", messages=messages, tools=[WEATHER]) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
                messages.append({"role": "assistant", "content": message.content})
                calls = [call.to_dict() for call in message.tool_calls or []]
                for call in calls:
                    call["function"].pop("parsed_arguments", None)  # type: ignore[attr-defined]
                messages[-1] |= {"tool_calls": calls} if calls else {}
                results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
                messages += results or [{"role": "user", "content": "Thanks."}]

    async def responses(key: str) -> None:
        items: list[Any] = [{"role": "user", "content": "Weather?"}]
        async with openai.AsyncOpenAI(base_url=world.url, api_key=key) as client:
            for _ in range(4):
                async with client.responses.stream(model="policy", input=items, tools=[FLAT]) as stream:  # type: ignore[list-item]
                    response = await stream.get_final_response()
                items += [item.model_dump(exclude_none=True) for item in response.output if item.type != "reasoning"]
                calls = [item for item in response.output if item.type == "function_call"]
                results = [
                    {"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls
                ]
                items += results or [{"role": "user", "content": "Thanks."}]

    async def messages(key: str) -> None:
        history: list[Any] = [{"role": "user", "content": "Weather?"}]
        async with anthropic.AsyncAnthropic(base_url=world.root, api_key=key) as client:
            for _ in range(4):
                request: dict[str, Any] = {"model": "policy", "max_tokens": 400, "messages": history, "tools": [CLAUDE]}
                async with client.messages.stream(**request) as stream:
                    message = await stream.get_final_message()
                history.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
                calls = [block for block in message.content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
                history.append({"role": "user", "content": results or "Thanks."})

    async def all_of_them() -> None:
        kinds = (chat, responses, messages)
        await asyncio.gather(*(kind(claim.model_key) for kind, claim in zip(kinds, claims, strict=True)))

    asyncio.run(all_of_them())
    for claim in claims:
        turns = world.turns(claim.attempt_id)
        assert_exact(world, turns)
        assert turns[-1].completion.text == "Bye."


def test_a_history_that_an_agent_rewrote_branches(world: World) -> None:
    claim, before = world.attempt(), dict(world.endpoint.metrics())
    messages: list[Any] = [{"role": "user", "content": "?"}]
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        client.chat.completions.create(model="policy", messages=messages)
        rewritten = [*messages, {"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "!"}]
        client.chat.completions.create(model="policy", messages=rewritten)
    first, second = world.turns(claim.attempt_id)
    assert not np.array_equal(second.prompt[: len(first.prompt) + 5], np.append(first.prompt, first.completion.ids[:5]))
    assert np.array_equal(second.prompt, world.endpoint.chat.prompt_ids(rewritten))
    assert first.observed == second.observed == 0, "it goes on from no answer of the model"
    metrics = world.endpoint.metrics()
    assert metrics["endpoint/turns_branched"] - before.get("endpoint/turns_branched", 0) == 1


def test_the_prefix_of_an_answer_is_no_observation() -> None:
    """Neither a forced call nor words that the agent gives are observations."""
    chat = chat_of("qwen3")

    def says(prompt: str) -> str:
        called = prompt.endswith('"arguments": ')
        return ('{"city": "Bern"}}\n</tool_call>' if called else "raining.") + "<|im_end|>"

    with serving(Scripted(chat.tokenizer, says), chat, train=SamplingParams(max_tokens=200)) as world:
        claim = world.attempt()
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
            request: dict[str, Any] = {"model": "policy", "tools": [WEATHER]}
            for _ in range(2):
                call = client.chat.completions.create(**request, messages=messages, tool_choice="required").choices[0]
                sent = call.message.model_dump(exclude_none=True)
                result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "rain"}
                messages += [sent, result]
            more = {"continue_final_message": True, "add_generation_prompt": False}
            prefill = {"role": "assistant", "content": "It is "}
            client.chat.completions.create(**request, messages=[*messages, prefill], extra_body=more)
        turns = world.turns(claim.attempt_id)
    decode = partial(chat.tokenizer.decode, keep_special_tokens=True)
    shown = "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ends = [decode(turn.prompt[len(turn.prompt) - turn.opened :]) for turn in turns]
    assert ends == ['<tool_call>\n{"name": "weather", "arguments": '] * 2 + ["It is "]
    (row,) = build_samples(turns, 0)
    assert row.observation is not None and decode(row.ids[row.observation]) == shown * 2
    assert [turn.observed for turn in turns] == [0, *[len(row.ids[row.observation]) // 2] * 2]


def test_a_call_is_forced(world: World) -> None:
    """The beginning of the call is context, and the model continues from it."""
    claim = world.attempt()
    upstream = Scripted(world.endpoint.chat.tokenizer, lambda _: '{"city": "Bern"}}\n</tool_call><|im_end|>')
    with serving(upstream, chat_of("qwen3")) as world:
        claim = world.attempt()
        messages: list[Any] = [{"role": "user", "content": "Weather?"}]
        choice = {"type": "function", "function": {"name": "weather"}}
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
            request: dict[str, Any] = {"model": "policy", "tools": [WEATHER], "tool_choice": choice}
            whole = client.chat.completions.create(**request, messages=messages).choices[0].message
            assert whole.tool_calls is not None
            messages += [whole.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "rain"}]
            chunks = list(client.chat.completions.create(**request, messages=messages, stream=True))
        first, second = world.turns(claim.attempt_id)
        decode = world.endpoint.chat.tokenizer.decode
        assert decode(first.prompt, keep_special_tokens=True).endswith('<tool_call>\n{"name": "weather", "arguments": ')
        assert whole.tool_calls[0].function.arguments == '{"city": "Bern"}'  # type: ignore[union-attr]
        seen = np.concatenate([first.prompt, first.completion.ids])
        assert np.array_equal(second.prompt[: len(seen)], seen)
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert calls[0].function is not None and calls[0].function.arguments == '{"city": "Bern"}'
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
