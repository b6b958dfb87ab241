"""Recorded prompts as the messages that the model saw, by role.

A turn is recorded as token ids alone: an agent may send any messages, and an environment may begin with any. So the
messages are read back from the text of the ids. Between two messages a chat template writes a fixed text, a separator.
The reader renders probes, conversations whose messages are unused words, and learns the separators from them. A prompt
without a known separator, such as a plain text, is one entry.

An image is named in the text at its place, as in `[image 9f86d081]` with the first digits of its hash. The entry then
has `images`, the hashes of its images with spaces between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from etude.chat.renderer import ChatRenderer
from etude.chat.tokenizer import Ids
from etude.errors import ChatError, ConfigError
from etude.images import ImageSpan, keyed_ids
from etude.records import Message, ToolCall, Turn

MODEL = "model"
PROMPT = "prompt"
OBSERVATION = "observation"
TOOLS = "tools"
"""The names beside the roles: an answer of this attempt; a text without a chat template, at the beginning or after an
answer; the tools that the model may call."""
_PROBES = (
    ("system", "user", "assistant", "user", "user"),
    ("system", "user", "assistant", "user"),
    ("system", "call", "tool", "user"),
    ("system", "user", "call", "tool", "assistant", "user"),
    ("user", "call", "tool", "tool"),
    ("user", "call", "tool", "user"),
    ("user", "assistant", "user", "user"),
    ("user", "assistant", "user"),
)
"""Roles of the probes; `call` is an assistant that calls a tool. Where two roles look alike, the later probe counts: a
template without a system role writes a system message as a part of the user's."""
_MARK = "etudemark"


