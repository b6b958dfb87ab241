"""Models of other providers: calls are passed on, answered unchanged, recorded, and never trained on."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from hypothesis import given
from hypothesis import strategies as st

from etude.agents.proxy import EndpointConfig, ExternalModel
from etude.agents.proxy.external import external_models
from etude.agents.proxy.external_answer import iter_events
from etude.errors import ConfigError
from etude.store.queue.rollout_queue import Claim
from tests.agents.proxy.listening import served
from tests.agents.proxy.world import Scripted, World, chat_of, serving
from tests.agents.sdks import anthropic, openai
from tests.chat.conversations import WEATHER
from tests.sweeps import later
from tests.waits import skip_time, until

CLIENT = httpx2.Client(timeout=30)
ASK: list[Any] = [{"role": "user", "content": "What is it?"}]
SECRET = "not-to-be-seen-by-anybody"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>'
FLAT = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def provider() -> Iterator[World]:
    """The server of another provider: a second endpoint, which knows nothing of the first."""
    says = Scripted(chat_of().tokenizer, lambda prompt: CALL if "Weather?" in prompt else "It is\u2028so 🌧.<|im_end|>")
    with serving(says, chat_of(), model="their-model") as world:
        yield world


@pytest.fixture
def world(provider: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("THEIR_KEY", provider.attempt().model_key)
    config = EndpointConfig(
        external={"judge": ExternalModel(url=provider.url, model="their-model", api_key_env="THEIR_KEY")}
    )
    with serving(Scripted(chat_of().tokenizer, lambda _: "Mine.<|im_end|>"), chat_of(), config=config) as world:
        yield world


def written(world: World, claim: Claim, count: int) -> list[dict[str, Any]]:
    """Return the recorded calls of an attempt to other models, once there are so many."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        notes = [note["data"] for note in world.notes(claim.attempt_id) if note["name"] == "external"]
        if len(notes) >= count:
            break
        time.sleep(0.02)
    assert len(notes) == count
    return notes


