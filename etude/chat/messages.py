"""Messages in and out of the JSON form that people, agents and chat templates write, and when two are the same.

Exact continuation rests on `is_same_message`: an agent sends back the conversation it has had, and small differences
that the model never saw must not make it a new one, while any difference in what was said must.

- Role, name, call ids and text are equal character by character; white space counts.
- A list of text parts is the text they join to. Other parts are equal part by part.
- The arguments of a call are equal as JSON values: key order and spacing do not count, but 1, 1.0 and true are three
  different values. Arguments that are not JSON are compared as text.
- Reasoning that was served may be left out of what comes back, or come back in part: clients drop it, cut it, and strip
  or join its white space. What comes back is found in what was served, white space aside.
- A stop string that ended an answer may be written back at its end, and words of the agent's own after it
  (`conversation`).
- Tools are equal as JSON values, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import ChatError
from etude.records import ContentPart, Message, ToolCall

__all__ = [
    "REASONING_KEYS",
    "ROLES",
    "check_roles",
    "content_text",
    "is_same_message",
    "message_from_dict",
    "message_hash",
    "message_to_dict",
    "same_tools",
]

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def check_roles(messages: Sequence[Message]) -> None:
    """Refuse a message by somebody no template knows."""
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise ChatError(
                f"Message {index} of the conversation has the role '{message.role}'; a message is by one of "
                f"{', '.join(ROLES)}. Rename the role."
            )


def content_text(content: str | tuple[ContentPart, ...]) -> str | None:
    """The text of a message's content, or None where some of it is not text."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content) if all(part.kind == "text" for part in content) else None


def message_from_dict(data: Mapping[str, Any]) -> Message:
    """A message from its JSON form: the `{"role": …, "content": …}` of datasets and of OpenAI-compatible requests."""
    if not isinstance(data.get("role"), str):
        raise ChatError(f"A message needs a text under 'role'; this one has the keys {', '.join(map(str, data))}.")
    reasoning = next((data[key] for key in REASONING_KEYS if data.get(key) is not None), "")
    return Message(
        role=data["role"],
        content=_parse_content(data.get("content")),
        reasoning=reasoning,
        tool_calls=tuple(_parse_call(call) for call in data.get("tool_calls") or ()),
        tool_call_id=data.get("tool_call_id") or "",
        name=data.get("name") or "",
    )


def message_to_dict(message: Message, *, parts: bool = False, arguments_as_text: bool = False) -> dict[str, Any]:
    """What a template is shown of a message. Keys without a value are absent, as templates test for their presence.

    Text goes as a string, or as a list of parts where the template reads only those; the arguments of a call go as the
    JSON value they are, or as text where the template wants that.
    """
    text = content_text(message.content)
    data: dict[str, Any] = {"role": message.role}
    if text is None:
        data["content"] = [_part_to_dict(part) for part in message.content if isinstance(part, ContentPart)]
    else:
        data["content"] = [{"type": "text", "text": text}] if parts else text
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [_call_to_dict(call, arguments_as_text) for call in message.tool_calls]
    if message.tool_call_id:
        data["tool_call_id"] = message.tool_call_id
    if message.name:
        data["name"] = message.name
    return data


def is_same_message(served: Message, returned: Message) -> bool:
    """Whether a message that came back is the one that was served. The rules are this file's."""
    return (
        served.role == returned.role
        and served.name == returned.name
        and served.tool_call_id == returned.tool_call_id
        and _same_content(served.content, returned.content)
        and _same_reasoning(served.reasoning, returned.reasoning)
        and len(served.tool_calls) == len(returned.tool_calls)
        and all(_same_call(one, other) for one, other in zip(served.tool_calls, returned.tool_calls, strict=True))
    )


def message_hash(message: Message) -> int:
    """Return a number that messages for which `is_same_message` holds have in common. Others have it in common by
    chance alone, or where only their reasoning or the arguments of their calls differ."""
    text = content_text(message.content)
    calls = tuple((call.id, call.name) for call in message.tool_calls)
    content = message.content if text is None else text
    return hash((message.role, message.name, message.tool_call_id, content, calls))


def same_tools(served: Sequence[Mapping[str, Any]], returned: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the same tools were offered."""
    return len(served) == len(returned) and all(_same_json(*pair) for pair in zip(served, returned, strict=True))


def _same_reasoning(served: str, returned: str) -> bool:
    return returned == served or returned.strip() in served or "".join(returned.split()) in "".join(served.split())


def _same_content(served: str | tuple[ContentPart, ...], returned: str | tuple[ContentPart, ...]) -> bool:
    one, other = content_text(served), content_text(returned)
    return served == returned if one is None or other is None else one == other


def _same_call(served: ToolCall, returned: ToolCall) -> bool:
    if (served.id, served.name) != (returned.id, returned.name):
        return False
    if served.arguments == returned.arguments:
        return True
    try:
        return _same_json(json.loads(served.arguments), json.loads(returned.arguments))
    except ValueError:
        return False


def _same_json(one: Any, other: Any) -> bool:
    """Equality of JSON values. Python's own takes true, 1 and 1.0 for the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same_json(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_same_json(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def _parse_content(content: Any) -> str | tuple[ContentPart, ...]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        return tuple(_parse_part(part) for part in content)
    raise ChatError(
        f"The content of a message is a text or a list of parts; a value of type {type(content).__name__} was given."
    )


def _parse_part(data: Mapping[str, Any]) -> ContentPart:
    """`{"type": "text", "text": …}`, `{"type": "image", "url": …}`, or OpenAI's `image_url`."""
    kind = str(data.get("type", "text"))
    if kind == "text":
        return ContentPart("text", text=str(data.get("text", "")))
    address = data.get("url") or data.get(kind) or ""
    return ContentPart(kind.removesuffix("_url"), url=str(address["url"] if isinstance(address, Mapping) else address))


def _part_to_dict(part: ContentPart) -> dict[str, str]:
    return {"type": "text", "text": part.text} if part.kind == "text" else {"type": part.kind, "url": part.url}


def _parse_call(data: Mapping[str, Any]) -> ToolCall:
    """`{"id": …, "function": {"name": …, "arguments": …}}`, or the name and arguments alone."""
    function = data.get("function") or data
    if not isinstance(function.get("name"), str):
        raise ChatError("A tool call needs the function's name: {'function': {'name': …, 'arguments': …}}.")
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(data.get("id") or "", function["name"], text)


def _call_to_dict(call: ToolCall, as_text: bool) -> dict[str, Any]:
    arguments: Any = call.arguments
    if not as_text:
        try:
            arguments = json.loads(call.arguments)
        except ValueError:
            arguments = call.arguments
    id_field = {"id": call.id} if call.id else {}
    return {**id_field, "type": "function", "function": {"name": call.name, "arguments": arguments}}
