"""Answers have the form that a request asks for, in every dialect, from a random model; and are trained on by it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.agents.proxy import EndpointConfig
from etude.chat import ChatRenderer, Tokenizer
from etude.chat.answer_grammar import AnswerForm, answer_grammar
from etude.models import create, tiny_config
from etude.records import SamplingParams
from tests.agents.proxy.test_faults import error_of, posted
from tests.agents.proxy.world import World, serving
from tests.chat.made import byte_level, ends_of, published, save
from tests.rollout.engines import engine_of

USER = {"role": "user", "content": "?"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": SCHEMA, "strict": True}
CALL = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 2}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOK, GO = ({"name": name, "description": "It does.", "parameters": CALL, "strict": True} for name in ("look", "go"))
TOOLS = [{"type": "function", "function": tool} for tool in (LOOK, GO)]
TEMPLATES = {"hermes": "qwen3", "qwen_xml": "qwen3_5_nothink", "llama3": "llama3_1"}


@contextmanager
def random_model(tool_format: str, directory: Path, **options: Any) -> Iterator[World]:
    """Serve an endpoint over a random model, which would never write JSON by itself."""
    name = TEMPLATES[tool_format]
    template, ends = published()[name], ends_of(name)
    tokenizer = Tokenizer.load(save(directory, byte_level(template, ends), template, ends))
    model = create(tiny_config(tokenizer.vocab_size, layers=1, hidden=16, heads=2, kv_heads=1, context=2048), seed=0)
    thinks_not = {"enable_thinking": False} if "enable_thinking" in template else {}
    chat = ChatRenderer(tokenizer, template_kwargs=thinks_not)
    assert chat.tool_format == tool_format
    options = {"context": 2048, "train": SamplingParams(max_tokens=300), "holds_grammars": True, **options}
    with engine_of(model, tokenizer, kv_gib=0.02) as engine, serving(engine, chat, **options) as world:
        yield world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with random_model("hermes", tmp_path_factory.mktemp("forms")) as world:
        yield world


def answered(world: World, path: str, body: Mapping[str, Any], *, ignored: str = "") -> dict[str, Any]:
    """Return the response to a call, whose turn has sets of tokens."""
    claim = world.attempt()
    response = posted(world, f"/v1/{path}", {"model": "policy", **body}, claim.model_key)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-etude-ignored", "") == ignored
    (turn,) = world.turns(claim.attempt_id)
    assert turn.completion.support is not None
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: Mapping[str, Any]) -> str:
    """Return the text of an answer of any dialect."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    items = [item["content"] for item in answer.get("output", ()) if item["type"] == "message"]
    parts = items[0] if items else answer["content"]
    return "".join(part["text"] for part in parts if part["type"] in ("text", "output_text"))


def check_person(text: str) -> None:
    person = json.loads(text)
    assert isinstance(person["name"], str) and len(person["name"]) <= 5 and 0 <= person["age"] <= 150
    assert set(person) <= {"name", "age", "tags"} and set(person.get("tags", [])) <= {"a", "bb"}


OF_CLAUDE = {"messages": [USER], "max_tokens": 300}
CLAUDES = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": NAMED}}),
        ("responses", {"input": "?", "text": {"format": {"type": "json_schema", **NAMED}}}),
        ("messages", {**OF_CLAUDE, "output_format": CLAUDES}),
        ("messages", {**OF_CLAUDE, "output_config": {"format": CLAUDES}}),
        ("chat/completions", {"messages": [USER], "guided_json": json.dumps(SCHEMA)}),
        ("completions", {"prompt": "?", "max_tokens": 300, "structured_outputs": {"json": SCHEMA}}),
    ],
)
def test_an_answer_has_the_schema_that_the_request_names(world: World, path: str, body: dict[str, Any]) -> None:
    for _ in range(3):
        check_person(text_of(answered(world, path, body)))


def test_an_answer_matches_a_pattern_is_one_of_some_texts_or_follows_a_grammar(world: World) -> None:
    chat = {"messages": [USER]}
    for fields, pattern in (
        ({"regex": "[ab]+/x"}, "[ab]+/x"),
        ({"guided_choice": ["yes", 'no "way"']}, 'yes|no "way"'),
        ({"ebnf": 'root ::= "x"* "y"'}, "x*y"),
        ({"structured_outputs": {"grammar": 'start: "x" start | "y"'}}, "x*y"),
    ):
        for _ in range(3):
            assert re.fullmatch(pattern, text_of(answered(world, "chat/completions", {**chat, **fields})))
    free = answered(world, "chat/completions", {**chat, "response_format": {"type": "json_object"}, "max_tokens": 40})
    assert text_of(free).lstrip().startswith("{")


def calls_of(answer: Mapping[str, Any]) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def check_calls(calls: list[tuple[str, Any]]) -> None:
    for name, arguments in calls:
        assert name in ("look", "go") and arguments["city"] in ("Bern", "Rome")
        assert set(arguments) <= {"city", "days"} and arguments.get("days", 1) in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("tool_format", TEMPLATES)
