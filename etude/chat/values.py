"""Values as models write them in calls, in JSON and in Python, read as they come (`feed`).

Each reading moves over one value and returns it as JSON text, or None at the first character by which it cannot be one.
JSON stays to the letter. Of Python there are texts, numbers, lists, dictionaries with texts for keys, and the words for
true, false and null, those of JSON among them, which some templates write within Python.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from etude.chat.feed import Feed, Reading, literal, ready, run

__all__ = ["as_json", "json_object", "json_of", "python_value"]

_CLOSERS = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMERIC = re.compile(r"[-+.0-9eE]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_UNQUOTED = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"\n": "", **dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))}
_HEX = frozenset("0123456789abcdefABCDEF")


class _Language(NamedTuple):
    """How values are written down."""

    string: Callable[[Feed], Reading[str | None]]
    words: Mapping[str, str]
    """What stands for true, false and null."""
    number: Callable[[str], str | None]
    trailing: bool
    """Whether a comma may come after the last."""


def json_object(feed: Feed) -> Reading[str | None]:
    """A JSON object, to the letter."""
    start = feed.at
    if not (yield from ready(feed)) or feed.text[feed.at] != "{":
        return None
    whole = yield from _value(feed, _JSON)
    return None if whole is None else feed.text[start : feed.at]


def python_value(feed: Feed) -> Reading[str | None]:
    """A value that stands in Python, as JSON."""
    return (yield from _value(feed, _PYTHON))


def json_of(text: str) -> Any:
    """What JSON text says. ValueError if it is not JSON, or nested deeper than anybody reads."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def as_json(value: Any) -> str:
    """A value as JSON text, in which only halves of characters are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _value(feed: Feed, language: _Language) -> Reading[str | None]:
    """One value, with all that is in it. What is open is a list, so that no depth can be too deep."""
    told: list[str] = []
    closers: list[str] = []
    while True:
        first = yield from _next(feed)
        fresh = first in _CLOSERS
        if fresh:
            feed.at += 1
            told.append(first)
            closers.append(_CLOSERS[first])
        else:
            scalar = yield from _scalar(feed, language, first)
            if scalar is None:
                return None
            told.append(scalar)
        while closers:
            due = yield from _goes_on(feed, language, closers, told, fresh)
            if due is None:
                return None
            if due:
                break
            fresh = False
        else:
            return "".join(told)


def _goes_on(feed: Feed, language: _Language, closers: list[str], told: list[str], fresh: bool) -> Reading[bool | None]:
    """What comes after a value, or after the beginning of what is fresh: whether another value is due, in an object
    after its key, or what was open is closed. None if it is neither."""
    character = yield from _next(feed)
    comma = character == "," and not fresh
    if comma:
        feed.at += 1
        character = yield from _next(feed)
    if character == closers[-1] and (language.trailing or not comma):
        feed.at += 1
        told.append(closers.pop())
        return False
    if not comma and not fresh:
        return None
    if comma:
        told.append(", ")
    if closers[-1] == "]":
        return True
    key = yield from language.string(feed)
    if key is None or (yield from _next(feed)) != ":":
        return None
    feed.at += 1
    told += [key, ": "]
    return True


def _next(feed: Feed) -> Reading[str]:
    """The next character that is no white space; nothing at the end."""
    while True:
        while feed.at < len(feed.text):
            if (character := feed.text[feed.at]) not in " \t\n\r":
                return character
            feed.at += 1
        if feed.ended:
            return ""
        yield


def _scalar(feed: Feed, language: _Language, first: str) -> Reading[str | None]:
    if first and first in "\"'":
        return (yield from language.string(feed))
    if not first.isalpha():
        return language.number((yield from run(feed, _NUMERIC)))
    for word, meant in language.words.items():
        if (yield from literal(feed, word)):
            return meant
    return None


def _json_string(feed: Feed) -> Reading[str | None]:
    start = feed.at
    if not (yield from literal(feed, '"')):
        return None
    while True:
        yield from run(feed, _PLAIN)
        if not (yield from ready(feed)):
            return None
        character = feed.text[feed.at]
        feed.at += 1
        if character == '"':
            return feed.text[start : feed.at]
        if character != "\\" or not (yield from _json_escape(feed)):
            return None


def _json_escape(feed: Feed) -> Reading[bool]:
    """What comes after a backslash."""
    if not (yield from ready(feed)):
        return False
    kind = feed.text[feed.at]
    feed.at += 1
    if kind != "u":
        return kind in '"\\/bfnrt'
    for _ in range(4):
        if not (yield from ready(feed)) or feed.text[feed.at] not in _HEX:
            return False
        feed.at += 1
    return True


def _python_string(feed: Feed) -> Reading[str | None]:
    """A text in quotes of any of the four kinds. It may go over several lines in all of them: templates write it so."""
    if not (yield from ready(feed)) or feed.text[feed.at] not in _UNQUOTED:
        return None
    quote = feed.text[feed.at]
    close = quote * 3 if (yield from literal(feed, quote * 3)) else quote
    feed.at += len(close) == 1
    start = feed.at
    while True:
        yield from run(feed, _UNQUOTED[quote])
        if not (yield from ready(feed)):
            return None
        if feed.text[feed.at] == "\\":
            feed.at += 1
            if not (yield from ready(feed)):
                return None
            feed.at += 1
        elif (yield from literal(feed, close)):
            return as_json(_ESCAPE.sub(_unescaped, feed.text[start : feed.at - len(close)]))
        else:
            feed.at += 1


def _unescaped(escape: re.Match[str]) -> str:
    """What an escape stands for. Python keeps one that means nothing as it is written."""
    kind = escape[1]
    if kind in _ESCAPED:
        return _ESCAPED[kind]
    if kind[0] in "01234567":
        return chr(int(kind, 8))
    code = int(kind[1:], 16) if len(kind) > 1 else math.inf
    return chr(int(code)) if code <= 0x10FFFF else escape[0]


def _json_number(text: str) -> str | None:
    return text if _JSON_NUMBER.fullmatch(text) else None


def _python_number(text: str) -> str | None:
    """A number to the letter where JSON writes it so."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if not _PYTHON_NUMBER.fullmatch(text):
        return None
    try:
        number = float(text) if set(text) & set(".eE") else int(text)
    except ValueError:
        return None  # of more digits than are read
    return json.dumps(number) if isinstance(number, int) or math.isfinite(number) else None


_CONSTANTS = {word: word for word in ("true", "false", "null")}
_JSON = _Language(_json_string, _CONSTANTS, _json_number, trailing=False)
_PYTHON = _Language(
    _python_string, {"True": "true", "False": "false", "None": "null", **_CONSTANTS}, _python_number, trailing=True
)
