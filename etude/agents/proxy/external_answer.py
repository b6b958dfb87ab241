"""An external model's answer, parsed while it is passed on: its events, its text, its calls, its usage."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

MAX_CHARACTERS = 200_000
"""The most characters that are kept."""
END_EVENTS = ("response.completed", "response.incomplete", "response.failed")
_SEPARATOR = re.compile(rb"\r?\n\r?\n")
MAX_SEPARATOR = 4
"""The most bytes between two events. The searched part of the buffer may end with the beginning of a separator."""


async def iter_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield each server-sent event, without the empty line after it.

    Only a line feed ends a line: text in an event may hold other characters at which Python's `splitlines` splits.
    """
    buffer, searched = bytearray(), 0
    async for chunk in chunks:
        buffer += chunk
        begin, search_from = 0, max(searched - MAX_SEPARATOR + 1, 0)
        while (end := _SEPARATOR.search(buffer, search_from)) is not None:
            yield bytes(buffer[begin : end.start()])
            begin = search_from = end.end()
        del buffer[:begin]
        searched = len(buffer)
    if buffer.strip():
        yield bytes(buffer)


def event_data(event: bytes) -> str:
    """Return the data of an event."""
    lines = (line.removesuffix(b"\r") for line in event.split(b"\n"))
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:")).decode(errors="replace")


class ExternalAnswer:
    """One answer of chat completions, completions or responses, whole or as events. Unknown parts are skipped: they
    reach the client in any case."""

    def __init__(self) -> None:
        self.finish_reason = ""
        self.usage: dict[str, Any] = {}
        self._texts: list[str] = []
        self._length = 0
        self._calling = False

    @property
    def text(self) -> str:
        """The text, with calls as `name(arguments)`."""
        return "".join(self._texts)

    @property
    def prompt_tokens(self) -> int:
        """The prompt's tokens, if the provider reported them."""
        return self._number("prompt_tokens", "input_tokens")

    @property
    def completion_tokens(self) -> int:
        """The answer's tokens."""
        return self._number("completion_tokens", "output_tokens")

    def read_response(self, data: bytes) -> None:
        """Parse a whole answer."""
        body = _json(data)
        self._usage(body)
        self._response(body)
        for choice in _objects(body, "choices"):
            self._choice(choice, "message")

    def read_event(self, data: str) -> bool:
        """Parse an event; return whether it ends the answer."""
        if data == "[DONE]":
            return True
        body = _json(data)
        self._usage(body)
        for choice in _objects(body, "choices"):
            self._choice(choice, "delta")
        kind = body.get("type")
        if kind == "response.output_text.delta":
            self._add(body.get("delta"))
        if kind not in END_EVENTS:
            return False
        response = _object(body, "response")
        self._usage(response)
        calls = {"output": [item for item in _objects(response, "output") if item.get("type") == "function_call"]}
        self._response({**response, **calls})
        return True

    def _choice(self, choice: Mapping[str, Any], part: str) -> None:
        message = _object(choice, part)
        self._add(message.get("content", choice.get("text")))
        for call in _objects(message, "tool_calls"):
            self._call(_object(call, "function"))
        if choice.get("finish_reason"):
            self.finish_reason = str(choice["finish_reason"])
            self._close()

    def _call(self, function: Mapping[str, Any]) -> None:
        """Add a call, or a part of one: each call begins with its name."""
        if function.get("name"):
            self._close()
            self._add(f"{function['name']}(")
            self._calling = True
        self._add(function.get("arguments"))

    def _close(self) -> None:
        if self._calling:
            self._add(")")
            self._calling = False

    def _response(self, body: Mapping[str, Any]) -> None:
        for item in _objects(body, "output"):
            if item.get("type") == "function_call":
                self._call(item)
                self._close()
            for part in _objects(item, "content"):
                self._add(part.get("text"))
        self.finish_reason = str(body.get("status") or self.finish_reason)

    def _usage(self, body: Mapping[str, Any]) -> None:
        self.usage = {name: value for name, value in _object(body, "usage").items() if type(value) is int} or self.usage

    def _add(self, text: Any) -> None:
        if isinstance(text, str) and self._length < MAX_CHARACTERS:
            self._texts.append(text[: MAX_CHARACTERS - self._length])
            self._length += len(text)

    def _number(self, *names: str) -> int:
        return max(0, *(int(self.usage.get(name, 0)) for name in names))


def _json(data: bytes | str) -> Mapping[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def _objects(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = body.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
