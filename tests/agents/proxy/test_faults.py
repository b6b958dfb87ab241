"""Bad input, wrong keys, clients that disconnect, engines that die: each gets an error of its dialect, recorded."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from typing import Any

import httpx2
import numpy as np
import pytest

from etude.agents.proxy import EndpointConfig, request
from etude.agents.proxy.endpoint import MAX_CHARACTERS_PER_TOKEN
from etude.agents.proxy.sampling_rules import FORCED
from etude.chat import ChatRenderer
from etude.chat.tokenizer import Ids, Tokenizer
from etude.errors import EngineError
from etude.images import PromptImages
from etude.records import Completion, Outcome, SamplingParams
from etude.rollout.request import Delta
from etude.store.journal.events import TurnRecorded
from etude.store.queue.keys import Keyring
from etude.store.queue.rollout_queue import AttemptId, AttemptReport
from tests.agents.proxy.world import Scripted, World, chat_of, serving
from tests.agents.sdks import anthropic, openai
from tests.sweeps import sweep
from tests.waits import blocked_until, skip_time, until

ASK: list[Any] = [{"role": "user", "content": "What is it?"}]
CHAT: dict[str, Any] = {"model": "policy", "messages": ASK}
CLAUDE: dict[str, Any] = {**CHAT, "max_tokens": 9}
CLIENT = httpx2.Client(timeout=30)
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "policy", "prompt": "a"},
    "/v1/responses": {"model": "policy", "input": "a"},
    "/v1/messages": CLAUDE,
    "/v1/messages/count_tokens": CHAT,
}


def scripted(text: str = "It is so.<|im_end|>", **more: Any) -> Scripted:
    return Scripted(chat_of().tokenizer, lambda _: text, **more)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    config = EndpointConfig(max_body_mib=0.5)
    with serving(scripted(), chat_of(), context=200, train=SamplingParams(max_tokens=50), config=config) as world:
        yield world


def posted(world: World, path: str, body: Any, key: str | None, **more: Any) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return CLIENT.post(world.root + path, content=content, headers=headers, timeout=30, **more)


def error_of(path: str, response: httpx2.Response) -> tuple[str, str]:
    """Return the message and the type of an error, in the form that the dialect's clients read."""
    body = response.json()
    if path.startswith("/v1/messages"):
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"], body["error"]["type"]


DIALECTS = ("/v1/chat/completions", "/v1/messages")
"""One path for each of the two forms of errors."""
each_dialect = pytest.mark.parametrize(
    "path", [path if path in DIALECTS else pytest.param(path, marks=pytest.mark.slow) for path in CALLS]
)


@each_dialect
def test_wrong_keys_are_refused(world: World, path: str) -> None:
    claim, ring = world.attempt(), world.endpoint.keyring
    stranger = Keyring("another-secret-of-tests")
    wrong = [
        None,
        "sk-none",
        ring.model_key(claim.attempt_id, -10),
        stranger.model_key(claim.attempt_id, 60),
        claim.model_key[:-1],
    ]
    others = [claim.reward_key, ring.admin, ring.runner, ring.model_key(AttemptId(10**6, 0), 60)]
    for key in wrong:
        response = posted(world, path, CALLS[path], key)
        assert response.status_code == 401 and error_of(path, response)[1] == "authentication_error"
    for key in others:
        response = posted(world, path, CALLS[path], key)
        assert response.status_code == 403 and error_of(path, response)[1] == "permission_error"
    assert posted(world, path, CALLS[path], claim.model_key).status_code == 200
    assert CLIENT.get(f"{world.url}/models", headers={"x-api-key": claim.reward_key}).status_code == 403
    by_header = CLIENT.post(world.root + path, json=CALLS[path], headers={"x-api-key": claim.model_key})
    assert by_header.status_code == 200


