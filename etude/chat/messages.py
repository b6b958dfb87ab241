"""Messages to JSON and back, in the form of datasets, agents and chat templates; and the equality of messages.

Exact continuation relies on `is_same_message`. An agent sends back the conversation so far. Small differences that the
model never saw must not make it a new conversation, but any difference in content must.

- Role, name, call ids and text are equal character by character; white space counts.
- A list of text parts equals the joined text. Other parts are equal part by part, images by the hash of their bytes.
- The arguments of a call are equal as JSON values: the order of keys and spacing do not count, but 1, 1.0 and true are
  three different values. Arguments that are not JSON are compared as text.
- Reasoning that was served may be missing, or come back in part: clients drop it, cut it, and strip or join its white
  space. The returned part has to occur in the served one, apart from white space.
- A stop string that ended an answer may be written back at its end, followed by the agent's own text (`conversation`).
- Tools are equal as JSON values, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import ChatError
from etude.images.addresses import find_address, image_address
from etude.images.encoding import find_data_url, is_image
from etude.records import ContentPart, Message, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def check_roles(messages: Sequence[Message]) -> None:
    """Refuse a message with a role that no template knows."""
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise ChatError(
                f"Message {index} of the conversation has the role '{message.role}'; it must be one of "
                f"{', '.join(ROLES)}. Rename the role."
            )


def content_text(content: str | tuple[ContentPart, ...]) -> str | None:
    """Return the text of a message's content; None if some of it is not text."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content) if all(part.kind == "text" for part in content) else None


def message_from_dict(data: Mapping[str, Any]) -> Message:
    """Return a message from its JSON form: the `{"role": …, "content": …}` of datasets and of OpenAI-compatible
    requests."""
    if not isinstance(data.get("role"), str):
        raise ChatError(f"A message needs a string under 'role'; this one has the keys {', '.join(map(str, data))}.")
    reasoning = next((data[key] for key in REASONING_KEYS if data.get(key) is not None), "")
    return Message(
        role=data["role"],
        content=_parse_content(data.get("content")),
        reasoning=reasoning,
        tool_calls=tuple(_parse_call(call) for call in data.get("tool_calls") or ()),
        tool_call_id=data.get("tool_call_id") or "",
        name=data.get("name") or "",
    )


def message_to_dict(
    message: Message, *, parts: bool = False, arguments_as_text: bool = False, addresses: bool = False
) -> dict[str, Any]:
    """Return the form of a message that templates take. Keys without a value are absent, as templates test their
    presence.

    Text is a string, or a list of parts if the template only reads those. The arguments of a call are a JSON value, or
    text if the template wants that. addresses: for an endpoint, images have their address.
    """
    text = content_text(message.content)
    data: dict[str, Any] = {"role": message.role}
    if text is None:
        data["content"] = [_part_to_dict(part, addresses) for part in message.content if isinstance(part, ContentPart)]
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
    """Return whether a returned message is the one that was served, by the rules above."""
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
    """Return a hash that messages have in common if `is_same_message` holds. Others only share it by chance, or if they
    differ in reasoning or call arguments only."""
    text = content_text(message.content)
    calls = tuple((call.id, call.name) for call in message.tool_calls)
    content = message.content if text is None else text
    return hash((message.role, message.name, message.tool_call_id, content, calls))


def same_tools(served: Sequence[Mapping[str, Any]], returned: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether both lists offer the same tools."""
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
    """Return whether two JSON values are equal. Python itself takes true, 1 and 1.0 as equal."""
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
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) or is_part(part) for part in content):
        return read_parts(content)
    raise ChatError(
        f"The content of a message is a string or a list of parts; a value of type {type(content).__name__} was given."
    )


def is_part(value: Any) -> bool:
    """Return True for what a program may put among the parts of a message: a part, a text, or an image."""
    return isinstance(value, ContentPart | str) or is_image(value)


def read_parts(values: Sequence[Any]) -> tuple[ContentPart, ...]:
    """Return the parts of a message, of which some may be texts, images of Pillow, or bytes of images."""
    return tuple(_read_part(value) for value in values)


def _read_part(value: Any) -> ContentPart:
    if isinstance(value, ContentPart):
        return value
    if isinstance(value, str):
        return ContentPart("text", text=value)
    return _parse_part(value) if isinstance(value, Mapping) else ContentPart("image", url=find_data_url(value) or "")


def _parse_part(data: Mapping[str, Any]) -> ContentPart:
    """Parse `{"type": "text", "text": …}`, `{"type": "image", "url": …}`, or OpenAI's `image_url`. An address with a
    size, as tasks have it, is an image in the store."""
    kind = str(data.get("type", "text"))
    if kind == "text":
        return ContentPart("text", text=str(data.get("text", "")))
    address = data.get("url") or data.get(kind) or ""
    found = address.get("url") or address.get("bytes") or "" if isinstance(address, Mapping) else address
    url = find_data_url(found) or str(found)
    kind = kind.removesuffix("_url")
    stored = find_address(url) if kind == "image" else None
    return ContentPart(kind, url=url) if stored is None else ContentPart(kind, image=stored)


def _part_to_dict(part: ContentPart, addresses: bool) -> dict[str, Any]:
    """Return the form of a part. Templates write the placeholder of an image by its type alone."""
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    if addresses and part.kind == "image":
        return {"type": "image_url", "image_url": {"url": part_address(part)}}
    return {"type": part.kind} | ({"url": part.url} if part.url else {})


def part_address(part: ContentPart) -> str:
    """Return the address of an image: that in the store once its bytes are there."""
    return part.url if part.image is None else image_address(part.image)


def _parse_call(data: Mapping[str, Any]) -> ToolCall:
    """Parse `{"id": …, "function": {"name": …, "arguments": …}}`, or just the name and arguments."""
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
