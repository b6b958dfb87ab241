"""Requests of each dialect whose form may be read in more than one way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etude.agents.proxy.anthropic import AnthropicDialect
from etude.agents.proxy.chat_completions import ChatCompletionsDialect
from etude.agents.proxy.openai import sse_event
from etude.agents.proxy.request import APIDialect, APIError, ModelRequest
from etude.agents.proxy.request_fields import parse_request
from etude.agents.proxy.responses import ResponsesDialect
from etude.records import Message, ToolCall

USER = {"role": "user", "content": "Weather?"}
CHAT: dict[str, Any] = {"model": "policy", "messages": [USER]}
CLAUDE: dict[str, Any] = {**CHAT, "max_tokens": 9}
RESPONSE: dict[str, Any] = {"model": "policy", "input": [USER]}
NAME = "resp_0-0-0a1b2c3d-7"
SAID = Message(
    "assistant",
    "First.\nThen more.",
    reasoning="I look. I look again.",
    tool_calls=(ToolCall("c0", "weather", '{"city": "Bern"}'), ToolCall("c1", "weather", '{"city": "Rome"}')),
)


def read(dialect: APIDialect, body: dict[str, Any], *, strict: bool = False) -> ModelRequest:
    return parse_request(dialect, body, {NAME: SAID}.get, strict=strict)


# -- a field's name that has a dot in it ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "body", "name"),
    [
        (ChatCompletionsDialect(), CHAT, "stream_options.include_usage"),
        (ResponsesDialect(), RESPONSE, "reasoning.effort"),
        (ResponsesDialect(), RESPONSE, "text.format"),
        (AnthropicDialect(), CLAUDE, "tool_choice.disable_parallel_tool_use"),
    ],
)
def test_a_name_with_a_dot_is_no_field_within_another(dialect: APIDialect, body: dict[str, Any], name: str) -> None:
    assert read(dialect, {**body, name: False}).ignored == (name,)
    with pytest.raises(APIError, match=rf"'{name}' is not supported by this endpoint"):
        read(dialect, {**body, name: False}, strict=True)


# -- items that are sent by their ids alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [USER, {"type": "function_call_output", "call_id": "c0", "output": "rain"}])
def test_an_answer_whose_items_are_named_is_read_once(ended: dict[str, Any]) -> None:
    """A streamed answer has an item with text before each call, and one after the last."""
    ids = [f"rs_{NAME}_0", f"msg_{NAME}_1", f"fc_{NAME}_call0", f"rs_{NAME}_3", f"msg_{NAME}_4", f"fc_{NAME}_call1"]
    names = [{"type": "item_reference", "id": id} for id in ids]
    request = read(ResponsesDialect(), {**RESPONSE, "input": [USER, *names, ended]})
    assert request.messages[1] == SAID and len(request.messages) == 3


def test_items_that_are_sent_are_read_in_their_order() -> None:
    texts = [{"type": "message", "role": "assistant", "id": f"msg_{NAME}_{n}", "content": f"{n}."} for n in range(3)]
    request = read(ResponsesDialect(), {**RESPONSE, "input": [USER, *texts, USER]})
    assert request.messages[1] == Message("assistant", "0.1.2.")


def test_unreadable_thinking_alone_is_no_message() -> None:
    thought = {"type": "reasoning", "id": "rs_other", "summary": [], "encrypted_content": "x"}
    request = read(ResponsesDialect(), {**RESPONSE, "input": [USER, thought, USER]})
    assert [message.role for message in request.messages] == ["user", "user"]
    silent = {"type": "message", "role": "assistant", "content": ""}
    assert len(read(ResponsesDialect(), {**RESPONSE, "input": [USER, thought, silent, USER]}).messages) == 3


# -- a choice among some of the tools ---------------------------------------------------------------------------------


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


def among(mode: str, *names: str) -> dict[str, Any]:
    """Return the same tool choice in each dialect: the parsed choice, and whether it is among some of the tools."""
    fields = {"tools": tools("a", "b", "c")}
    flat = {"mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    nested = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}
    one = read(ResponsesDialect(), {**RESPONSE, **fields, "tool_choice": {"type": "allowed_tools", **flat}})
    forms = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in fields["tools"]]
    choice = {"type": "allowed_tools", "allowed_tools": nested}
    other = read(ChatCompletionsDialect(), {**CHAT, "tools": forms, "tool_choice": choice})
    assert (one.tool_choice, one.tool_name, one.limits) == (other.tool_choice, other.tool_name, other.limits)
    return {"choice": one.tool_choice, "named": one.tool_name, "limited": bool(one.limits.allowed)}


def test_a_choice_among_some_of_the_tools_is_read() -> None:
    assert among("required", "b") == {"choice": "required", "named": "b", "limited": False}
    assert among("required", "b", "elsewhere") == {"choice": "required", "named": "b", "limited": False}
    assert among("required", "a", "b") == {"choice": "required", "named": "", "limited": True}
    assert among("required", "a", "b", "c") == {"choice": "required", "named": "", "limited": False}
    assert among("auto", "b") == {"choice": "auto", "named": "", "limited": True}
    assert among("auto", "a", "b", "c") == {"choice": "auto", "named": "", "limited": False}
    with pytest.raises(APIError, match="tool_choice"):
        among("required", "elsewhere")


# -- messages without content -----------------------------------------------------------------------------------------

SEARCH = {"type": "server_tool_use", "id": "s", "name": "web", "input": {}}
FOREIGN = {"type": "thinking", "thinking": "x", "signature": "of another"}


@pytest.mark.parametrize("block", [SEARCH, FOREIGN])
def test_an_assistant_message_without_readable_parts_is_left_out(block: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": [block]}
    assert [m.role for m in read(AnthropicDialect(), {**CLAUDE, "messages": [USER, message, USER]}).messages] == [
        "user",
        "user",
    ]
    last = read(AnthropicDialect(), {**CLAUDE, "messages": [USER, message]})
    assert len(last.messages) == 1 and last.prefill is None
    with pytest.raises(APIError, match="has no message to answer"):
        read(AnthropicDialect(), {**CLAUDE, "messages": [message]})
    beside = {"role": "assistant", "content": [block, {"type": "text", "text": "It is."}]}
    assert len(read(AnthropicDialect(), {**CLAUDE, "messages": [USER, beside, USER]}).messages) == 3
    silent = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    assert len(read(AnthropicDialect(), {**CLAUDE, "messages": [USER, silent, USER]}).messages) == 3, "it said nothing"


# -- events, as clients divide them -----------------------------------------------------------------------------------


def test_an_event_is_one_line_also_for_clients_that_know_the_line_ends_of_unicode() -> None:
    body = {"text": "a\u2028b\x85c\u2029d\n"}
    data, *rest = sse_event(body).decode().splitlines()
    assert not any(rest) and json.loads(data.removeprefix("data: ")) == body