@each_dialect
@sweep(
    ("body", "status", "says"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"model": "\xff"}', 400, "not valid UTF-8"),
        (b'{"model": NaN}', 400, "not valid JSON"),
        (b'{"model": "\\ud800"}', 400, "unpaired surrogate"),
        (b'{"model": ' + b"[" * 200_000, 400, "nested too deeply"),
        (b'{"model": "' + b"a" * 2**20 + b'"}', 413, "larger than 0.5 MiB"),
        (b'{"model": [' + b"[]," * 140_000 + b"1]}", 413, "more than 262144 values"),
        (b'{"model": ' + b"[" * 101 + b"]" * 101 + b"}", 400, "nested too deeply"),
        ({"model": 5}, 400, "'model' must be a string"),
        ({}, 400, "'model' is missing"),
    ],
)
def test_invalid_bodies_are_refused(world: World, path: str, body: Any, status: int, says: str) -> None:
    response = posted(world, path, body, world.attempt().model_key)
    assert response.status_code == status and says in error_of(path, response)[0]


@each_dialect
def test_an_unknown_model(world: World, path: str) -> None:
    response = posted(world, path, {**CALLS[path], "model": "gpt-9"}, world.attempt().model_key)
    assert response.status_code == 404 and error_of(path, response) == (
        "This endpoint has no model 'gpt-9'. Its models are: 'policy'.",
        "not_found_error",
    )


IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "/v1/chat/completions": [
        ({"messages": []}, "is empty"),
        ({"messages": [{"role": "robot", "content": ""}]}, "'robot'"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "takes text alone"),
        ({"messages": [5]}, "messages[0] must be a JSON object"),
        ({"temperature": "hot"}, "a number from 0 to 2"),
        ({"max_tokens": 0}, "an integer"),
        ({"n": 10**400}, "an integer"),
        ({"stop": [5]}, "a list of at most"),
        ({"logit_bias": {"a": 1}}, "token ids to numbers"),
        ({"tool_choice": "required"}, "name one of the 'tools'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "one of the 'tools'"),
        ({"functions": [{"name": "f"}]}, "is the deprecated form"),
        ({"modalities": ["audio"]}, "can only be ['text']"),
        ({"top_logprobs": 3}, "needs 'logprobs'"),
        ({"continue_final_message": True}, "a last message by the assistant"),
    ],
    "/v1/completions": [
        ({"prompt": ["a", "b"]}, "this endpoint records answers. Send each prompt in its own request"),
        ({"prompt": []}, "'prompt' is empty. Send a string"),
        ({"prompt": [-1]}, "token ids, which are integers from 0"),
        ({"prompt": ""}, "is empty"),
        ({"echo": True}, "cannot be true"),
        ({"prompt": [10**6]}, ""),
    ],
    "/v1/responses": [
        ({"input": []}, ""),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "'computer_call'"),
        ({"conversation": "c"}, "is not stored"),
        ({"background": True}, "is not supported"),
        ({"previous_response_id": 5}, "must be a string"),
        ({"include": ["message.output_text.logprobs"], "stream": True}, "a stream does not have"),
    ],
    "/v1/messages": [
        ({"max_tokens": None}, "is missing"),
        ({"messages": [{"role": "assistant", "content": "It"}]}, "no message to answer"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "is missing"),
        ({"container": "c"}, "is not supported"),
    ],
}
"""The unsupported requests of each path, and the part of the error that names the reason."""


@pytest.mark.parametrize("path", REFUSED)
def test_unsupported_requests_are_refused(world: World, path: str) -> None:
    claim = world.attempt()
    for change, says in REFUSED[path]:
        before = len(world.turns(claim.attempt_id))
        response = posted(world, path, {**CALLS[path], **change}, claim.model_key)
        if says or response.status_code != 200:
            assert response.status_code == 400, f"{change}: {response.text}"
            assert says in error_of(path, response)[0], change
            assert len(world.turns(claim.attempt_id)) == before, change