class PromptReader:
    """Reads the messages of recorded turns. Used by one thread at a time."""

    def __init__(self, chat: ChatRenderer) -> None:
        self._chat = chat
        self._tokenizer = chat.tokenizer

    def read_prompt(self, prompt: Ids, images: Sequence[ImageSpan] = ()) -> list[dict[str, str]]:
        """Return the messages of a prompt: `by` is the role, and `text` what the message says. images: of the
        prompt."""
        text = self._decode(prompt, images)
        found = list(self._split(text, self._beginnings))
        if not found:
            return self._entries([(PROMPT, text)], images)
        if found[0][0] == "":
            found[0] = _read_head(self._clean(found[0][1]))
        return self._entries(found, images)

    def read_rest(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """Return what follows the first prompt, in order: the model's answers as it wrote them, and the messages
        between them. A prompt that does not continue the answer before it is returned whole."""
        entries: list[dict[str, str]] = []
        before: Turn | None = None
        for turn in turns:
            if before is not None:
                entries += self._read_next(before, turn)
            entries.append({"by": MODEL, "text": turn.completion.text})
            before = turn
        return entries

    def _read_next(self, before: Turn, turn: Turn) -> list[dict[str, str]]:
        """Return the messages of a prompt that are new to the model after an earlier turn."""
        known = np.concatenate([keyed_ids(before.prompt, before.images), before.completion.ids])
        if not np.array_equal(keyed_ids(turn.prompt, turn.images)[: len(known)], known):
            return self.read_prompt(turn.prompt, turn.images)
        # A separator may begin with the token that ended the answer.
        is_ended = len(known) > 0 and int(known[-1]) in self._tokenizer.eos_ids
        start = len(known) - is_ended
        images = spans_after(turn.images, start)
        text = self._decode(turn.prompt[start:], images)
        found = list(self._split(text, []))
        if not found:
            return self._entries([(OBSERVATION, text)], images)
        if found[0][0] == "":  # words that the agent added to the answer
            found[0] = ("assistant", found[0][1])
        return self._entries(found, images)

    def _entries(self, found: Sequence[tuple[str, str]], images: Sequence[ImageSpan]) -> list[dict[str, str]]:
        parts = [part for role, text in found for part in (_split_tools(text) if role == TOOLS else [(role, text)])]
        entries = [{"by": role, "text": self._clean(text)} for role, text in parts]
        digests = dict.fromkeys(image.digest for image in images)
        for entry in entries:
            shown = [digest for digest in digests if image_name(digest) in entry["text"]]
            if shown:
                entry["images"] = " ".join(shown)
        return [entry for entry in entries if entry["text"]]

    def _decode(self, ids: Ids, images: Sequence[ImageSpan]) -> str:
        """Return the text of ids, special tokens included, with the name of each image at its first token."""
        pieces: list[str] = []
        end = 0
        for span in images:
            pieces.append(self._tokenizer.decode(ids[end : span.start], keep_special_tokens=True))
            pieces.append("" if span.first else image_name(span.digest))
            end = span.stop
        return "".join([*pieces, self._tokenizer.decode(ids[end:], keep_special_tokens=True)])

    def _clean(self, text: str) -> str:
        """Return a text without special tokens."""
        return self._special.sub("", text).strip("\n")

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokenizer = self._tokenizer
        ids = sorted(tokenizer.special_ids | frozenset(tokenizer.eos_ids))
        texts = filter(None, (tokenizer.decode([id], keep_special_tokens=True) for id in ids))
        return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")

    # -- splitting ----------------------------------------------------------------------------------------------------

    def _split(self, text: str, beginnings: Sequence[_Separator]) -> Iterator[tuple[str, str]]:
        """Yield the messages of a text. A text before the first separator has no role; without separators there is
        nothing."""
        first = next((found for one in beginnings if (found := one.pattern.match(text))), None)
        role = next((one.role for one in beginnings if first is not None and one.pattern is first.re), "")
        start = first.end() if first is not None else 0
        matches = list(self._between.finditer(text, start)) if self._separators else []
        if first is None and not matches:
            return
        for match in matches:
            yield role, text[start : match.start()]
            role, start = self._separators[int((match.lastgroup or "").removeprefix("s"))].role, match.end()
        yield role, text[start:]

    @cached_property
    def _between(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?P<s{n}>{one.pattern.pattern})" for n, one in enumerate(self._separators)))

    @property
    def _beginnings(self) -> Sequence[_Separator]:
        return self._learned[0]

    @property
    def _separators(self) -> Sequence[_Separator]:
        return self._learned[1]

    # -- learning -----------------------------------------------------------------------------------------------------

    @cached_property
    def _learned(self) -> tuple[list[_Separator], list[_Separator]]:
        """The texts before a first message, and those between two messages; the longest first."""
        beginnings: dict[str, str] = {}
        separators: dict[str, str] = {}
        for with_tools in (True, False):
            for roles in _PROBES:
                parts = self._probe(roles, with_tools)
                for index, (separator, role) in enumerate(parts):
                    (separators if index else beginnings)[separator] = role
        system = [text for text, role in beginnings.items() if role == "system"]
        for text, role in list(beginnings.items()):
            ends = [end for end, other in separators.items() if other == role and text.endswith(end)]
            if ends and any(text.startswith(start) and text != start for start in system):
                del beginnings[text]  # a message that the template writes itself is shown, between two separators
        return _compile(beginnings), _compile(separators)

    def _probe(self, roles: Sequence[str], with_tools: bool) -> list[tuple[str, str]]:
        """Return the separators of a probe, each with the role of what follows; nothing if the template refuses it."""
        marks = [f"{_MARK}{index}x" for index in range(len(roles))]
        messages = [_message(role, mark) for role, mark in zip(roles, marks, strict=True)]
        function = {"name": f"{_MARK}tool", "description": "d", "parameters": {"type": "object", "properties": {}}}
        tools = [{"type": "function", "function": function}] if with_tools else []
        try:
            text = self._chat.render_text(messages, tools)
        except (ChatError, ConfigError):
            return []
        # Some templates write a call in place of the words before it.
        marks = [
            f"{_MARK}a" if role == "call" and mark not in text else mark
            for mark, role in zip(marks, roles, strict=True)
        ]
        places = [(text.find(mark), mark, role) for mark, role in zip(marks, roles, strict=True)]
        shown = [(start, start + len(mark), role) for start, mark, role in places if start >= 0]
        if with_tools:
            shown += [(start, end, TOOLS) for start, end in _find_tools(text)]
        found: list[tuple[str, str]] = []
        end, call = 0, False
        for start, after, role in [*sorted(shown), (len(text), len(text), "assistant")]:
            separator = self._after_call(text[end:start]) if call else text[end:start]
            found.append((separator, "assistant" if role == "call" else role))
            end, call = after, role == "call"
        return found

    def _after_call(self, text: str) -> str:
        """Return the part of a text from the first special token after the arguments of a call; nothing without one."""
        found = self._special.search(text, text.rfind(_MARK) + 1)
        return text[found.start() :] if found else ""


def image_name(digest: str) -> str:
    """Return the words that stand for an image in a text."""
    return f"[image {digest[:8]}]"


def spans_after(images: Sequence[ImageSpan], start: int) -> list[ImageSpan]:
    """Return the images that begin at a token or after it, as places from there on."""
    return [span.shifted(-start) for span in images if span.start >= start]


class _Separator(NamedTuple):
    pattern: re.Pattern[str]
    role: str
    """The role of the message after it."""


def _compile(separators: dict[str, str]) -> list[_Separator]:
    """Return separators as patterns, the longest first; white space may differ, as some tokenizers lose it."""
    texts = sorted((text for text in separators if text.strip()), key=len, reverse=True)
    return [
        _Separator(re.compile(r"\s*".join(map(re.escape, re.split(r"\s+", text)))), separators[text]) for text in texts
    ]


def _message(role: str, mark: str) -> Message:
    if role == "call":
        return Message("assistant", mark, tool_calls=(ToolCall("call00000", "probe", json.dumps({"a": f"{_MARK}a"})),))
    if role == "tool":
        return Message("tool", mark, tool_call_id="call00000", name="probe")
    return Message(role, mark)


def _find_tools(text: str) -> list[tuple[int, int]]:
    """Return the place of the probe's tool if the template writes tools as JSON."""
    place = text.find(f"{_MARK}tool")
    decoder = json.JSONDecoder()
    for start in (match.start() for match in re.finditer(r"[\[{]", text[: max(0, place)])):
        try:
            _, end = decoder.raw_decode(text, start)
        except ValueError:
            continue
        if end > place:
            return [(start, end)]
    return []


def _split_tools(text: str) -> list[tuple[str, str]]:
    """Return tools in JSON, and the message of the user that follows them without a separator in some templates."""
    decoder, end = json.JSONDecoder(), 0
    while start := re.compile(r"[\s,]*(?=[\[{])").match(text, end):
        try:
            _, end = decoder.raw_decode(text, start.end())
        except ValueError:
            break
    return [(TOOLS, text[:end]), ("user", text[end:])]


def _read_head(text: str) -> tuple[str, str]:
    """Return the role and the text of a first message whose beginning is unknown, such as one with a date."""
    for role in ("system", "user"):
        if text.startswith(role):
            return role, text.removeprefix(role)
    return PROMPT, text
