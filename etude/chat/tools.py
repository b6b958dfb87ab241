"""The tool calls a model wrote, read back from its text. What is not a call to the letter stays text.

A call's arguments are kept as the very JSON text the model wrote, so that what an agent is shown is what was sampled;
where a model writes them in another form, they are what that says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, TypeAlias

__all__ = ["FORMATS", "PYTHON_TAG", "Found", "format_of", "hermes", "llama3", "qwen_xml"]

Found: TypeAlias = list[tuple[str, str]]
"""The name and the arguments of each call, in their order."""
Tools: TypeAlias = Sequence[Mapping[str, Any]]

PYTHON_TAG = "<|python_tag|>"
_BLOCK = re.compile(r"\n?<tool_call>\s*(.*?)\s*</tool_call>", flags=re.DOTALL)
_PARAMETER = r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*"
_FUNCTION = re.compile(rf"<function=([^>\n]+)>\s*((?:{_PARAMETER})*)</function>", flags=re.DOTALL)
_SPACE = re.compile(r"[ \t\n\r]*")
_PYTHON = {"True": True, "False": False, "None": None}


def hermes(text: str, _tools: Tools = ()) -> tuple[str, Found]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, amid text: Hermes, Qwen 2.5, Qwen 3.

    The line break before a block belongs to it. White space alone around calls is no text.
    """
    return _blocks(text, lambda block: _call(block, "arguments"))


def qwen_xml(text: str, tools: Tools = ()) -> tuple[str, Found]:
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`: Qwen 3.5 and on, Nemotron 3.

    A parameter is a text, unless the tools that were offered say that it is something else and it reads as JSON.
    """
    return _blocks(text, lambda block: _function(block, tools))


def llama3(text: str, _tools: Tools = ()) -> tuple[str, Found]:
    """One `{"name": …, "parameters": {…}}` that is all of the text, perhaps after `<|python_tag|>`: Llama 3.1."""
    call = _call(text.strip().removeprefix(PYTHON_TAG).strip(), "parameters")
    return ("", [call]) if call else (text, [])


FORMATS: dict[str, Callable[[str, Tools], tuple[str, Found]]] = {
    "hermes": hermes,
    "qwen_xml": qwen_xml,
    "llama3": llama3,
}


def format_of(template: str) -> str | None:
    """The form of call that a template teaches its model, by its own words; None for one that is not known here."""
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "qwen_xml" if "<function=" in template else "hermes"
    if '"parameters": ' in template and "ipython" in template:
        return "llama3"
    return None


def _blocks(text: str, read: Callable[[str], tuple[str, str] | None]) -> tuple[str, Found]:
    """Take the blocks out of a text that read as calls."""
    calls: Found = []

    def take(block: re.Match[str]) -> str:
        call = read(block[1])
        if call is None:
            return block[0]
        calls.append(call)
        return ""

    rest = _BLOCK.sub(take, text)
    return ("" if calls and not rest.strip() else rest), calls


def _function(text: str, tools: Tools) -> tuple[str, str] | None:
    """The name of `<function=…>` and its parameters as JSON, or None if it is anything else."""
    block = _FUNCTION.fullmatch(text)
    if block is None:
        return None
    offered = [tool.get("function", tool) for tool in tools]
    parameters = {each.get("name"): each.get("parameters") or {} for each in offered}
    declared = parameters.get(block[1], {}).get("properties") or {}
    found = re.findall(_PARAMETER, block[2], flags=re.DOTALL)
    arguments = {name: _value(written, declared.get(name, {}).get("type", "string")) for name, written in found}
    return block[1], json.dumps(arguments, ensure_ascii=False)


def _value(written: str, kind: Any) -> Any:
    """What a parameter's text stands for; some templates write Python's words for true, false and null."""
    if "string" in kind:  # the type alone, or one of several
        return written
    try:
        return _PYTHON[written] if written in _PYTHON else json.loads(written)
    except ValueError:
        return written


def _call(text: str, key: str) -> tuple[str, str] | None:
    """The name and the JSON text of the arguments of `{"name": …, key: {…}}`, or None if it is anything else."""
    try:
        members = _members(text)
        name, arguments = json.loads(members["name"]), members[key]
        whole = isinstance(name, str) and name and isinstance(json.loads(arguments), dict)
    except (ValueError, KeyError, RecursionError):
        return None
    return (name, arguments) if whole else None


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as the text it was written as. ValueError if it is not one object."""
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    at = _expect(text, _skip(text, 0), "{")
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == "}" and not members:
            break
        name, at = scanstring(text, _expect(text, at, '"'))
        start = _skip(text, _expect(text, _skip(text, at), ":"))
        _, stop = decoder.raw_decode(text, start)
        members[name] = text[start:stop]
        at = _skip(text, stop)
        if text[at : at + 1] == "}":
            break
        at = _expect(text, at, ",")
    if _skip(text, at + 1) != len(text):
        raise ValueError("more text after the object")
    return members


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None  # it matches nothing at all, too
    return space.end()


def _expect(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        raise ValueError(f"no {character} at {at}")
    return at + 1
