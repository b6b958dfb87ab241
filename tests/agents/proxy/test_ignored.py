"""Fields that the run decides are accepted, have no effect, and are named in a header and once in the log. A strict
endpoint refuses them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2
import pytest

from etude.agents.proxy import EndpointConfig
from etude.agents.proxy.anthropic import MESSAGES
from etude.agents.proxy.chat_completions import CHAT_COMPLETIONS
from etude.agents.proxy.completions import COMPLETIONS
from etude.agents.proxy.request_fields import FieldRule
from etude.agents.proxy.responses import RESPONSES
from etude.records import SamplingParams
from tests.agents.proxy.test_exact import CLAUDE
from tests.agents.proxy.test_faults import CALLS, CHAT, CLIENT, error_of, posted, scripted
from tests.agents.proxy.world import World, chat_of, serving
from tests.chat.conversations import WEATHER
from tests.sweeps import sweep

TABLES = {
    "/v1/chat/completions": CHAT_COMPLETIONS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
BY_TREATMENT = [(path, name, rule) for path, table in TABLES.items() for name, rule in table.items()]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Mapping[bool, World]]:
    """A lenient endpoint and a strict one."""
    options: dict[str, Any] = {"train": SamplingParams(max_tokens=50)}
    with (
        serving(scripted(), chat_of(), **options) as world,
        serving(scripted(), chat_of(), config=EndpointConfig(strict=True), **options) as strict,
    ):
        yield {False: world, True: strict}


def body_with(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with these fields, which may be nested in objects."""
    body = dict(CALLS[path])
    for name, value in fields.items():
        outer, _, inner = name.partition(".")
        needed = {"type": "auto"} if outer == "tool_choice" else {}
        body[outer] = {**needed, **body.get(outer, {}), inner: value} if inner else value
    return body


def named(response: httpx2.Response) -> list[str]:
    return [name for name in response.headers.get("x-etude-ignored", "").split(", ") if name]


@pytest.mark.parametrize("strict", [False, True])
def test_each_field_is_treated_as_its_table_says(worlds: Mapping[bool, World], strict: bool) -> None:
    world = worlds[strict]
    key = world.attempt().model_key
    for path, table in TABLES.items():
        rules = {name: rule for name, rule in table.items() if rule.treatment not in ("obeyed", "sampling")}
        refused = ("refused", "ignored") if strict else ("refused",)
        accepted = [name for name, rule in rules.items() if rule.treatment not in refused]
        for name in rules.keys() - set(accepted):
            response = posted(world, path, body_with(path, {name: "anything"}), key)
            assert response.status_code == 400, f"{path} {name}: {response.text}"
            assert f"'{name}' {rules[name].reason}" in error_of(path, response)[0]
        response = posted(world, path, body_with(path, dict.fromkeys(accepted, "anything")), key)
        assert response.status_code == 200 and sorted(named(response)) == sorted(accepted), f"{path}: {response.text}"
        for place in range(max(len(rule.neutral) for rule in rules.values())):
            neutral = {name: rule.neutral[place] for name, rule in rules.items() if place < len(rule.neutral)}
            response = posted(world, path, body_with(path, neutral), key)
            assert response.status_code == 200 and not named(response), f"{path} {neutral}: {named(response)}"


@pytest.mark.parametrize("path", TABLES)
def test_an_unknown_field_is_reported_or_refused(worlds: Mapping[bool, World], path: str) -> None:
    key = worlds[False].attempt().model_key
    response = posted(worlds[False], path, {**CALLS[path], "brand_new": {"a": [1]}}, key)
    assert response.status_code == 200 and named(response) == ["brand_new"]
    hostile = {**CALLS[path], "a\r\nset-cookie: b": 1, "ü" * 900: 1} | {f"f{n}": n for n in range(500)}
    response = posted(worlds[False], path, hostile, key)
    assert response.status_code == 200 and "set-cookie" not in response.headers
    assert named(response)[:2] == ["another", "f0"] and len(named(response)) == 32
    response = posted(worlds[True], path, {**CALLS[path], "brand_new": 1}, worlds[True].attempt().model_key)
    assert response.status_code == 400 and "'brand_new' is not supported" in error_of(path, response)[0]


