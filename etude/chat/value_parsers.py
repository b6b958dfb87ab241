"""Incremental parsers of the values in tool calls, in JSON and in Python (see `parsing`).

Each parser reads one value and returns it as JSON text, or None at the first character that cannot be part of one. JSON
is strict. Of Python's values there are strings, numbers, lists, dictionaries with string keys, and the words for true,
false and null. JSON's words are accepted too, because some templates use them within Python.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etude.chat.parsing import ParseBuffer, Parser, has_more, match_literal, match_pattern

_CLOSERS = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMERIC = re.compile(r"[-+.0-9eE]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_UNQUOTED = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"\n": "", **dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))}
_HEX = frozenset("0123456789abcdefABCDEF")


class _Syntax(NamedTuple):
    """The syntax of values."""

    string: Callable[[ParseBuffer], Parser[str | None]]
    constants: Mapping[str, str]
    """The words for true, false and null."""
    number: Callable[[str], str | None]
    allows_trailing_comma: bool
    """True if a comma may follow the last element."""


def parse_json_object(buffer: ParseBuffer) -> Parser[str | None]:
    """Parse a JSON object, strictly."""
    start = buffer.position
    if not (yield from has_more(buffer)) or buffer.text[buffer.position] != "{":
        return None
    value = yield from _parse_value(buffer, _JSON)
    return None if value is None else buffer.text[start : buffer.position]


def parse_python_value(buffer: ParseBuffer) -> Parser[str | None]:
    """Parse a Python value; return it as JSON."""
    return (yield from _parse_value(buffer, _PYTHON))


def load_json(text: str) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump_json(value: Any) -> str:
    """Return a value as JSON text, in which only unpaired surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _parse_value(buffer: ParseBuffer, syntax: _Syntax) -> Parser[str | None]:
    """Parse one value with all that it contains. Open brackets are kept in a list, so that no depth is too large."""
    output: list[str] = []
    closers: list[str] = []
    while True:
        first = yield from _peek(buffer)
        is_first = first in _CLOSERS
        if is_first:
            buffer.position += 1
            output.append(first)
            closers.append(_CLOSERS[first])
        else:
            scalar = yield from _parse_scalar(buffer, syntax, first)
            if scalar is None:
                return None
            output.append(scalar)
        while closers:
            expects_value = yield from _parse_separator(buffer, syntax, closers, output, is_first)
            if expects_value is None:
                return None
            if expects_value:
                break
            is_first = False
        else:
            return "".join(output)


def _parse_separator(
    buffer: ParseBuffer, syntax: _Syntax, closers: list[str], output: list[str], is_first: bool
) -> Parser[bool | None]:
    """Parse the text after a value, or after an opening bracket. Return True if another value follows (in an object
    after its key), False if the bracket was closed, and None if the text is neither."""
    character = yield from _peek(buffer)
    comma = character == "," and not is_first
    if comma:
        buffer.position += 1
        character = yield from _peek(buffer)
    if character == closers[-1] and (syntax.allows_trailing_comma or not comma):
        buffer.position += 1
        output.append(closers.pop())
        return False
    if not comma and not is_first:
        return None
    if comma:
        output.append(", ")
    if closers[-1] == "]":
        return True
    key = yield from syntax.string(buffer)
    if key is None or (yield from _peek(buffer)) != ":":
        return None
    buffer.position += 1
    output += [key, ": "]
    return True


def _peek(buffer: ParseBuffer) -> Parser[str]:
    """Return the next character that is not white space; an empty string at the end."""
    while True:
        while buffer.position < len(buffer.text):
            if (character := buffer.text[buffer.position]) not in " \t\n\r":
                return character
            buffer.position += 1
        if buffer.is_complete:
            return ""
        yield


def _parse_scalar(buffer: ParseBuffer, syntax: _Syntax, first: str) -> Parser[str | None]:
    if first and first in "\"'":
        return (yield from syntax.string(buffer))
    if not first.isalpha():
        return syntax.number((yield from match_pattern(buffer, _NUMERIC)))
    for word, constant in syntax.constants.items():
        if (yield from match_literal(buffer, word)):
            return constant
    return None


def _parse_json_string(buffer: ParseBuffer) -> Parser[str | None]:
    start = buffer.position
    if not (yield from match_literal(buffer, '"')):
        return None
    while True:
        yield from match_pattern(buffer, _PLAIN)
        if not (yield from has_more(buffer)):
            return None
        character = buffer.text[buffer.position]
        buffer.position += 1
        if character == '"':
            return buffer.text[start : buffer.position]
        if character != "\\" or not (yield from _parse_json_escape(buffer)):
            return None


def _parse_json_escape(buffer: ParseBuffer) -> Parser[bool]:
    """Parse the text after a backslash."""
    if not (yield from has_more(buffer)):
        return False
    kind = buffer.text[buffer.position]
    buffer.position += 1
    if kind != "u":
        return kind in '"\\/bfnrt'
    for _ in range(4):
        if not (yield from has_more(buffer)) or buffer.text[buffer.position] not in _HEX:
            return False
        buffer.position += 1
    return True


def _parse_python_string(buffer: ParseBuffer) -> Parser[str | None]:
    """Parse a string in any of Python's four kinds of quotes. Each may span several lines, because templates write it
    so."""
    if not (yield from has_more(buffer)) or buffer.text[buffer.position] not in _UNQUOTED:
        return None
    quote = buffer.text[buffer.position]
    close = quote * 3 if (yield from match_literal(buffer, quote * 3)) else quote
    buffer.position += len(close) == 1
    start = buffer.position
    while True:
        yield from match_pattern(buffer, _UNQUOTED[quote])
        if not (yield from has_more(buffer)):
            return None
        if buffer.text[buffer.position] == "\\":
            buffer.position += 1
            if not (yield from has_more(buffer)):
                return None
            buffer.position += 1
        elif (yield from match_literal(buffer, close)):
            return dump_json(_ESCAPE.sub(_unescape, buffer.text[start : buffer.position - len(close)]))
        else:
            buffer.position += 1


def _unescape(escape: re.Match[str]) -> str:
    """Return the text of an escape sequence. Like Python, keep an unknown one as it is."""
    kind = escape[1]
    if kind in _ESCAPED:
        return _ESCAPED[kind]
    if kind[0] in "01234567":
        return chr(int(kind, 8))
    code = int(kind[1:], 16) if len(kind) > 1 else math.inf
    return chr(int(code)) if code <= 0x10FFFF else escape[0]


def _check_json_number(text: str) -> str | None:
    return text if _JSON_NUMBER.fullmatch(text) else None


def _convert_python_number(text: str) -> str | None:
    """Return a Python number as JSON; unchanged if it is valid JSON."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if not _PYTHON_NUMBER.fullmatch(text):
        return None
    try:
        number = float(text) if set(text) & set(".eE") else int(text)
    except ValueError:
        return None  # too many digits
    return json.dumps(number) if isinstance(number, int) or math.isfinite(number) else None


_CONSTANTS = {word: word for word in ("true", "false", "null")}
_JSON = _Syntax(_parse_json_string, _CONSTANTS, _check_json_number, allows_trailing_comma=False)
_PYTHON = _Syntax(
    _parse_python_string,
    {"True": "true", "False": "false", "None": "null", **_CONSTANTS},
    _convert_python_number,
    allows_trailing_comma=True,
)
