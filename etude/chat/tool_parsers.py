"""The forms in which models call tools, read as they come (`feed`). What is not a call to the letter stays text.

A call's arguments are kept as the very JSON text the model wrote, so that what an agent is shown is what was sampled;
where a model writes them in another form, they are what that says. Nothing is a call before it is whole: what would be
told earlier could not be taken back. That it is none is known at the first character that cannot stand there.
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

__all__ = ["TOOL_MARKERS", "TOOL_PARSERS", "ToolParser", "Tools", "detect_tool_format"]

Tools: TypeAlias = Sequence[Mapping[str, Any]]
ToolParser: TypeAlias = Callable[[ParseBuffer, Tools], Parser[None]]
"""What reads an answer, given the tools that were offered: its content and its calls."""
_CallsParser: TypeAlias = Callable[[ParseBuffer], Parser[ParsedCalls]]
"""What reads the calls between two marks, of which there are none if it is anything else."""

_BLOCK = ("<tool_call>", "</tool_call>")
_LFM2_BLOCK = ("<|tool_call_start|>", "<|tool_call_end|>")
_PYTHON = ("<|python_start|>", "<|python_end|>")
_PYTHON_TAG, _CALLS, _CALL_ID, _ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
TOOL_MARKERS = (*_BLOCK, *_LFM2_BLOCK, *_PYTHON, _PYTHON_TAG, _CALLS, _CALL_ID, _ARGS)
"""The tokens that forms are made of: they belong to the text, be they special or not."""

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[\w.:/-]*")
_WORD = re.compile(r"\w*")
_LINE = re.compile(r"[^>\n]*")
_TEACHES_PYTHON = re.compile(r"\[\w+\(\w+=")
_CONSTANTS = {"True": True, "False": False, "None": None}


def hermes(feed: ParseBuffer, _tools: Tools) -> Parser[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, amid text: Hermes, Qwen 2.5, Qwen 3.

    The line break before a block belongs to it.
    """
    yield from _parse_blocks(feed, _BLOCK, lambda feed: _as_list(_parse_json_call(feed, "arguments")), lead="\n")