NAMESPACE = {"type": "namespace", "name": "agents", "tools": []}
FLAT = {"type": "function", **WEATHER["function"]}
NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
OTHER = {"type": "function", "function": {"name": "other"}}
BLOCKS = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "It is."}]
THOUGHT = [{"type": "thinking", "thinking": "I know.", "signature": ""}, {"type": "text", "text": "It is."}]
USER = {"role": "user", "content": "?"}
PARTS: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"tools": [WEATHER, {"type": "custom", "custom": {"name": "x"}}]}, "tools.custom"),
    ("chat/completions", {"tools": [WEATHER, OTHER], "tool_choice": ALLOWED}, "tool_choice.allowed_tools"),
    ("responses", {"tools": [FLAT, NAMESPACE]}, "tools.namespace"),
    ("responses", {"tools": [FLAT, {"type": "web_search"}]}, "tools.web_search"),
    ("responses", {"input": [{"type": "web_search_call", "id": "ws"}, USER]}, "input.web_search_call"),
    ("responses", {"include": ["web_search_call.results"]}, "include.web_search_call.results"),
    ("messages", {"tools": [CLAUDE, {"type": "web_search_20250305", "name": "w"}]}, "tools.web_search_20250305"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": BLOCKS}, USER]}, "messages.redacted_thinking"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": THOUGHT}, USER]}, "messages.thinking"),
]


@pytest.mark.parametrize(("path", "change", "note"), PARTS)
def test_unsupported_parts_are_left_out(
    worlds: Mapping[bool, World], path: str, change: dict[str, Any], note: str
) -> None:
    path = f"/v1/{path}"
    claim, strict = worlds[False].attempt(), worlds[True].attempt()
    response = posted(worlds[False], path, {**CALLS[path], **change}, claim.model_key)
    assert response.status_code == 200, response.text
    assert named(response) == [note]
    shown = chat_of().tokenizer.decode(worlds[False].turns(claim.attempt_id)[0].prompt)
    assert "I know." not in shown and "namespace" not in shown
    response = posted(worlds[True], path, {**CALLS[path], **change}, strict.model_key)
    assert response.status_code == 400 and error_of(path, response)[0]
    assert not worlds[True].turns(strict.attempt_id)


def test_a_strict_endpoint_accepts_fields_that_change_no_answer(worlds: Mapping[bool, World]) -> None:
    body = {**CHAT, "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "top_k": -1}
    response = posted(worlds[True], "/v1/chat/completions", body, worlds[True].attempt().model_key)
    assert response.status_code == 200 and named(response) == ["user", "metadata", "store", "service_tier"]
    body = {**CALLS["/v1/messages"], "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
    response = posted(worlds[True], "/v1/messages", body, worlds[True].attempt().model_key)
    assert response.status_code == 200 and named(response) == ["cache_control"]


def test_each_name_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), serving(scripted(), chat_of()) as world:
        key = world.attempt().model_key
        for field in ("reasoning_effort", "reasoning_effort", "verbosity"):
            posted(world, "/v1/chat/completions", {**CHAT, field: "low", "temperature": 0.5}, key)
    lines = [record.getMessage() for record in caplog.records if "x-etude-ignored" in record.getMessage()]
    assert len(lines) == 2 and "`temperature`, `reasoning_effort`" in lines[0] and "`verbosity`" in lines[1]
    assert "reasoning_effort" not in lines[1]


def test_a_table_gives_the_reason_for_each_field() -> None:
    for _, name, rule in BY_TREATMENT:
        assert isinstance(rule, FieldRule) and (
            rule.reason.endswith(".") or rule.treatment not in ("ignored", "refused")
        ), name


@sweep(
    ("method", "path", "status", "claude"),
    [
        ("GET", "/v1/chat/completions", 405, False),
        ("POST", "/chat/completions", 404, False),
        ("POST", "/v1/v1/messages", 404, True),
        ("POST", "/v1/embeddings", 404, False),
        ("DELETE", "/v1/responses/resp_0-0-1", 404, False),
        ("GET", "/models", 404, False),
        ("GET", "/models/some/model", 404, False),
        ("POST", "/messages/count_tokens", 404, True),
        ("GET", "/responses/resp_0-0-1", 404, False),
    ],
)
def test_an_unknown_route_is_refused_in_the_dialect(
    worlds: Mapping[bool, World], method: str, path: str, status: int, claude: bool
) -> None:
    response = CLIENT.request(method, worlds[False].root + path)
    assert response.status_code == status
    body = response.json()
    assert set(body["error"]) == ({"type", "message"} if claude else {"message", "type", "param", "code"})
    assert f"This endpoint has no route {method} {path}" in body["error"]["message"]
    for name in TABLES:
        assert f"POST {name}" in body["error"]["message"]
