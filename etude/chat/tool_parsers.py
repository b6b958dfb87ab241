"""Incremental parsers of the formats in which models call tools (see `parsing`). A call with any error stays text.

The arguments of a call are kept as the exact JSON text that the model wrote, so that the agent gets the sampled text.
Arguments in another format are converted. A call is emitted when it is complete, because an emission cannot be taken
back. A parser gives up at the first character that cannot be part of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, TypeAlias

from etude.chat.parsing import (
    SPACE,
    ParseBuffer,
    ParsedCalls,
    Parser,
    find_literal,
    has_more,
    match_literal,
    match_pattern,
    read_until,
)
from etude.chat.value_parsers import dump_json, load_json, parse_json_object, parse_python_value

Tools: TypeAlias = Sequence[Mapping[str, Any]]
ToolParser: TypeAlias = Callable[[ParseBuffer, Tools], Parser[None]]
"""Parses an answer with the given tools: emits its content and its calls."""
_CallsParser: TypeAlias = Callable[[ParseBuffer], Parser[ParsedCalls]]
"""Parses the calls between two marks; returns none if the text is anything else."""

_BLOCK = ("<tool_call>", "</tool_call>")
_LFM2_BLOCK = ("<|tool_call_start|>", "<|tool_call_end|>")
_PYTHON = ("<|python_start|>", "<|python_end|>")
_PYTHON_TAG = "<|python_tag|>"
_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"
TOOL_MARKERS = (*_BLOCK, *_LFM2_BLOCK, *_PYTHON, _PYTHON_TAG, _CALLS, _CALL_ID, _ARGS)
"""The tokens that the formats consist of: they belong to the text, whether they are special tokens or not."""

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[\w.:/-]*")
_WORD = re.compile(r"\w*")
_LINE = re.compile(r"[^>\n]*")
_TEACHES_PYTHON = re.compile(r"\[\w+\(\w+=")
_CONSTANTS = {"True": True, "False": False, "None": None}


def hermes(buffer: ParseBuffer, _tools: Tools) -> Parser[None]:
    """Parse `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of times within text: Hermes, Qwen 2.5,
    Qwen 3.

    The line break before a block belongs to it.
    """
    yield from _parse_blocks(buffer, _BLOCK, lambda buffer: _as_list(_parse_json_call(buffer, "arguments")), lead="\n")


def qwen_xml(buffer: ParseBuffer, tools: Tools) -> Parser[None]:
    """Parse `<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`: Qwen 3 Coder, Qwen 3.5 and
    later, Nemotron 3.

    A parameter is a string, unless the tools declare another type and its text is valid JSON.
    """
    yield from _parse_blocks(buffer, _BLOCK, lambda buffer: _as_list(_parse_function(buffer, tools)), lead="\n")


def lfm2(buffer: ParseBuffer, _tools: Tools) -> Parser[None]:
    """Parse `<|tool_call_start|>[f(a=1), g(b='x')]<|tool_call_end|>` within text: LFM 2."""
    yield from _parse_blocks(buffer, _LFM2_BLOCK, _parse_python_calls)


def mistral(buffer: ParseBuffer, _tools: Tools) -> Parser[None]:
    """Parse `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or its successor `[TOOL_CALLS]name[ARGS]{…}` any number
    of times: Mistral, with or without text before."""
    yield from _parse_blocks(buffer, (_CALLS, ""), _parse_mistral_calls)


def llama3(buffer: ParseBuffer, _tools: Tools) -> Parser[None]:
    """Parse one `{"name": …, "parameters": {…}}` that is all of the text, possibly after `<|python_tag|>`: Llama 3.1
    and later. After that tag it may also be `name.call(a="x")`, the form of the model's built-in tools."""
    yield from _parse_only_calls(buffer, _parse_llama3_calls)


def pythonic(buffer: ParseBuffer, _tools: Tools) -> Parser[None]:
    """Parse `[f(a=1), g(b="x")]` that is all of the text: Llama 3.2 and Llama 4, if their template describes it."""
    yield from _parse_only_calls(buffer, _parse_pythonic_calls)


TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": hermes,
    "qwen_xml": qwen_xml,
    "llama3": llama3,
    "mistral": mistral,
    "pythonic": pythonic,
    "lfm2": lfm2,
}
CALL_AFFIXES = {
    "hermes": ('<tool_call>\n{"name": "', ', "arguments": '),
    "qwen_xml": ("<tool_call>\n<function=", ">\n"),
    "llama3": ('{"name": "', ', "parameters": '),
    "pythonic": ("[", "("),
    "lfm2": ("<|tool_call_start|>[", "("),
}
"""The text before and after a tool's name, by format: an answer that must call a tool begins with it."""