def qwen_xml(feed: ParseBuffer, tools: Tools) -> Parser[None]:
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`: Qwen 3 Coder, Qwen 3.5 and on,
    Nemotron 3.

    A parameter is a text, unless the tools that were offered say that it is something else and it reads as JSON.
    """
    yield from _parse_blocks(feed, _BLOCK, lambda feed: _as_list(_parse_function(feed, tools)), lead="\n")


def lfm2(feed: ParseBuffer, _tools: Tools) -> Parser[None]:
    """`<|tool_call_start|>[f(a=1), g(b='x')]<|tool_call_end|>` amid text: LFM 2."""
    yield from _parse_blocks(feed, _LFM2_BLOCK, _parse_python_calls)


def mistral(feed: ParseBuffer, _tools: Tools) -> Parser[None]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and what came after it, `[TOOL_CALLS]name[ARGS]{…}` any number
    of times: Mistral, after text or without."""
    yield from _parse_blocks(feed, (_CALLS, ""), _parse_mistral_calls)


def llama3(feed: ParseBuffer, _tools: Tools) -> Parser[None]:
    """One `{"name": …, "parameters": {…}}` that is all of the text, perhaps after `<|python_tag|>`; and, after that
    alone, `name.call(a="x")`, as the tools are called that the model brings along: Llama 3.1 and on."""
    yield from _parse_only_calls(feed, _parse_llama3_calls)


def pythonic(feed: ParseBuffer, _tools: Tools) -> Parser[None]:
    """`[f(a=1), g(b="x")]` that is all of the text: Llama 3.2 and Llama 4, where their template teaches it."""
    yield from _parse_only_calls(feed, _parse_pythonic_calls)


TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": hermes,
    "qwen_xml": qwen_xml,
    "llama3": llama3,
    "mistral": mistral,
    "pythonic": pythonic,
    "lfm2": lfm2,
}


def detect_tool_format(template: str) -> str | None:
    """The form of call that a template teaches its model, by its own words; None for one that is not known here."""
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


def _parse_blocks(feed: ParseBuffer, marks: tuple[str, str], parse_calls: _CallsParser, lead: str = "") -> Parser[None]:
    """Text with calls in it, each between two marks. After a mark that begins none, text goes on."""
    opening, closing = marks
    while (yield from find_literal(feed, opening, lead)):
        begun = feed.position
        yield from match_pattern(feed, SPACE)
        found = yield from parse_calls(feed)
        if found and closing:
            yield from match_pattern(feed, SPACE)
        if found and (yield from match_literal(feed, closing)):
            feed.emit_calls(found)
        else:
            feed.emit_content(begun)


def _parse_only_calls(feed: ParseBuffer, parse_calls: _CallsParser) -> Parser[None]:
    """A text that is calls and nothing else, or has none."""
    yield from match_pattern(feed, SPACE)
    found = yield from parse_calls(feed)
    if found:
        yield from match_pattern(feed, SPACE)
    if found and not (yield from has_more(feed)):
        feed.emit_calls(found)
    while True:
        feed.emit_content(len(feed.text))
        if feed.is_complete:
            return
        yield


def _as_list(call: Parser[tuple[str, str] | None]) -> Parser[ParsedCalls]:
    found = yield from call
    return [] if found is None else [found]


def _parse_llama3_calls(feed: ParseBuffer) -> Parser[ParsedCalls]:
    tagged = yield from match_literal(feed, _PYTHON_TAG)
    yield from match_pattern(feed, SPACE)
    call = yield from _parse_json_call(feed, "parameters")
    if call is None and tagged:
        own = yield from _parse_python_call(feed)
        call = (own[0].removesuffix(".call"), own[1]) if own and own[0].endswith(".call") else None
    return [call] if call and call[0] else []


def _parse_pythonic_calls(feed: ParseBuffer) -> Parser[ParsedCalls]:
    begun = yield from match_literal(feed, _PYTHON[0])
    yield from match_pattern(feed, SPACE)
    found = yield from _parse_python_calls(feed)
    if found and begun:
        yield from match_pattern(feed, SPACE)
        yield from match_literal(feed, _PYTHON[1])
    return found


def _parse_mistral_calls(feed: ParseBuffer) -> Parser[ParsedCalls]:
    if (yield from match_literal(feed, "[")):
        return (yield from _parse_list(feed, lambda feed: _parse_json_call(feed, "arguments")))
    name = yield from match_pattern(feed, _NAME)
    if (yield from match_literal(feed, _CALL_ID)):
        yield from match_pattern(feed, _NAME)
    if not name or not (yield from match_literal(feed, _ARGS)):
        return []
    yield from match_pattern(feed, SPACE)
    arguments = yield from parse_json_object(feed)
    return [(name, arguments)] if arguments is not None and _is_object(arguments) else []


def _parse_list(
    feed: ParseBuffer, parse_call: Callable[[ParseBuffer], Parser[tuple[str, str] | None]]
) -> Parser[ParsedCalls]:
    """Calls with commas between them, up to a `]`."""
    found: list[tuple[str, str]] = []
    while True:
        yield from match_pattern(feed, SPACE)
        call = yield from parse_call(feed)
        if call is None:
            return []
        found.append(call)
        yield from match_pattern(feed, SPACE)
        if (yield from match_literal(feed, "]")):
            return found
        if not (yield from match_literal(feed, ",")):
            return []


def _parse_python_calls(feed: ParseBuffer) -> Parser[ParsedCalls]:
    """`[f(a=1), g(b="x")]`."""
    return (yield from _parse_list(feed, _parse_python_call)) if (yield from match_literal(feed, "[")) else []


def _parse_python_call(feed: ParseBuffer) -> Parser[tuple[str, str] | None]:
    """`f(a=1, b="x")`: every argument has its name, and a value that JSON has too."""
    name = yield from _parse_name(feed, _NAME)
    if not name or not (yield from match_literal(feed, "(")):
        return None
    given: dict[str, str] = {}
    while True:
        yield from match_pattern(feed, SPACE)
        if (yield from match_literal(feed, ")")):
            break
        key = yield from _parse_name(feed, _WORD)
        yield from match_pattern(feed, SPACE)
        if not key or key in given or not (yield from match_literal(feed, "=")):
            return None
        value = yield from parse_python_value(feed)
        if value is None:
            return None
        given[key] = value
        yield from match_pattern(feed, SPACE)
        if not (yield from match_literal(feed, ",")):
            if not (yield from match_literal(feed, ")")):
                return None
            break
    arguments = f"{{{', '.join(f'{dump_json(key)}: {value}' for key, value in given.items())}}}"
    return (name, arguments) if _is_object(arguments) else None


def _parse_name(feed: ParseBuffer, pattern: re.Pattern[str]) -> Parser[str]:
    """A name as Python has them, which does not begin with a digit; nothing if there is none."""
    if (yield from has_more(feed)) and (feed.text[feed.position].isalpha() or feed.text[feed.position] == "_"):
        return (yield from match_pattern(feed, pattern))
    return ""


def _parse_function(feed: ParseBuffer, tools: Tools) -> Parser[tuple[str, str] | None]:
    """The name of `<function=…>` and its parameters as JSON. A block ends at its first `</tool_call>`, wherever that
    stands."""
    if not (yield from match_literal(feed, "<function=")):
        return None
    name = yield from match_pattern(feed, _LINE)
    if not name or not (yield from match_literal(feed, ">")):
        return None
    declared, given = _parameter_schemas(name, tools), {}
    while True:
        yield from match_pattern(feed, SPACE)
        if not (yield from match_literal(feed, "<parameter=")):
            break
        key = yield from match_pattern(feed, _LINE)
        if not key or not (yield from match_literal(feed, ">")):
            return None
        start = feed.position
        if (yield from read_until(feed, _PARAMETER_ENDS, len("</parameter>"))) != "</parameter>":
            return None
        written = feed.text[start : feed.position - len("</parameter>")]
        given[key] = _convert_parameter(written.removeprefix("\n").removesuffix("\n"), declared.get(key))
    return (name, dump_json(given)) if (yield from match_literal(feed, "</function>")) else None


_PARAMETER_ENDS = re.compile("</parameter>|</tool_call>")


def _parameter_schemas(name: str, tools: Tools) -> Mapping[str, Any]:
    """What the tools say of the parameters of this one."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _convert_parameter(written: str, schema: Any) -> Any:
    """What a parameter's text stands for; some templates write Python's words for true, false and null."""
    if "string" in _schema_types(schema):
        return written
    try:
        return _CONSTANTS[written] if written in _CONSTANTS else load_json(written)
    except ValueError:
        return written


def _schema_types(schema: Any) -> set[Any]:
    """The types that a schema allows; where it names none, it is a text."""
    if not isinstance(schema, Mapping):
        return {"string"}
    if isinstance(schema.get("type"), str):
        return {schema["type"]}
    several = schema.get("type") or schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(several, list | tuple) or not several:
        return {"string"}
    return set().union(*({kind} if isinstance(kind, str) else _schema_types(kind) for kind in several))


def _parse_json_call(feed: ParseBuffer, key: str) -> Parser[tuple[str, str] | None]:
    """The name and the JSON text of the arguments of `{"name": …, key: {…}}`."""
    text = yield from parse_json_object(feed)
    if text is None:
        return None
    try:
        members = _split_members(text)
        name, arguments = load_json(members["name"]), members[key]
        name.encode()  # half a character cannot be sent to anybody
    except (ValueError, KeyError, AttributeError):
        return None
    return (name, arguments) if name and _is_object(arguments) else None


def _is_object(text: str) -> bool:
    """Whether it is a JSON object, and one that can be sent: half a character, which JSON can write, cannot be."""
    try:
        found = load_json(text)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except ValueError:
        return False
    return isinstance(found, dict)


def _split_members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as the text it was written as. ValueError where it is nested deeper than
    anybody reads."""
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    at = _skip_space(text, 1)
    while text[at] != "}":
        name, at = scanstring(text, _skip_space(text, at) + 1)
        start = _skip_space(text, _skip_space(text, at) + 1)
        try:
            _, stop = decoder.raw_decode(text, start)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        members[name] = text[start:stop]
        at = _skip_space(text, stop)
        at = _skip_space(text, at + 1) if text[at] == "," else at
    return members


def _skip_space(text: str, at: int) -> int:
    space = _JSON_SPACE.match(text, at)
    assert space is not None  # it matches nothing at all, too
    return space.end()
