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

from etude.chat.feed import SPACE, Feed, Found, Reading, literal, ready, run, sought, until
from etude.chat.values import as_json, json_object, json_of, python_value

__all__ = ["FORMS", "MARKS", "Form", "Tools", "form_of"]

Tools: TypeAlias = Sequence[Mapping[str, Any]]
Form: TypeAlias = Callable[[Feed, Tools], Reading[None]]
"""What reads an answer, given the tools that were offered: its content and its calls."""
_Body: TypeAlias = Callable[[Feed], Reading[Found]]
"""What reads the calls between two marks, of which there are none if it is anything else."""

_BLOCK = ("<tool_call>", "</tool_call>")
_LISTED = ("<|tool_call_start|>", "<|tool_call_end|>")
_PYTHON = ("<|python_start|>", "<|python_end|>")
_PYTHON_TAG, _CALLS, _CALL_ID, _ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKS = (*_BLOCK, *_LISTED, *_PYTHON, _PYTHON_TAG, _CALLS, _CALL_ID, _ARGS)
"""The tokens that forms are made of: they belong to the text, be they special or not."""

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[\w.:/-]*")
_WORD = re.compile(r"\w*")
_LINE = re.compile(r"[^>\n]*")
_TEACHES_PYTHON = re.compile(r"\[\w+\(\w+=")
_CONSTANTS = {"True": True, "False": False, "None": None}


def hermes(feed: Feed, _tools: Tools) -> Reading[None]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, amid text: Hermes, Qwen 2.5, Qwen 3.

    The line break before a block belongs to it.
    """
    yield from _blocks(feed, _BLOCK, lambda feed: _one(_json_call(feed, "arguments")), lead="\n")


def qwen_xml(feed: Feed, tools: Tools) -> Reading[None]:
    """`<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`: Qwen 3 Coder, Qwen 3.5 and on,
    Nemotron 3.

    A parameter is a text, unless the tools that were offered say that it is something else and it reads as JSON.
    """
    yield from _blocks(feed, _BLOCK, lambda feed: _one(_function(feed, tools)), lead="\n")


def lfm2(feed: Feed, _tools: Tools) -> Reading[None]:
    """`<|tool_call_start|>[f(a=1), g(b='x')]<|tool_call_end|>` amid text: LFM 2."""
    yield from _blocks(feed, _LISTED, _python_calls)


def mistral(feed: Feed, _tools: Tools) -> Reading[None]:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and what came after it, `[TOOL_CALLS]name[ARGS]{…}` any number
    of times: Mistral, after text or without."""
    yield from _blocks(feed, (_CALLS, ""), _mistral_calls)


def llama3(feed: Feed, _tools: Tools) -> Reading[None]:
    """One `{"name": …, "parameters": {…}}` that is all of the text, perhaps after `<|python_tag|>`; and, after that
    alone, `name.call(a="x")`, as the tools are called that the model brings along: Llama 3.1 and on."""
    yield from _alone(feed, _llama3_calls)


def pythonic(feed: Feed, _tools: Tools) -> Reading[None]:
    """`[f(a=1), g(b="x")]` that is all of the text: Llama 3.2 and Llama 4, where their template teaches it."""
    yield from _alone(feed, _pythonic_calls)


FORMS: dict[str, Form] = {
    "hermes": hermes,
    "qwen_xml": qwen_xml,
    "llama3": llama3,
    "mistral": mistral,
    "pythonic": pythonic,
    "lfm2": lfm2,
}


def form_of(template: str) -> str | None:
    """The form of call that a template teaches its model, by its own words; None for one that is not known here."""
    if "<tool_call>" in template and "<arg_key>" not in template:
        return "qwen_xml" if "<function=" in template else "hermes"
    if _CALLS in template:
        return "mistral"
    if _LISTED[0] in template or "<|tool_list_start|>" in template:
        return "lfm2"
    if _TEACHES_PYTHON.search(template):
        return "pythonic"
    if '"parameters": ' in template and "ipython" in template:
        return "llama3"
    return None


def _blocks(feed: Feed, marks: tuple[str, str], body: _Body, lead: str = "") -> Reading[None]:
    """Text with calls in it, each between two marks. After a mark that begins none, text goes on."""
    opening, closing = marks
    while (yield from sought(feed, opening, lead)):
        begun = feed.at
        yield from run(feed, SPACE)
        found = yield from body(feed)
        if found and closing:
            yield from run(feed, SPACE)
        if found and (yield from literal(feed, closing)):
            feed.calls(found)
        else:
            feed.content(begun)


def _alone(feed: Feed, body: _Body) -> Reading[None]:
    """A text that is calls and nothing else, or has none."""
    yield from run(feed, SPACE)
    found = yield from body(feed)
    if found:
        yield from run(feed, SPACE)
    if found and not (yield from ready(feed)):
        feed.calls(found)
    while True:
        feed.content(len(feed.text))
        if feed.ended:
            return
        yield


def _one(call: Reading[tuple[str, str] | None]) -> Reading[Found]:
    found = yield from call
    return [] if found is None else [found]


def _llama3_calls(feed: Feed) -> Reading[Found]:
    tagged = yield from literal(feed, _PYTHON_TAG)
    yield from run(feed, SPACE)
    call = yield from _json_call(feed, "parameters")
    if call is None and tagged:
        own = yield from _python_call(feed)
        call = (own[0].removesuffix(".call"), own[1]) if own and own[0].endswith(".call") else None
    return [call] if call and call[0] else []


def _pythonic_calls(feed: Feed) -> Reading[Found]:
    begun = yield from literal(feed, _PYTHON[0])
    yield from run(feed, SPACE)
    found = yield from _python_calls(feed)
    if found and begun:
        yield from run(feed, SPACE)
        yield from literal(feed, _PYTHON[1])
    return found


