"""Prompts as data files write them become the messages that a template reads."""

from __future__ import annotations

from etude.data.prompts import check_prompt, parse_prompt
from etude.records import ContentPart, Message, ToolCall


def test_text_prompts_stay_text() -> None:
    assert parse_prompt("2+2?") == "2+2?"


def test_messages_in_openais_form_are_read() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    prompt = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "This?"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "add", "content": "4", "weight": 0},
    ]
    assert parse_prompt(prompt) == (
        Message("system", "Be brief."),
        Message("user", (ContentPart("text", text="This?"), ContentPart("image_url", url="u"))),
        Message("assistant", "", reasoning="Hm.", tool_calls=(ToolCall("1", "add", '{"a": 2}'),)),
        Message("tool", "4", tool_call_id="1", name="add"),
    )


def test_a_tool_call_may_hold_its_arguments_as_a_mapping() -> None:
    (message,) = parse_prompt([{"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"ä": 2}}]}])
    assert isinstance(message, Message)
    assert message.tool_calls == (ToolCall("", "add", '{"ä": 2}'),)


def test_nulls_are_removed_at_any_depth() -> None:
    parts = [{"type": "text", "text": "a", "image_url": None}]
    assert check_prompt([{"role": "user", "content": parts, "name": None}], "row 0") == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]}
    ]