def test_chat_whole_and_streamed(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        mine = client.chat.completions.create(model="policy", messages=ASK)
        whole = client.chat.completions.create(model="judge", messages=ASK, extra_headers={"x-etude-tags": "strict"})
        request: dict[str, Any] = {"model": "judge", "messages": ASK, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**request, stream=True))
        assert [chunk["outcome"] for chunk in written(world, claim, 2)] == ["answered"] * 2, "before the end was given"
        messages = [{"role": "user", "content": "Weather?"}]
        called = client.chat.completions.create(model="judge", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
        with client.chat.completions.stream(model="judge", messages=messages, tools=[WEATHER]) as stream:  # type: ignore[list-item]
            streamed = stream.get_final_completion().choices[0].message
    assert mine.choices[0].message.content == "Mine."
    assert whole.choices[0].message.content == "It is\u2028so 🌧." and whole.model == "their-model"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "It is\u2028so 🌧."
    assert called.choices[0].message.tool_calls and streamed.tool_calls
    assert [turn.completion.text for turn in world.turns(claim.attempt_id)] == ["Mine."], "nothing else is learned from"
    first, second, third, fourth = written(world, claim, 4)
    assert first["asked"] == json.dumps({"messages": ASK}) and first["said"] == second["said"] == "It is\u2028so 🌧."
    assert (first["model"], first["served_as"], first["path"]) == ("judge", "their-model", "/chat/completions")
    assert first["finish"] == second["finish"] == "stop" and first["tags"] == ["strict"] and first["seconds"] > 0
    assert whole.usage is not None and first["usage"] == second["usage"] == whole.usage.to_dict()
    assert third["said"] == fourth["said"] == 'weather({"city": "Bern"})'
    metrics = world.endpoint.metrics()
    assert metrics["endpoint/external_calls"] == metrics["endpoint/external_answered"] == 4
    assert metrics["endpoint/calls"] == metrics["endpoint/turns"] == 1, "they are counted apart"
    assert metrics["endpoint/external_completion_tokens"] >= 2 * whole.usage.completion_tokens
    assert 0 < metrics["endpoint/external_latency_p50"] <= metrics["endpoint/external_latency_p99"]


def test_responses_and_completions(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        request: dict[str, Any] = {"model": "judge", "input": "What?", "instructions": "Be kind.", "tools": [FLAT]}
        whole = client.responses.create(**request)
        with client.responses.stream(**request) as stream:
            final = stream.get_final_response()
        called = client.responses.create(**request | {"input": "Weather?"})
        text = client.completions.create(model="judge", prompt="It", max_tokens=50)
        pieces = list(client.completions.create(model="judge", prompt="It", max_tokens=50, stream=True))
    assert whole.output_text == final.output_text == "It is\u2028so 🌧."
    assert called.output[0].type == "function_call"
    assert text.choices[0].text == "".join(record.choices[0].text for record in pieces if record.choices)
    records = written(world, claim, 5)
    assert [record["said"] for record in records[:3]] == ["It is\u2028so 🌧."] * 2 + ['weather({"city": "Bern"})']
    assert records[3]["said"] == records[4]["said"] == text.choices[0].text
    assert [record["finish"] for record in records] == ["completed"] * 3 + ["stop"] * 2
    assert json.loads(records[0]["asked"]) == {"input": "What?", "instructions": "Be kind."}
    assert all(record["usage"] for record in records[:4])


def test_async(world: World) -> None:
    claim = world.attempt()

    async def call() -> str:
        async with openai.AsyncOpenAI(base_url=world.url, api_key=claim.model_key) as client:
            stream = await client.chat.completions.create(model="judge", messages=ASK, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(call()) == written(world, claim, 1)[0]["said"]


def test_models_are_listed_and_other_dialects_are_refused(world: World) -> None:
    claim = world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
        assert [model.id for model in client.models.list()] == ["policy", "judge"]
        assert client.models.retrieve("judge").id == "judge"
        with pytest.raises(openai.NotFoundError, match="are: 'policy', 'judge'"):
            client.chat.completions.create(model="gpt-9", messages=ASK)
    with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as claude:
        for ask in (claude.messages.create, claude.messages.stream):
            with pytest.raises(anthropic.BadRequestError, match="in OpenAI's dialects only"):
                ask(model="judge", max_tokens=5, messages=ASK).__enter__()
        with pytest.raises(anthropic.BadRequestError, match="in OpenAI's dialects only"):
            claude.messages.count_tokens(model="judge", messages=ASK)


def test_a_call_without_an_attempt_is_refused(world: World) -> None:
    body = {"model": "judge", "messages": ASK}
    for key, status in ((None, 401), ("sk-none", 401), (world.attempt().reward_key, 403)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert CLIENT.post(f"{world.url}/chat/completions", json=body, headers=headers).status_code == status


# -- a provider that does not answer ----------------------------------------------------------------------------------


def troubled(on_slow_call: Callable[[], None] = lambda: None) -> FastAPI:
    """A provider that fails in the way that the model's name says. on_slow_call: called before it waits."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        wanted = (await request.json())["model"]
        seen = request.headers.get("authorization", "")
        if wanted.isdecimal():
            error_body = {"error": {"message": f"no, {seen}", "type": "x"}}
            return Response(json.dumps(error_body), int(wanted), {"retry-after": "7"} if wanted == "429" else None)
        if wanted == "slow":
            on_slow_call()
            await asyncio.sleep(60)

        async def events() -> AsyncIterator[str]:
            if wanted == "endless":  # one event that never ends
                yield "data: "
                for _ in range(3):
                    yield "x" * 2**20
            for n in range(1000 if wanted == "long" else 3):
                choice = {"index": 0, "delta": {"content": f"{n} "}}
                yield f": still there\n\ndata: {json.dumps({'choices': [choice]})}\r\n\r\n"
                await asyncio.sleep(0.01)
            if wanted == "hangs":
                await asyncio.sleep(60)
            if wanted == "breaks":
                raise ConnectionError("it broke")

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


MODELS = ("400", "401", "403", "404", "429", "500", "503", "302", "slow", "long", "hangs", "breaks", "short", "endless")


@pytest.fixture(scope="module")
def trouble() -> Iterator[World]:
    monkey = pytest.MonkeyPatch()
    monkey.setenv("THEIR_KEY", SECRET)
    with served(troubled(on_slow_call=lambda: skip_time(20))) as url:
        models = {name: ExternalModel(url=url, api_key_env="THEIR_KEY") for name in MODELS}
        config = EndpointConfig(external=models | {"gone": ExternalModel(url="http://127.0.0.1:9/v1")}, timeout_s=20.0)
        with serving(Scripted(chat_of().tokenizer, lambda _: "Mine."), chat_of(), config=config) as world:
            yield world
    monkey.undo()


@pytest.mark.parametrize("streamed", later([False, True]))
@pytest.mark.parametrize(
    ("name", "status", "kind", "says"),
    [
        ("400", 400, "invalid_request_error", "answered 400: no, Bearer ***"),
        ("404", 404, "not_found_error", "answered 404"),
        ("401", 502, "server_error", "refused the key in THEIR_KEY"),
        ("403", 502, "server_error", "refused the key in THEIR_KEY"),
        ("429", 429, "rate_limit_error", "answered 429"),
        ("500", 500, "server_error", "answered 500"),
        ("503", 503, "server_error", "answered 503"),
        ("302", 502, "server_error", "answered 302"),
        ("slow", 504, "timeout_error", "within 20 s"),
        ("gone", 502, "server_error", "could not be reached"),
    ],
)
def test_errors_of_a_provider_are_passed_on(
    trouble: World, caplog: pytest.LogCaptureFixture, name: str, status: int, kind: str, says: str, streamed: bool
) -> None:
    claim = trouble.attempt()
    body = {"model": name, "messages": ASK, "stream": streamed}
    headers = {"authorization": f"Bearer {claim.model_key}"}
    with caplog.at_level(logging.DEBUG):
        response = CLIENT.post(f"{trouble.url}/chat/completions", json=body, headers=headers)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == kind and says in error["message"]
    assert response.headers.get("retry-after") == ("7" if name == "429" else None)
    (record,) = written(trouble, claim, 1)
    assert record["outcome"] == "failed" and says in record["error"]
    assert SECRET not in response.text + json.dumps(record) + caplog.text


@pytest.mark.parametrize("name", ["hangs", "breaks"])
def test_a_stream_that_fails_under_way(trouble: World, name: str) -> None:
    claim = trouble.attempt()
    with openai.OpenAI(base_url=trouble.url, api_key=claim.model_key, max_retries=0) as client:
        text = ""
        with pytest.raises(openai.APIError, match="The provider of"):
            for chunk in client.chat.completions.create(model=name, messages=ASK, stream=True):
                text += chunk.choices[0].delta.content or ""
                if name == "hangs" and text == "0 1 2 ":
                    skip_time(20)
    assert text == "0 1 2 "
    (record,) = written(trouble, claim, 1)
    assert (record["outcome"], record["said"]) == ("failed", text)


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_without_an_end_is_cut_off(trouble: World, monkeypatch: pytest.MonkeyPatch, streamed: bool) -> None:
    monkeypatch.setattr("etude.agents.proxy.external.MAX_ANSWER_MIB", 1)
    claim = trouble.attempt()
    body = {"model": "endless", "messages": ASK, "stream": streamed}
    headers = {"authorization": f"Bearer {claim.model_key}"}
    response = CLIENT.post(f"{trouble.url}/chat/completions", json=body, headers=headers)
    assert "sent more than 1 MiB" in response.text and len(response.text) < 1000
    (record,) = written(trouble, claim, 1)
    assert record["outcome"] == "failed" and "more than 1 MiB" in record["error"]


@given(
    st.lists(st.sampled_from(["data: a", "x", "\n", "\r\n", "\r", "\n\n", "\r\n\r\n"]), max_size=30), st.integers(1, 5)
)
def test_events_do_not_depend_on_the_size_of_chunks(pieces: list[str], size: int) -> None:
    text = "".join(pieces).encode()

    async def read(size: int) -> list[bytes]:
        async def chunks() -> AsyncIterator[bytes]:
            for at in range(0, len(text), size):
                yield text[at : at + size]

        return [event async for event in iter_events(chunks())]

    *whole, last = re.split(rb"\r?\n\r?\n", text)
    assert asyncio.run(read(size)) == [*whole, *([last] if last.strip() else [])]


def test_a_stream_without_an_end_ends(trouble: World) -> None:
    claim = trouble.attempt()
    with openai.OpenAI(base_url=trouble.url, api_key=claim.model_key) as client:
        chunks = list(client.chat.completions.create(model="short", messages=ASK, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "0 1 2 "
    assert written(trouble, claim, 1)[0]["outcome"] == "answered"


def test_a_stream_that_its_client_drops_is_recorded(trouble: World) -> None:
    claim = trouble.attempt()
    with openai.OpenAI(base_url=trouble.url, api_key=claim.model_key) as client:
        stream = client.chat.completions.create(model="long", messages=ASK, stream=True)
        next(stream)
        stream.close()
    (record,) = written(trouble, claim, 1)
    assert record["outcome"] == "aborted" and record["said"].startswith("0 ")


def test_too_many_calls_are_refused_with_retry_after(provider: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(troubled()) as url:
        config = EndpointConfig(external={"slow": ExternalModel(url=url)}, max_running=1, max_waiting=0, timeout_s=20)
        with serving(Scripted(chat_of().tokenizer, lambda _: "Mine.<|im_end|>"), chat_of(), config=config) as world:
            headers = {"authorization": f"Bearer {world.attempt().model_key}"}

            async def statuses() -> list[int]:
                async with httpx2.AsyncClient(base_url=world.url, headers=headers, timeout=30) as client:
                    body = {"model": "slow", "messages": ASK}
                    bodies = [body, body, body, body | {"model": "policy"}]
                    calls = [asyncio.create_task(client.post("/chat/completions", json=body)) for body in bodies]
                    await until(lambda: sum(call.done() for call in calls) == 3)
                    skip_time(20)
                    return [response.status_code for response in await asyncio.gather(*calls)]

            codes = asyncio.run(statuses())
            assert sorted(codes[:3]) == [429, 429, 504] and codes[3] == 200, "the model's own places are its own"


# -- setup -------------------------------------------------------------------------------------------------------------


def test_a_key_that_is_not_there_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THEIR_KEY", raising=False)
    config = EndpointConfig(external={"judge": ExternalModel(url="http://127.0.0.1:9/v1", api_key_env="THEIR_KEY")})
    upstream = Scripted(chat_of().tokenizer, lambda _: "")
    with (
        pytest.raises(ConfigError, match="'judge' is read from THEIR_KEY"),
        serving(upstream, chat_of(), config=config),
    ):
        pass
    config = EndpointConfig(external={"policy": ExternalModel(url="http://127.0.0.1:9/v1")})
    with pytest.raises(ConfigError, match="has the name 'policy'"), serving(upstream, chat_of(), config=config):
        pass


def test_models_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "judge:\n  url: https://example.org/v1\n  model: large\n  api_key_env: THEIR_KEY\nuser: {url: http://h/v1}\n"
    )
    models = external_models(file)
    assert models == {
        "judge": ExternalModel(url="https://example.org/v1", model="large", api_key_env="THEIR_KEY"),
        "user": ExternalModel(url="http://h/v1"),
    }
    assert external_models(None) == {}
    for text, says in (
        ("- 1", "a section for each model"),
        ("a: {url: ftp://x}", "url"),
        ("a: {link: b}", "link"),
        ("{", "read"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=says):
            external_models(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        external_models(tmp_path / "none.yaml")
