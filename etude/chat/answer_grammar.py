"""The grammar of an answer: what a request says about its form, as a text of `grammar`.

[reasoning] then  JSON of a schema, a regular expression, one of some texts, or the request's own grammar
                  or calls of tools, whose arguments have the tool's schema
                  or text in which each call has its tool's schema
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from etude.chat.grammar import HEADER, GrammarCompiler
from etude.chat.reasoning import THINK_CLOSE, THINK_OPEN
from etude.chat.tool_parsers import CALL_AFFIXES
from etude.errors import DataError
from etude.lazy import LazyModule

if TYPE_CHECKING:
    from llguidance import gbnf_to_lark

    from etude.chat.renderer import ChatRenderer
    from etude.chat.tokenizer import Ids
else:
    gbnf_to_lark = LazyModule("llguidance.gbnf_to_lark")

FormKind: TypeAlias = Literal["json", "regex", "choice", "grammar"]
CALL_ENDS: Mapping[str, str] = {"hermes": "}\n</tool_call>", "qwen_xml": "</function>\n</tool_call>", "llama3": "}"}
"""The text after the arguments of a call, for the formats of calls that a grammar can hold an answer to."""
SPACES = r"[ \n]{0,32}"
"""The blanks between two parts of JSON: no model can write them for ever.

A whole run of blanks fits the pattern, since vLLM's llguidance lets the pattern follow itself, and this one does not.
"""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_PARAMETER_END = "\n</parameter>\n"
_LAST_LINES = r"/\n{0,2}/"


@dataclass(frozen=True)
class AnswerForm:
    """The form that the text of an answer has to have."""

    kind: FormKind
    value: Any
    """The schema, the pattern, the texts, or the grammar."""
    field: str
    """The field of the request that says so."""


@dataclass(frozen=True)
class CallForm:
    """The calls of tools that an answer may have."""

    tools: Sequence[Mapping[str, Any]]
    """The tools that may be called."""
    strict: frozenset[str] = frozenset()
    """The names of tools whose arguments have to have their schema; those of others are any JSON object."""
    required: bool = False
    """True if the answer is a call, of which it has to write what comes after `CALL_AFFIXES`."""
    name: str = ""
    """The tool whose name the answer begins behind."""
    single: bool = False
    """True if there may be one call at most."""


def can_hold_calls(chat: ChatRenderer, *, among_text: bool) -> bool:
    """Return whether a grammar can hold a model's calls. among_text: also where the answer may have other text, which
    needs a token that opens a call."""
    format = chat.tool_format
    affixes = CALL_AFFIXES[format] if format is not None and format in CALL_ENDS else None
    return affixes is not None and (not among_text or chat.tokenizer.grammars.is_mark(affixes[0].split("\n")[0]))


def answer_grammar(
    chat: ChatRenderer, prompt: Ids, form: AnswerForm | None, calls: CallForm | None, *, reasons: bool = True
) -> str:
    """Return the grammar of an answer to a prompt. reasons: the answer may begin with reasoning."""
    grammars = chat.tokenizer.grammars
    rules: list[str] = []
    if calls is not None:
        assert chat.tool_format is not None, "the tools of a model without calls are in no grammar"
        rules += _call_rules(grammars, chat.tool_format, calls)
        more = "" if calls.single or chat.tool_format == "llama3" else ' ("\\n" call)*'
        if calls.required:
            return _join(f"start: first{more}", rules)
    if form is None:
        rules.append("body: text? call?" if calls is not None and calls.single else "body: text? (call text?)*")
        rules.append(r"text: /(?s:.+)/")
    else:
        rules += _form_rules(form)
        if calls is not None:
            rules.append(f"body: form | call{more}")
    think = _reasoning_rules(chat, prompt) if reasons else [""]
    body = "body" if form is None or calls is not None else "form"
    return _join(f"start: {think[0]}{body}", [*rules, *think[1:]])


def _join(start: str, rules: Sequence[str]) -> str:
    return HEADER + "\n".join([start, *rules]) + "\n"


def _reasoning_rules(chat: ChatRenderer, prompt: Ids) -> list[str]:
    """Return what comes before the answer's body, and its rules: reasoning that the prompt opens, or the model may."""
    grammars = chat.tokenizer.grammars
    opened = chat.opens_reasoning(prompt)
    if not opened and not chat.may_open_reasoning(prompt):
        return [""]
    if grammars.is_mark(THINK_CLOSE):
        rules = [f"think: /(?s:.*)/ {grammars.literal(THINK_CLOSE)} {_LAST_LINES}"]
    else:
        rules = [f"think: think_end {_LAST_LINES}", f"think_end[lazy]: /(?s:.*){_escaped(THINK_CLOSE)}/"]
    return ["think ", *rules] if opened else [f"({grammars.literal(THINK_OPEN)} think)? ", *rules]


