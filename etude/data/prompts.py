"""Prompts: their forms in data files, and their conversion to messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import DataError
from etude.records import ContentPart, Message, ToolCall


def parse_prompt(prompt: str | Sequence[Mapping[str, Any]]) -> str | tuple[Message, ...]:
    """Convert a task's prompt for the model: text stays text, and mappings become messages.

    Messages have OpenAI's keys: `role`, `content` (text, or parts with a `type`), `tool_calls`, `tool_call_id`,
    `name`, and `reasoning` or `reasoning_content`. The model does not see other keys.
    """
    return prompt if isinstance(prompt, str) else tuple(_parse_message(message) for message in prompt)


def check_prompt(value: Any, where: str, what: str = "prompt") -> str | list[dict[str, Any]]:
    """Check the prompt of a row and return it, without the nulls that a table adds for missing keys.

    what: the name of the value in errors, for other values that are text or messages.
    """
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        actual = repr(value) if value in (None, "", []) else f"a value of type {type(value).__name__}"
        raise DataError(f"{where} has {actual} for a {what}; it must be text, or a list of messages.")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where} has {message!r} for message {index} of its {what}; a message is a mapping with a `role` and "
                f"its `content`."
            )
        if message.get("content") is None and not message.get("tool_calls"):
            keys = ", ".join(name for name, value in message.items() if value is not None)
            raise DataError(
                f"{where} has a message without `content` at place {index} of its {what}: it has {keys}. "
                f"Give it one; only a message with `tool_calls` may do without."
            )
    return [drop_nulls(message) for message in value]


def drop_nulls(value: Any) -> Any:
    """Remove the nulls that a table adds for missing keys."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def _parse_message(message: Mapping[str, Any]) -> Message:
    content = message.get("content", "")
    return Message(
        role=message["role"],
        content=content if isinstance(content, str) else tuple(_parse_part(part) for part in content),
        reasoning=message.get("reasoning", message.get("reasoning_content", "")),
        tool_calls=tuple(_parse_tool_call(call) for call in message.get("tool_calls", ())),
        tool_call_id=message.get("tool_call_id", ""),
        name=message.get("name", ""),
    )


def _parse_part(part: Mapping[str, Any]) -> ContentPart:
    """Parse a part: `{"type": "text", "text": …}`, or `{"type": "image_url", "image_url": {"url": …}}`."""
    kind = part["type"]
    nested = part.get(kind)
    url = nested["url"] if isinstance(nested, Mapping) else part.get("url", "")
    return ContentPart(kind, text=part.get("text", ""), url=url)


def _parse_tool_call(call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function", call)
    arguments = function.get("arguments", "{}")
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(call.get("id", ""), function["name"], arguments_text)