def detect_tool_format(template: str) -> str | None:
    """Return the format of tool calls that a template describes to the model; None if it is unknown."""
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "qwen_xml" if "<function=" in template else "hermes"
    if _CALLS in template:
        return "mistral"
    if _LFM2_BLOCK[0] in template or "<|tool_list_start|>" in template:
        return "lfm2"
    if _TEACHES_PYTHON.search(template):
        return "pythonic"
    if '"parameters": ' in template and "ipython" in template:
        return "llama3"
    return None


def _parse_blocks(
    buffer: ParseBuffer, marks: tuple[str, str], parse_calls: _CallsParser, lead: str = ""
) -> Parser[None]:
    """Parse text with calls in it, each between two marks. After a mark without a call, the text continues."""
    opening, closing = marks
    while (yield from find_literal(buffer, opening, lead)):
        start = buffer.position
        yield from match_pattern(buffer, SPACE)
        calls = yield from parse_calls(buffer)
        if calls and closing:
            yield from match_pattern(buffer, SPACE)
        if calls and (yield from match_literal(buffer, closing)):
            buffer.emit_calls(calls)
        else:
            buffer.emit_content(start)


def _parse_only_calls(buffer: ParseBuffer, parse_calls: _CallsParser) -> Parser[None]:
    """Parse a text that consists of calls only, or has none."""
    yield from match_pattern(buffer, SPACE)
    calls = yield from parse_calls(buffer)
    if calls:
        yield from match_pattern(buffer, SPACE)
    if calls and not (yield from has_more(buffer)):
        buffer.emit_calls(calls)
    while True:
        buffer.emit_content(len(buffer.text))
        if buffer.is_complete:
            return
        yield


def _as_list(parser: Parser[tuple[str, str] | None]) -> Parser[ParsedCalls]:
    call = yield from parser
    return [] if call is None else [call]


def _parse_llama3_calls(buffer: ParseBuffer) -> Parser[ParsedCalls]:
    tagged = yield from match_literal(buffer, _PYTHON_TAG)
    yield from match_pattern(buffer, SPACE)
    call = yield from _parse_json_call(buffer, "parameters")
    if call is None and tagged:
        python_call = yield from _parse_python_call(buffer)
        call = (
            (python_call[0].removesuffix(".call"), python_call[1])
            if python_call and python_call[0].endswith(".call")
            else None
        )
    return [call] if call and call[0] else []


def _parse_pythonic_calls(buffer: ParseBuffer) -> Parser[ParsedCalls]:
    has_start = yield from match_literal(buffer, _PYTHON[0])
    yield from match_pattern(buffer, SPACE)
    calls = yield from _parse_python_calls(buffer)
    if calls and has_start:
        yield from match_pattern(buffer, SPACE)
        yield from match_literal(buffer, _PYTHON[1])
    return calls


def _parse_mistral_calls(buffer: ParseBuffer) -> Parser[ParsedCalls]:
    if (yield from match_literal(buffer, "[")):
        return (yield from _parse_list(buffer, lambda buffer: _parse_json_call(buffer, "arguments")))
    name = yield from match_pattern(buffer, _NAME)
    if (yield from match_literal(buffer, _CALL_ID)):
        yield from match_pattern(buffer, _NAME)
    if not name or not (yield from match_literal(buffer, _ARGS)):
        return []
    yield from match_pattern(buffer, SPACE)
    arguments = yield from parse_json_object(buffer)
    return [(name, arguments)] if arguments is not None and _is_object(arguments) else []


def _parse_list(
    buffer: ParseBuffer, parse_call: Callable[[ParseBuffer], Parser[tuple[str, str] | None]]
) -> Parser[ParsedCalls]:
    """Parse calls that are separated by commas, up to a `]`."""
    calls: list[tuple[str, str]] = []
    while True:
        yield from match_pattern(buffer, SPACE)
        call = yield from parse_call(buffer)
        if call is None:
            return []
        calls.append(call)
        yield from match_pattern(buffer, SPACE)
        if (yield from match_literal(buffer, "]")):
            return calls
        if not (yield from match_literal(buffer, ",")):
            return []


def _parse_python_calls(buffer: ParseBuffer) -> Parser[ParsedCalls]:
    """Parse `[f(a=1), g(b="x")]`."""
    return (yield from _parse_list(buffer, _parse_python_call)) if (yield from match_literal(buffer, "[")) else []