def _mistral_calls(feed: Feed) -> Reading[Found]:
    if (yield from literal(feed, "[")):
        return (yield from _several(feed, lambda feed: _json_call(feed, "arguments")))
    name = yield from run(feed, _NAME)
    if (yield from literal(feed, _CALL_ID)):
        yield from run(feed, _NAME)
    if not name or not (yield from literal(feed, _ARGS)):
        return []
    yield from run(feed, SPACE)
    arguments = yield from json_object(feed)
    return [(name, arguments)] if arguments is not None and _is_object(arguments) else []


def _several(feed: Feed, one: Callable[[Feed], Reading[tuple[str, str] | None]]) -> Reading[Found]:
    """Calls with commas between them, up to a `]`."""
    found: list[tuple[str, str]] = []
    while True:
        yield from run(feed, SPACE)
        call = yield from one(feed)
        if call is None:
            return []
        found.append(call)
        yield from run(feed, SPACE)
        if (yield from literal(feed, "]")):
            return found
        if not (yield from literal(feed, ",")):
            return []


def _python_calls(feed: Feed) -> Reading[Found]:
    """`[f(a=1), g(b="x")]`."""
    return (yield from _several(feed, _python_call)) if (yield from literal(feed, "[")) else []


def _python_call(feed: Feed) -> Reading[tuple[str, str] | None]:
    """`f(a=1, b="x")`: every argument has its name, and a value that JSON has too."""
    name = yield from _named(feed, _NAME)
    if not name or not (yield from literal(feed, "(")):
        return None
    given: dict[str, str] = {}
    while True:
        yield from run(feed, SPACE)
        if (yield from literal(feed, ")")):
            break
        key = yield from _named(feed, _WORD)
        yield from run(feed, SPACE)
        if not key or key in given or not (yield from literal(feed, "=")):
            return None
        value = yield from python_value(feed)
        if value is None:
            return None
        given[key] = value
        yield from run(feed, SPACE)
        if not (yield from literal(feed, ",")):
            if not (yield from literal(feed, ")")):
                return None
            break
    arguments = f"{{{', '.join(f'{as_json(key)}: {value}' for key, value in given.items())}}}"
    return (name, arguments) if _is_object(arguments) else None


def _named(feed: Feed, pattern: re.Pattern[str]) -> Reading[str]:
    """A name as Python has them, which does not begin with a digit; nothing if there is none."""
    if (yield from ready(feed)) and (feed.text[feed.at].isalpha() or feed.text[feed.at] == "_"):
        return (yield from run(feed, pattern))
    return ""


def _function(feed: Feed, tools: Tools) -> Reading[tuple[str, str] | None]:
    """The name of `<function=…>` and its parameters as JSON. A block ends at its first `</tool_call>`, wherever that
    stands."""
    if not (yield from literal(feed, "<function=")):
        return None
    name = yield from run(feed, _LINE)
    if not name or not (yield from literal(feed, ">")):
        return None
    declared, given = _declared(name, tools), {}
    while True:
        yield from run(feed, SPACE)
        if not (yield from literal(feed, "<parameter=")):
            break
        key = yield from run(feed, _LINE)
        if not key or not (yield from literal(feed, ">")):
            return None
        start = feed.at
        if (yield from until(feed, _PARAMETER_ENDS, len("</parameter>"))) != "</parameter>":
            return None
        written = feed.text[start : feed.at - len("</parameter>")]
        given[key] = _typed(written.removeprefix("\n").removesuffix("\n"), declared.get(key))
    return (name, as_json(given)) if (yield from literal(feed, "</function>")) else None


_PARAMETER_ENDS = re.compile("</parameter>|</tool_call>")


def _declared(name: str, tools: Tools) -> Mapping[str, Any]:
    """What the tools say of the parameters of this one."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _typed(written: str, schema: Any) -> Any:
    """What a parameter's text stands for; some templates write Python's words for true, false and null."""
    if "string" in _kinds(schema):
        return written
    try:
        return _CONSTANTS[written] if written in _CONSTANTS else json_of(written)
    except ValueError:
        return written


def _kinds(schema: Any) -> set[Any]:
    """The types that a schema allows; where it names none, it is a text."""
    if not isinstance(schema, Mapping):
        return {"string"}
    if isinstance(schema.get("type"), str):
        return {schema["type"]}
    several = schema.get("type") or schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(several, list | tuple) or not several:
        return {"string"}
    return set().union(*({kind} if isinstance(kind, str) else _kinds(kind) for kind in several))


def _json_call(feed: Feed, key: str) -> Reading[tuple[str, str] | None]:
    """The name and the JSON text of the arguments of `{"name": …, key: {…}}`."""
    text = yield from json_object(feed)
    if text is None:
        return None
    try:
        members = _members(text)
        name, arguments = json_of(members["name"]), members[key]
        name.encode()  # half a character cannot be sent to anybody
    except (ValueError, KeyError, AttributeError):
        return None
    return (name, arguments) if name and _is_object(arguments) else None


def _is_object(text: str) -> bool:
    """Whether it is a JSON object, and one that can be sent: half a character, which JSON can write, cannot be."""
    try:
        found = json_of(text)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except ValueError:
        return False
    return isinstance(found, dict)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as the text it was written as. ValueError where it is nested deeper than
    anybody reads."""
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        name, at = scanstring(text, _skip(text, at) + 1)
        start = _skip(text, _skip(text, at) + 1)
        try:
            _, stop = decoder.raw_decode(text, start)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        members[name] = text[start:stop]
        at = _skip(text, stop)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members


def _skip(text: str, at: int) -> int:
    space = _JSON_SPACE.match(text, at)
    assert space is not None  # it matches nothing at all, too
    return space.end()