@pytest.mark.kept
def test_a_refused_call_is_counted_and_noted_on_its_attempt(world: World) -> None:
    claim, before = world.attempt(), world.endpoint.metrics().get("endpoint/refused", 0)
    for _ in range(3):
        assert posted(world, "/v1/chat/completions", {**CHAT, "model": "gpt-9"}, claim.model_key).status_code == 404
    assert posted(world, "/v1/responses", b"{", claim.model_key).status_code == 400
    assert posted(world, "/v1/messages", {**CLAUDE, "messages": []}, claim.model_key).status_code == 400
    assert posted(world, "/v1/messages", CLAUDE, "sk-none").status_code == 401
    assert world.endpoint.metrics()["endpoint/refused"] == before + 6
    notes = world.notes(claim.attempt_id)
    assert [note["name"] for note in notes] == ["refused"] * 3, "the same refusal is noted once"
    assert notes[0]["data"] == {
        **{"path": "/v1/chat/completions", "status": 404, "param": "model", "code": "model_not_found"},
        "error": "This endpoint has no model 'gpt-9'. Its models are: 'policy'.",
    }
    assert "not valid JSON" in notes[1]["data"]["error"] and notes[2]["data"]["path"] == "/v1/messages"
    for n in range(15):
        posted(world, "/v1/chat/completions", {**CHAT, "model": f"gpt-{n}"}, claim.model_key)
    assert len(world.notes(claim.attempt_id)) == 16, "an agent that never gives up does not fill the store"


def test_an_unknown_previous_answer_is_refused(world: World) -> None:
    one, other = world.attempt(), world.attempt()
    with openai.OpenAI(base_url=world.url, api_key=one.model_key) as client:
        first = client.responses.create(model="policy", input="a")
        unkept = client.responses.create(model="policy", input="a", store=False)
    for key, id in ((one.model_key, "resp_none"), (one.model_key, unkept.id), (other.model_key, first.id)):
        with (
            openai.OpenAI(base_url=world.url, api_key=key) as client,
            pytest.raises(openai.NotFoundError, match=r"no answer .* to continue"),
        ):
            client.responses.create(model="policy", input="b", previous_response_id=id)


def test_a_prompt_that_is_too_long(world: World) -> None:
    claim = world.attempt()
    long: list[Any] = [{"role": "user", "content": "What is it? " * 100}]
    with (
        openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client,
        pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens") as raised,
    ):
        client.chat.completions.create(model="policy", messages=long)
    assert raised.value.code == "context_length_exceeded"
    with (
        anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as claude,
        pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* tokens > 199 maximum"),
    ):
        claude.messages.create(model="policy", max_tokens=5, messages=long)
    notes = world.notes(claim.attempt_id)
    assert [note["name"] for note in notes] == ["context_length_exceeded"] * 2
    assert notes[0]["data"]["context"] == 200 and notes[0]["data"]["tokens"] > 200
    assert not world.turns(claim.attempt_id)


LONG = "a " * (MAX_CHARACTERS_PER_TOKEN * 100 + 10)
LONGEST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
}


@each_dialect
def test_text_that_no_context_holds_is_refused_before_it_is_tokenised(world: World, path: str) -> None:
    claim = world.attempt()
    began = time.process_time()
    response = posted(world, path, {**CALLS[path], **LONGEST[path]}, claim.model_key)
    assert response.status_code == 400 and "maximum context length is 200 tokens" in error_of(path, response)[0]
    assert time.process_time() - began < 5.0
    assert [note["name"] for note in world.notes(claim.attempt_id)] == ["context_length_exceeded"]