def _parse_python_call(buffer: ParseBuffer) -> Parser[tuple[str, str] | None]:
    """Parse `f(a=1, b="x")`: every argument has a name, and a value that JSON can express."""
    name = yield from _parse_name(buffer, _NAME)
    if not name or not (yield from match_literal(buffer, "(")):
        return None
    parsed: dict[str, str] = {}
    while True:
        yield from match_pattern(buffer, SPACE)
        if (yield from match_literal(buffer, ")")):
            break
        key = yield from _parse_name(buffer, _WORD)
        yield from match_pattern(buffer, SPACE)
        if not key or key in parsed or not (yield from match_literal(buffer, "=")):
            return None
        value = yield from parse_python_value(buffer)
        if value is None:
            return None
        parsed[key] = value
        yield from match_pattern(buffer, SPACE)
        if not (yield from match_literal(buffer, ",")):
            if not (yield from match_literal(buffer, ")")):
                return None
            break
    arguments = f"{{{', '.join(f'{dump_json(key)}: {value}' for key, value in parsed.items())}}}"
    return (name, arguments) if _is_object(arguments) else None


def _parse_name(buffer: ParseBuffer, pattern: re.Pattern[str]) -> Parser[str]:
    """Parse a Python name, which does not begin with a digit; return an empty string if there is none."""
    if (yield from has_more(buffer)) and (
        buffer.text[buffer.position].isalpha() or buffer.text[buffer.position] == "_"
    ):
        return (yield from match_pattern(buffer, pattern))
    return ""


def _parse_function(buffer: ParseBuffer, tools: Tools) -> Parser[tuple[str, str] | None]:
    """Parse `<function=…>` with its parameters; return its name and the parameters as JSON. A block ends at its first
    `</tool_call>`, even within a parameter."""
    if not (yield from match_literal(buffer, "<function=")):
        return None
    name = yield from match_pattern(buffer, _LINE)
    if not name or not (yield from match_literal(buffer, ">")):
        return None
    schemas, parsed = _parameter_schemas(name, tools), {}
    while True:
        yield from match_pattern(buffer, SPACE)
        if not (yield from match_literal(buffer, "<parameter=")):
            break
        key = yield from match_pattern(buffer, _LINE)
        if not key or not (yield from match_literal(buffer, ">")):
            return None
        start = buffer.position
        if (yield from read_until(buffer, _PARAMETER_ENDS, len("</parameter>"))) != "</parameter>":
            return None
        text = buffer.text[start : buffer.position - len("</parameter>")]
        parsed[key] = _convert_parameter(text.removeprefix("\n").removesuffix("\n"), schemas.get(key))
    return (name, dump_json(parsed)) if (yield from match_literal(buffer, "</function>")) else None


_PARAMETER_ENDS = re.compile("</parameter>|</tool_call>")


def _parameter_schemas(name: str, tools: Tools) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _convert_parameter(text: str, schema: Any) -> Any:
    """Return the value of a parameter's text. Some templates use Python's words for true, false and null."""
    if "string" in _schema_types(schema):
        return text
    try:
        return _CONSTANTS[text] if text in _CONSTANTS else load_json(text)
    except ValueError:
        return text


def _schema_types(schema: Any) -> set[Any]:
    """Return the types that a schema allows; string if it names none."""
    if not isinstance(schema, Mapping):
        return {"string"}
    if isinstance(schema.get("type"), str):
        return {schema["type"]}
    alternatives = schema.get("type") or schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(alternatives, list | tuple) or not alternatives:
        return {"string"}
    return set().union(*({kind} if isinstance(kind, str) else _schema_types(kind) for kind in alternatives))


def _parse_json_call(buffer: ParseBuffer, key: str) -> Parser[tuple[str, str] | None]:
    """Parse `{"name": …, key: {…}}`; return the name and the JSON text of the arguments."""
    text = yield from parse_json_object(buffer)
    if text is None:
        return None
    try:
        members = _split_members(text)
        name, arguments = load_json(members["name"]), members[key]
        name.encode()  # raises for an unpaired surrogate, which cannot be sent
    except (ValueError, KeyError, AttributeError):
        return None
    return (name, arguments) if name and _is_object(arguments) else None


def _is_object(text: str) -> bool:
    """Return whether the text is a JSON object that can be sent. An unpaired surrogate, which JSON can express, cannot
    be."""
    try:
        value = load_json(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return False
    return isinstance(value, dict)


def _split_members(text: str) -> dict[str, str]:
    """Return the members of a JSON object, each value as its original text. Raise ValueError if it is nested too
    deeply."""
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    position = _skip_space(text, 1)
    while text[position] != "}":
        name, position = scanstring(text, _skip_space(text, position) + 1)
        start = _skip_space(text, _skip_space(text, position) + 1)
        try:
            _, stop = decoder.raw_decode(text, start)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        members[name] = text[start:stop]
        position = _skip_space(text, stop)
        position = _skip_space(text, position + 1) if text[position] == "," else position
    return members


def _skip_space(text: str, position: int) -> int:
    space = _JSON_SPACE.match(text, position)
    assert space is not None  # the pattern also matches the empty string
    return space.end()