def _form_rules(form: AnswerForm) -> list[str]:
    value = form.value
    if form.kind == "json":
        return [f"form: {_json(value)}"]
    if form.kind == "regex":
        return [f"form: /{_in_slashes(value)}/"]
    if form.kind == "choice":
        return ["form: " + " | ".join(json.dumps(text) for text in value)]
    return [re.sub(r"^start(?=\s*:)", "form", _in_lark(value).removeprefix(HEADER), flags=re.MULTILINE)]


def _in_lark(grammar: str) -> str:
    """Return a grammar in Lark, also one that was written as llama.cpp does (GBNF)."""
    try:
        return gbnf_to_lark.any_to_lark(grammar)
    except ValueError as error:
        raise DataError(f"The grammar cannot be read: {error}") from error


def _call_rules(grammars: GrammarCompiler, tool_format: str, calls: CallForm) -> list[str]:
    """Return the rules `first` and `call`: the rest of a call that has begun, and a whole call."""
    before, after = CALL_AFFIXES[tool_format]
    end = CALL_ENDS[tool_format]
    quote = '"' if before.endswith('"') else ""
    names = [str(tool["function"]["name"]) for tool in calls.tools]
    rules: list[str] = []
    whole: list[str] = []
    rest: list[str] = []
    for number, (name, tool) in enumerate(zip(names, calls.tools, strict=True)):
        schema = tool["function"].get("parameters") if name in calls.strict else None
        arguments, more = _arguments(grammars, tool_format, schema, f"call_{number}")
        rules += [f"arguments_{number}: {arguments} {grammars.literal(end)}", *more]
        head = json.dumps(name)[1:-1] + quote + after
        whole.append(f"{grammars.literal(before + head)} arguments_{number}")
        if not calls.name:
            rest.append(f"{grammars.literal(head)} arguments_{number}")
        elif name == calls.name:
            rest.append(f"arguments_{number}")
    rules.append("call: " + " | ".join(whole))
    rules.append("first: " + " | ".join(rest or whole))
    return rules


def _arguments(
    grammars: GrammarCompiler, tool_format: str, schema: Mapping[str, Any] | None, prefix: str
) -> tuple[str, list[str]]:
    """Return a tool's arguments, and the rules that they need. prefix: of the names of these rules."""
    if tool_format != "qwen_xml":
        return _json(schema or ANY_OBJECT), []
    if schema is None:
        lines = f"{prefix}_any[lazy]: /<parameter=[^>\\n]+>(?s:.*){_escaped(_PARAMETER_END)}/"
        return f"{prefix}_any*", [lines]
    properties = schema.get("properties") or {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts: list[str] = []
    rules: list[str] = []
    for number, (name, inner) in enumerate(properties.items()):
        rule = f"{prefix}_{number}"
        opening = grammars.literal(f"<parameter={name}>\n")
        if isinstance(inner, Mapping) and inner.get("type") == "string" and "enum" not in inner:
            rules += [f"{rule}: {opening} {rule}_text", f"{rule}_text[lazy]: /(?s:.*){_escaped(_PARAMETER_END)}/"]
        elif isinstance(inner, Mapping) and all(isinstance(text, str) for text in inner.get("enum", [0])):
            texts = " | ".join(json.dumps(text) for text in inner["enum"])
            rules.append(f"{rule}: {opening} ({texts}) {grammars.literal(_PARAMETER_END)}")
        else:
            value = {**inner, **shared} if isinstance(inner, Mapping) else inner
            rules.append(f"{rule}: {opening} {_json(value)} {grammars.literal(_PARAMETER_END)}")
        parts.append(rule if name in schema.get("required", ()) else f"{rule}?")
    return " ".join(parts), rules


def _json(schema: Any) -> str:
    """Return the JSON values of a schema. Keywords that llguidance does not know are left out, with a warning."""
    settings = {"x-guidance": {"whitespace_pattern": SPACES, "lenient": True}}
    known = {**schema, **settings} if isinstance(schema, Mapping) else settings if schema is True else schema
    return f"%json {json.dumps(known)}"


def _escaped(text: str) -> str:
    """Return a pattern of this text, for use between slashes."""
    return _in_slashes(re.escape(text).replace("\\\n", "\\n"))


def _in_slashes(pattern: str) -> str:
    """Return a pattern as it stands between two slashes."""
    pairs = re.findall(r"\\.|[^\\]", pattern, flags=re.DOTALL)
    return "".join({"/": "\\/", "\n": "\\n"}.get(pair, pair) for pair in pairs)