@each_dialect
def test_a_long_body_without_a_key_is_refused_in_the_form_of_the_dialect(world: World, path: str) -> None:
    response = posted(world, path, b" " * 100_000, "sk-none")
    assert response.status_code == 401 and error_of(path, response)[1] == "authentication_error"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        pytest.param("/v1/completions", marks=pytest.mark.integration),
        "/v1/messages/count_tokens",
    ],
)
def test_long_texts_do_not_block_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request is answered while half a megabyte is tokenized."""

    def encode(self: Tokenizer, text: str, *args: Any, **kwargs: Any) -> Any:
        if len(text) > 100_000:
            begun.set()
            assert answered.wait(20), "the event loop waits for the text"
        return original(self, text, *args, **kwargs)

    begun, answered, original = Event(), Event(), Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "Which way is it to the gate, and what shall I see on the way there? " * 8_000
    body = {**CALLS[path], **json.loads(json.dumps(LONGEST[path]).replace(LONG, text))}
    with serving(scripted(), chat_of(), train=SamplingParams(max_tokens=50)) as world, ThreadPoolExecutor(1) as beside:
        claim, other = world.attempt(), world.attempt()
        one = beside.submit(posted, world, path, body, claim.model_key)
        assert begun.wait(20)
        assert posted(world, "/v1/messages/count_tokens", CHAT, other.model_key).status_code == 200
        answered.set()
        assert one.result().status_code == 200, one.result().text


def test_an_attempt_that_is_over(world: World) -> None:
    claim = world.attempt()
    assert posted(world, "/v1/chat/completions", CHAT, claim.model_key).status_code == 200
    world.do(world.queue.finish(claim.attempt_id, AttemptReport(Outcome.SUCCEEDED)))
    for _ in range(2):
        response = posted(world, "/v1/chat/completions", CHAT, claim.model_key)
        assert response.status_code == 403 and "is over" in response.text
    assert len(world.turns(claim.attempt_id)) == 1
    silent = world.attempt()
    assert posted(world, "/v1/chat/completions", CHAT, silent.model_key).status_code == 200
    before = world.endpoint.metrics()["endpoint/attempts"]
    world.do(world.queue.finish(silent.attempt_id, AttemptReport(Outcome.SUCCEEDED)))
    world.do(world.endpoint.sweep())
    assert world.endpoint.metrics()["endpoint/attempts"] < before
    assert not world.do(_known(world, silent.attempt_id))


async def _known(world: World, key: AttemptId) -> bool:
    return key in world.endpoint._sessions


def test_tags(world: World) -> None:
    claim = world.attempt()
    headers = {"authorization": f"Bearer {claim.model_key}", "x-etude-tags": "planner, first,"}
    assert CLIENT.post(f"{world.url}/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert world.turns(claim.attempt_id)[0].tags == ("planner", "first")


def test_stop_strings() -> None:
    with serving(scripted("One, two, three.<|im_end|>"), chat_of()) as world:
        claim = world.attempt()
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
            whole = client.chat.completions.create(**CHAT, stop=[", th", "nowhere"]).choices[0]
            chunks = list(client.chat.completions.create(**CHAT, stop=", th", stream=True))
        assert whole.message.content == "One, two" and whole.finish_reason == "stop"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "One, two"
        with anthropic.Anthropic(base_url=world.root, api_key=claim.model_key) as claude:
            message = claude.messages.create(**CLAUDE | {"max_tokens": 99}, stop_sequences=[", th"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", th")
        decode = world.endpoint.chat.tokenizer.decode
        assert [decode(turn.completion.ids) for turn in world.turns(claim.attempt_id)] == ["One, two, th"] * 3


def test_the_runs_parameters_are_forced() -> None:
    upstream = scripted()
    train, val = SamplingParams(max_tokens=20, stop=("!",)), SamplingParams(max_tokens=30, temperature=0.0)
    with serving(upstream, chat_of(), train=train, val=val) as world:
        mine = {**CHAT, "temperature": 0.3, "seed": 5, "max_tokens": 100, "stop": ["?"], "presence_penalty": 1}
        response = posted(world, "/v1/chat/completions", mine, world.attempt().model_key)
        assert response.headers["x-etude-ignored"] == "temperature, seed, max_tokens, presence_penalty"
        response = posted(world, "/v1/chat/completions", {**CHAT, "max_tokens": 7}, world.attempt("val").model_key)
        assert "x-etude-ignored" not in response.headers
    one, other = upstream.asked
    assert (one.temperature, one.max_tokens, one.stop) == (1.0, 20, ("!", "?")) and one.seed not in (None, 5)
    assert (other.temperature, other.max_tokens) == (0.0, 7)


def test_the_agents_parameters_hold_where_they_are_not_forced() -> None:
    upstream = scripted()
    config = EndpointConfig(parameters="default")
    with serving(upstream, chat_of(), val=SamplingParams(top_k=7), config=config) as world:
        key, scored = world.attempt().model_key, world.attempt("val").model_key
        for path, mine, owner in (
            ("/v1/chat/completions", {"seed": 5, "n": 2, "max_tokens": 2000}, key),
            ("/v1/completions", {"temperature": 0.3, "top_p": 0.5, "logit_bias": {"3": 1.0}}, scored),
        ):
            response = posted(world, path, {**CALLS[path], **mine}, owner)
            assert response.status_code == 200 and "x-etude-ignored" not in response.headers
        refused = posted(world, "/v1/chat/completions", {**CHAT, "presence_penalty": 1}, scored)
        assert refused.status_code == 400 and "presence_penalty" in refused.text
    one, other, scored_call = upstream.asked
    assert [(sampling.seed, sampling.max_tokens) for sampling in (one, other)] == [(5, 2000), (6, 2000)]
    assert (scored_call.temperature, scored_call.top_p, scored_call.top_k) == (0.3, 0.5, 7)
    assert scored_call.logit_bias == {3: 1.0}


CHANGED: dict[str, Any] = {
    "temperature": 0.3,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "logit_bias": {"3": -2},
}
NEUTRAL: dict[str, Any] = {
    "temperature": 1,
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": {"3": 0},
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_training_refuses_parameters_that_change_the_distribution(path: str) -> None:
    upstream = scripted()
    assert {*CHANGED, "seed"} == set(FORCED)
    with serving(upstream, chat_of(), config=EndpointConfig(parameters="default")) as world:
        key, scored = world.attempt().model_key, world.attempt("val").model_key
        names = CHANGED if path != "/v1/messages" else {"temperature", "top_p", "top_k"}
        for name in {*names} - {"top_p", "top_k", "min_p", "min_tokens"}:  # the others say which tokens are left
            body = {**CALLS[path], name: CHANGED[name]}
            refused = posted(world, path, body, key)
            assert refused.status_code == 400, name
            assert f"'{name}' has to be left out" in error_of(path, refused)[0]
            assert "`agent.parameters=force`" in error_of(path, refused)[0]
            assert posted(world, path, body, scored).status_code == 200, name
        neutral = {name: NEUTRAL[name] for name in NEUTRAL if name in names or path != "/v1/messages"}
        neutral |= {"top_k": 0} if path == "/v1/messages" else {}
        assert posted(world, path, {**CALLS[path], **neutral}, key).status_code == 200
    assert replace(upstream.asked[-1], seed=None, max_tokens=1) == SamplingParams(max_tokens=1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_training_follows_parameters_that_exclude_tokens_and_asks_for_what_is_left(path: str) -> None:
    filters = {"top_p": 0.9, "top_k": 50}
    filters |= {} if path == "/v1/messages" else {"min_p": 0.1, "min_tokens": 1, "logit_bias": {"3": -100}}
    upstream = scripted()
    with serving(upstream, chat_of(), config=EndpointConfig(parameters="default")) as world:
        trained, scored = world.attempt().model_key, world.attempt("val").model_key
        for name, value in filters.items():
            for key in (trained, scored):
                assert posted(world, path, {**CALLS[path], name: value}, key).status_code == 200, name
                assert upstream.asked[-1].support == (key == trained)
                followed = getattr(upstream.asked[-1], name)
                assert followed == ({3: -math.inf if key == trained else -100} if name == "logit_bias" else value)


def test_seeds_are_derived() -> None:
    """Seeds follow from the attempt, the prompt and its occurrence; another run of the program has the same."""
    seeds: list[list[int | None]] = []
    for _ in range(2):
        upstream = scripted()
        with serving(upstream, chat_of()) as world:
            one, other = world.attempt().model_key, world.attempt().model_key
            for key, body in ((one, CHAT), (one, CHAT), (other, CHAT), (one, {**CHAT, "messages": [*ASK, *ASK]})):
                posted(world, "/v1/chat/completions", body, key)
        seeds.append([sampling.seed for sampling in upstream.asked])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 4


def test_an_attempt_keeps_the_version_of_its_first_call() -> None:
    """A publish between two calls gives new attempts another version, also where answers are streamed."""
    upstream, newest = scripted(), 3
    with serving(upstream, chat_of(), newest_version=lambda: newest) as world:
        one, other = world.attempt().model_key, world.attempt().model_key
        posted(world, "/v1/chat/completions", CHAT, one)
        newest = 4
        for body, key in (({**CHAT, "n": 2}, one), (CHAT, other), ({**CHAT, "stream": True}, one)):
            posted(world, "/v1/chat/completions", body, key)
    assert [sampling.version for sampling in upstream.asked] == [3, 3, 3, 4, 3]


def test_a_stream_that_its_client_drops_is_recorded() -> None:
    with serving(
        scripted("It is " + "so " * 500, pause=0.01), chat_of(), train=SamplingParams(max_tokens=5000)
    ) as world:
        claim = world.attempt()
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key) as client:
            text = ""
            with client.chat.completions.create(**CHAT, stream=True) as stream:
                for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if len(text) > 10:
                        break
            turn = blocked_until(lambda: world.turns(claim.attempt_id))[0]
        assert turn.completion.finish_reason == "abort"
        assert turn.completion.text.startswith(text) and 10 < len(turn.completion.ids) < 1500
        assert set(turn.completion.version) == {7} and len(turn.completion.logp) == len(turn.completion.ids)
        blocked_until(lambda: world.endpoint.metrics().get("endpoint/turns_aborted") == 1)
        blocked_until(lambda: world.endpoint.metrics()["endpoint/running"] == 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_turn_is_recorded_with_the_time_at_which_its_sampling_began(streamed: bool) -> None:
    with serving(scripted("so", pause=0.05), chat_of(), config=EndpointConfig(max_running=1)) as world:
        claim = world.attempt()
        called = time.time()
        response = posted(world, "/v1/chat/completions", {**CHAT, "n": 2, "stream": streamed}, claim.model_key)
        assert response.status_code == 200
        events = world.do(world.queue.history(claim.attempt_id.rollout))
        first, second = (event for event in events if isinstance(event, TurnRecorded))
        assert called <= first.began <= first.at - 0.04
        assert first.at <= second.began <= second.at - 0.04, "without the wait for the call's slot"


def test_a_call_that_its_client_drops_is_ended() -> None:
    with serving(scripted(pause=30), chat_of()) as world:
        claim = world.attempt()
        headers = {"authorization": f"Bearer {claim.model_key}"}

        async def drops() -> None:
            async with httpx2.AsyncClient(timeout=30) as client:
                call = asyncio.create_task(client.post(f"{world.url}/chat/completions", json=CHAT, headers=headers))
                await until(lambda: world.endpoint.metrics()["endpoint/running"] == 1)
                call.cancel()

        asyncio.run(drops())
        notes = blocked_until(lambda: world.notes(claim.attempt_id))
        assert [note["name"] for note in notes] == ["aborted"]
        blocked_until(lambda: world.endpoint.metrics()["endpoint/running"] == 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_takes_too_long(streamed: bool) -> None:
    with serving(
        scripted("so " * 900, pause=0.02 if streamed else 5),
        chat_of(),
        config=EndpointConfig(timeout_s=20 if streamed else 0.1),
    ) as world:
        claim = world.attempt()
        with (
            openai.OpenAI(base_url=world.url, api_key=claim.model_key, max_retries=0) as client,
            pytest.raises(openai.APIError, match="took longer than") as raised,
        ):
            for number, _ in enumerate(client.chat.completions.create(**CHAT, stream=streamed)):
                if number == 1:  # a token has come
                    skip_time(20)
        if streamed:
            (turn,) = blocked_until(lambda: world.turns(claim.attempt_id))
            assert turn.completion.finish_reason == "abort" and 1 <= len(turn.completion.ids) < 100
        else:
            assert isinstance(raised.value, openai.InternalServerError) and raised.value.status_code == 504
        assert world.endpoint.metrics()["endpoint/timed_out"] == 1


class Held(Scripted):
    """An upstream that answers once the test lets it."""

    def __init__(self, tokenizer: Tokenizer, says: Callable[[str], str]) -> None:
        super().__init__(tokenizer, says)
        self.may_answer = Event()

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        """Return the whole answer."""
        await until(self.may_answer.is_set)
        return await super().generate(prompt, sampling, images=images)


def test_too_many_calls_are_refused_with_retry_after() -> None:
    config = EndpointConfig(max_running=1, max_waiting=1)
    upstream = Held(chat_of().tokenizer, lambda _: "It is so.<|im_end|>")
    with serving(upstream, chat_of(), config=config) as world:
        key = world.attempt().model_key
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(posted, world, "/v1/messages", CLAUDE, key) for _ in range(4)]
            blocked_until(lambda: sum(call.done() for call in calls) == 2)
            upstream.may_answer.set()
            responses = [call.result() for call in calls]
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429]
        busy = next(response for response in responses if response.status_code == 429)
        assert int(busy.headers["retry-after"]) >= 1 and error_of("/v1/messages", busy)[1] == "rate_limit_error"
        assert posted(world, "/v1/messages", CLAUDE, key).status_code == 200


class Dying(Scripted):
    """An engine that dies after a few tokens."""

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        raise EngineError("The engine has gone.")

    async def stream(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> AsyncGenerator[Delta, None]:
        count = 0
        async for chunk in super().stream(prompt, sampling, images=images):
            if (count := count + 1) > 4:
                raise EngineError("The engine has gone.")
            yield chunk


def test_an_engine_that_dies() -> None:
    with serving(Dying(chat_of().tokenizer, lambda _: "It is so."), chat_of()) as world:
        claim = world.attempt()
        with openai.OpenAI(base_url=world.url, api_key=claim.model_key, max_retries=0) as client:
            with pytest.raises(openai.InternalServerError, match="The engine has gone"):
                client.chat.completions.create(**CHAT)
            with pytest.raises(openai.APIError, match="The engine has gone"):
                list(client.chat.completions.create(**CHAT, stream=True))
            events = list(client.responses.create(model="policy", input="?", stream=True))
        assert events[-1].type == "response.failed"
        with (
            anthropic.Anthropic(base_url=world.root, api_key=claim.model_key, max_retries=0) as claude,
            pytest.raises(anthropic.APIStatusError, match="The engine has gone"),
            claude.messages.stream(**CLAUDE) as stream,
        ):
            list(stream)
        turns = blocked_until(lambda: len(recorded := world.turns(claim.attempt_id)) == 3 and recorded)
        assert {(turn.completion.finish_reason, turn.completion.text) for turn in turns} == {("abort", "It i")}
        assert [note["name"] for note in world.notes(claim.attempt_id)] == ["upstream_failed"] * 4


def test_calls_of_one_attempt_at_once() -> None:
    """Each call is one turn, and each conversation continues exactly."""
    chat = chat_of()
    upstream = Scripted(chat.tokenizer, lambda prompt: f"It is {len(prompt)}.<|im_end|>", pause=0.001)
    with serving(upstream, chat) as world:
        claim = world.attempt()

        async def conversation(client: openai.AsyncOpenAI, n: int) -> None:
            messages: list[Any] = [{"role": "user", "content": f"What is {n}? {'very long ' * 3000 * (n == 2)}"}]
            for _ in range(3):
                answer = await client.chat.completions.create(model="policy", messages=messages)
                messages.append(answer.choices[0].message.model_dump(exclude_none=True))
                messages.append({"role": "user", "content": "More."})

        async def all_of_them() -> None:
            async with openai.AsyncOpenAI(base_url=world.url, api_key=claim.model_key) as client:
                await asyncio.gather(*(conversation(client, n) for n in range(5)))

        asyncio.run(all_of_them())
        turns, metrics = world.turns(claim.attempt_id), world.endpoint.metrics()
        assert [turn.index for turn in turns] == list(range(15))
        assert (metrics["endpoint/turns_begun"], metrics["endpoint/turns_continued"]) == (5, 10)
        assert "endpoint/turns_branched" not in metrics
        for name in ("latency", "overhead"):
            assert 0 < metrics[f"endpoint/{name}_p50"] <= metrics[f"endpoint/{name}_p99"]
        wholes = {np.concatenate([turn.prompt, turn.completion.ids]).tobytes() for turn in turns}
        assert len(wholes) == 15


def test_a_prompt_that_no_context_could_hold_is_not_read(world: World) -> None:
    claim = world.attempt()
    for change in ({"messages": [{"role": "user", "content": "a" * 64 * 201}]}, {"messages": ASK * 201}):
        began = time.process_time()
        response = posted(world, "/v1/chat/completions", {**CHAT, **change}, claim.model_key)
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
        assert "characters in" in response.json()["error"]["message"] and time.process_time() - began < 5


def _tool(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    if path.startswith("/v1/messages"):
        return {"name": "look", "input_schema": schema}
    function = {"name": "look", "parameters": schema}
    return {"type": "function", **function} if path == "/v1/responses" else {"type": "function", "function": function}


def test_tools_with_too_many_values_are_refused_before_they_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    render_text = ChatRenderer.render_text
    monkeypatch.setattr(request, "MAX_TOOL_VALUES", 200)
    monkeypatch.setattr(
        ChatRenderer, "render_text", lambda self, *given: rendered.append("it") or render_text(self, *given)
    )
    with serving(scripted(), chat_of()) as world:
        for path in (path for path in CALLS if path != "/v1/completions"):
            for parameters, status in ((100, 400), (90, 200)):
                schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(parameters)}}
                body = {**CALLS[path], "tools": [_tool(path, schema)]}
                response = posted(world, path, body, world.attempt().model_key)
                assert response.status_code == status, response.text
                assert bool(rendered) == (status == 200)
                if status == 400:
                    assert "'tools' has more than 200 values" in error_of(path, response)[0]
            rendered.clear()


class Failing(Scripted):
    """An engine that gives two answers and fails at the third. It counts the largest number of concurrent calls."""

    under_way = most = 0

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, images: PromptImages | None = None
    ) -> Completion:
        """Answer, or fail at the third call."""
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if len(self.asked) == 2:
                await asyncio.sleep(0.1)
                raise EngineError("it broke")
            return await super().generate(prompt, sampling, images=images)
        finally:
            self.under_way -= 1


def test_of_several_answers_the_complete_ones_are_recorded_and_the_limit_is_kept() -> None:
    upstream = Failing(chat_of().tokenizer, lambda _: "It is so.<|im_end|>", pause=0.01)
    with serving(upstream, chat_of(), config=EndpointConfig(max_running=2)) as world:
        claim = world.attempt()
        assert posted(world, "/v1/chat/completions", {**CHAT, "n": 3}, claim.model_key).status_code == 500
        assert len(world.turns(claim.attempt_id)) == 2
        assert upstream.most == 2


def test_a_text_that_continues_after_an_end_of_turn_has_that_end_once() -> None:
    ends = "<|im_end|>"
    with serving(scripted(f"Hello{ends}"), chat_of()) as world:
        claim = world.attempt()
        ask = {"model": "policy", "prompt": "a"}
        text = posted(world, "/v1/completions", ask, claim.model_key).json()["choices"][0]["text"]
        assert text == "Hello"
        posted(world, "/v1/completions", {**ask, "prompt": f"a{text}{ends}\nb"}, claim.model_key)
        first, second = world.turns(claim.attempt_id)
        whole = np.concatenate([first.prompt, first.completion.ids])
        assert np.array_equal(second.prompt[: len(whole)], whole)
        assert chat_of().tokenizer.decode(second.prompt, keep_special_tokens=True) == f"aHello{ends}\nb"