def test_a_required_call_has_the_schema_of_a_tool(tool_format: str, tmp_path: Path) -> None:
    with random_model(tool_format, tmp_path) as world:
        body = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False}
        named = {"type": "function", "function": {"name": "go"}}
        for choice in ("required", "required", named):
            (call,) = calls_of(answered(world, "chat/completions", {**body, "tool_choice": choice}))
            check_calls([call])
            assert choice == "required" or call[0] == "go"


@pytest.mark.slow
@pytest.mark.parametrize("tool_format", ["hermes", "qwen_xml"])
def test_calls_among_text_have_the_schema_of_their_tool(tool_format: str, tmp_path: Path) -> None:
    with random_model(tool_format, tmp_path, train=SamplingParams(max_tokens=200)) as world:
        seen = []
        for _ in range(12):
            answer = answered(world, "chat/completions", {"messages": [USER], "tools": TOOLS})
            seen += calls_of(answer)
            (choice,) = answer["choices"]
            assert "<tool_call>" not in (choice["message"]["content"] or "") or choice["finish_reason"] == "length"
        check_calls(seen)
        assert seen, "a random model opens a call now and then"


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("chat/completions", {"messages": [USER], "regex": "[a"}, "'regex' cannot be followed"),
        ("chat/completions", {"messages": [USER], "regex": "a", "guided_choice": ["b"]}, "both say what form"),
        ("chat/completions", {"messages": [USER], "guided_choice": []}, "list of strings that is not empty"),
        ("chat/completions", {"messages": [USER], "guided_json": "{"}, "must be a JSON schema"),
        ("chat/completions", {"messages": [USER], "response_format": {"type": "xml"}}, "must have the type"),
        ("chat/completions", {"messages": [USER], "guided_grammar": "start: missing"}, "cannot be followed"),
        (
            "chat/completions",
            {
                "messages": [USER, {"role": "assistant", "content": "{"}],
                "continue_final_message": True,
                "response_format": {"type": "json_object"},
            },
            "cannot hold an answer that the request begins",
        ),
        ("responses", {"input": "?", "text": {"format": {"type": "json_schema"}}}, "with a 'schema'"),
        ("messages", {"messages": [USER], "max_tokens": 9, "output_format": {"type": "json"}}, "must have the type"),
    ],
)
def test_a_form_that_cannot_be_is_refused_in_a_sentence(
    world: World, path: str, body: dict[str, Any], reason: str
) -> None:
    claim = world.attempt()
    response = posted(world, f"/v1/{path}", {"model": "policy", **body}, claim.model_key)
    assert response.status_code == 400 and reason in error_of(f"/v1/{path}", response)[0], response.text
    assert not world.turns(claim.attempt_id)


def test_a_keyword_that_no_answer_is_held_to_is_named_or_refused(world: World, tmp_path: Path) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": [USER], "response_format": format}
    assert json.loads(text_of(answered(world, "chat/completions", body, ignored="response_format"))) is not None
    with random_model("hermes", tmp_path, config=EndpointConfig(strict=True)) as strict:
        body = {"model": "policy", **body}
        response = posted(strict, "/v1/chat/completions", body, strict.attempt().model_key)
        assert response.status_code == 400
        assert "'response_format' cannot be followed" in error_of("/v1/chat/completions", response)[0]


def test_reasoning_comes_before_the_form(tmp_path: Path) -> None:
    template = published()["qwen3"]
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(template, ends_of("qwen3")), template, ends_of("qwen3")))
    form = AnswerForm("json", {"type": "object", "properties": {"a": {"type": "integer"}}}, "response_format")
    for options, answers in (
        ({}, {'{"a": 1}': True, '<think>\nI {think}.\n</think>\n\n{"a": 1}': True, "I think": False}),
        ({"enable_thinking": False}, {'{"a": 1}': True, '<think>\n</think>\n\n{"a": 1}': False}),
    ):
        chat = ChatRenderer(tokenizer, template_kwargs=options)
        grammar = answer_grammar(chat, chat.prompt_ids([USER]), form, None)
        for text, allowed in answers.items():
            matcher = tokenizer.grammars.matcher(grammar)
            ids = [*tokenizer.encode(text).tolist(), tokenizer.eos_ids[0]]
            assert all(matcher.mask(tokenizer.vocab_size)[id] and not matcher.push(id) for id in ids) is allowed, text


def test_an_engine_without_grammars_ignores_forms_or_refuses_them(tmp_path: Path) -> None:
    body = {"model": "policy", "messages": [USER], "tools": TOOLS, "max_tokens": 3, "parallel_tool_calls": False}
    body |= {"response_format": {"type": "json_object"}}
    names = "response_format, tools.strict, parallel_tool_calls"
    for strict in (False, True):
        config = EndpointConfig(strict=strict)
        with random_model("hermes", tmp_path, holds_grammars=False, config=config) as world:
            response = posted(world, "/v1/chat/completions", body, world.attempt().model_key)
            if strict:
                assert response.status_code == 400
                assert "'response_format' cannot be enforced" in error_of("/v1/chat/completions", response)[0]
            else:
                assert response.status_code == 200 and response.headers["x-etude-ignored"] == names
