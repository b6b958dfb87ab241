"""Prompts in data files: text, or messages in the JSON form that `etude.chat` reads."""

from __future__ import annotations

from typing import Any

from etude.errors import DataError


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
