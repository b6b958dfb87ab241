"""The official clients use the endpoint like their own servers, over a socket, with a real engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from etude.chat import ChatRenderer, Tokenizer
from etude.records import SamplingParams
from tests.agents.proxy.world import World, serving
from tests.agents.sdks import anthropic, openai
from tests.chat.made import CHATML, byte_level, save
from tests.rollout.engines import engine_of, model_of

ASK = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    tokenizer = Tokenizer.load(save(tmp_path_factory.mktemp("chat"), byte_level(CHATML), CHATML, ("<|im_end|>",)))
    model = model_of(vocabulary=tokenizer.vocab_size, context=256)
    with (
        engine_of(model, tokenizer) as engine,
        serving(engine, ChatRenderer(tokenizer), context=256, train=SamplingParams(max_tokens=12)) as world,
    ):
        yield world


def test_chat_whole_streamed_sync_and_async(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        whole = client.chat.completions.create(model="policy", messages=ASK)
        chunks = list(
            client.chat.completions.create(
                model="policy", messages=ASK, stream=True, stream_options={"include_usage": True}
            )
        )

    async def call() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=world.url, api_key=claim.model_key) as client:
            one = await client.chat.completions.create(model="policy", messages=ASK)
            stream = await client.chat.completions.create(model="policy", messages=ASK, stream=True)
            return one.choices[0].message.content or "", "".join(
                [chunk.choices[0].delta.content or "" async for chunk in stream]
            )

    one, streamed = asyncio.run(call())
    turns = world.turns(claim.attempt_id)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert [turn.completion.text for turn in turns] == [whole.choices[0].message.content, text, one, streamed]
    assert [turn.index for turn in turns] == [0, 1, 2, 3]
    first = turns[0]
    assert np.array_equal(first.prompt, world.endpoint.chat.prompt_ids(ASK))
    assert whole.usage is not None and whole.usage.prompt_tokens == len(first.prompt)
    assert whole.usage.completion_tokens == len(first.completion.ids) <= 12
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(turns[1].completion.ids)
    assert whole.choices[0].finish_reason == first.completion.finish_reason
    assert len({tuple(turn.completion.ids) for turn in turns}) > 1, "each occurrence has a different seed"


def test_several_answers_are_several_turns(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        whole = client.chat.completions.create(model="policy", messages=ASK, n=3, logprobs=True, top_logprobs=2)
        texts: dict[int, str] = {}
        for chunk in client.chat.completions.create(model="policy", messages=ASK, n=2, stream=True):
            choice = chunk.choices[0]
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    turns = world.turns(claim.attempt_id)
    assert len(turns) == 5
    assert [choice.message.content for choice in whole.choices] == [turn.completion.text for turn in turns[:3]]
    assert sorted(texts.values()) == sorted(turn.completion.text for turn in turns[3:])
    for choice, turn in zip(whole.choices, turns, strict=False):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert np.allclose([token.logprob for token in choice.logprobs.content], turn.completion.logp)
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * len(turn.completion.ids)


def test_a_text_continues_with_the_ids_it_was_served(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        prompt = "The weather in Paris"
        for _ in range(3):
            completion = client.completions.create(model="policy", prompt=prompt, max_tokens=6, logprobs=1)
            prompt += completion.choices[0].text + " and then"
        streamed = client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=4, stream=True)
        text = "".join(chunk.choices[0].text for chunk in streamed)
    turns = world.turns(claim.attempt_id)
    for before, after in pairwise(turns[:3]):
        served = np.concatenate([before.prompt, before.completion.ids])
        assert np.array_equal(after.prompt[: len(served)], served)
    assert turns[3].prompt.tolist() == [5, 6, 7] and turns[3].completion.text == text


def test_responses_whole_streamed_and_continued(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        first = client.responses.create(model="policy", instructions="Be brief.", input="Hi", max_output_tokens=8)
        second = client.responses.create(
            model="policy", instructions="Be brief.", input="More", previous_response_id=first.id
        )
        with client.responses.stream(model="policy", input="And more", previous_response_id=second.id) as stream:
            events = list(stream)
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        final = last.response
    turns = world.turns(claim.attempt_id)
    assert first.output_text == turns[0].completion.text and second.output_text == turns[1].completion.text
    served = np.concatenate([turns[0].prompt, turns[0].completion.ids])
    assert np.array_equal(turns[1].prompt[: len(served)], served)
    assert final.output_text == turns[2].completion.text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert first.usage is not None and first.usage.output_tokens == len(turns[0].completion.ids)


def test_anthropic_whole_streamed_sync_and_async(world: World) -> None:
    claim = world.attempt()
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
        whole = client.messages.create(model="policy", max_tokens=8, system="Be brief.", messages=ASK)
        counted = client.messages.count_tokens(model="policy", system="Be brief.", messages=ASK)
        with client.messages.stream(model="policy", max_tokens=8, messages=ASK) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()

    async def call() -> str:
        async with anthropic.AsyncAnthropic(base_url=world.root, api_key=claim.model_key) as client:
            answer = await client.messages.create(model="policy", max_tokens=8, messages=ASK)
            return "".join(block.text for block in answer.content if block.type == "text")

    last = asyncio.run(call())
    turns = world.turns(claim.attempt_id)
    assert len(turns) == 3, "counting tokens is no turn"
    texts = ["".join(block.text for block in message.content if block.type == "text") for message in (whole, final)]
    assert [turn.completion.text for turn in turns] == [*texts, last] and text == texts[1]
    assert counted.input_tokens == whole.usage.input_tokens == len(turns[0].prompt)
    assert final.usage.output_tokens == len(turns[1].completion.ids)
    assert whole.stop_reason in ("max_tokens", "end_turn")


def test_models(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        assert client.models.retrieve("policy").id == "policy"
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
