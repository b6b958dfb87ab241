"""The limits that a request sets to the form of its answer, and the grammar that holds the answer to it.

Each dialect has its own fields for it. Where the engine cannot hold answers to grammars, or the model's format of calls
has no grammar, the fields are ignored, and a strict endpoint refuses them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from etude.agents.proxy.request import APIError, ModelRequest
from etude.agents.proxy.request_fields import RequestFields
from etude.chat import ChatRenderer
from etude.chat.answer_grammar import AnswerForm, CallForm, FormKind, answer_grammar, can_hold_calls
from etude.chat.tokenizer import Ids
from etude.errors import DataError

NOT_HELD = "cannot be enforced by this endpoint. Ask for it in the messages, and check the answer."
SERVER_FIELDS: dict[str, FormKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""The fields by which servers of open models take a form."""
FORM_FIELDS = " ".join(["response_format", "structured_outputs", *SERVER_FIELDS])
"""The fields of a form in OpenAI's dialects."""


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammar of an answer, and the fields that it leaves out."""

    text: str | None
    ignored: tuple[str, ...] = ()


def parse_form(fields: RequestFields) -> AnswerForm | None:
    """Take the form of an answer from a request of OpenAI's dialects."""
    format = parse_format(fields, "response_format")
    forms = [] if format is None else [format]
    forms += _structured_outputs(fields.section("structured_outputs"))
    for name, kind in SERVER_FIELDS.items():
        if name in fields:
            forms.append(_form(fields, name, kind, fields.value(name), name))
    if len(forms) > 1:
        raise fields.error(
            forms[1].field, f"and '{forms[0].field}' both say what form the answer has. Send one of them."
        )
    return forms[0] if forms else None


def parse_format(fields: RequestFields, name: str) -> AnswerForm | None:
    """Take a format: `text`, `json_object` or `json_schema`, whose schema may be in an object of that name."""
    format = fields.section(name)
    kind = format.string("type", "text")
    inner = format.section("json_schema") if "json_schema" in format else format
    schema = inner.value("schema")
    for accepted in ("name", "description", "strict"):
        inner.value(accepted)
    inner.apply_rules()
    if inner is not format:
        format.apply_rules()
    where = fields.path(name)
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerForm("json", {"type": "object"}, where)
    if kind != "json_schema" or not isinstance(schema, dict):
        raise fields.error(name, "must have the type 'text', 'json_object', or 'json_schema' with a 'schema'.")
    return AnswerForm("json", schema, where)


def _structured_outputs(fields: RequestFields) -> Iterator[AnswerForm]:
    for name in ("json", "regex", "choice", "grammar"):
        if name in fields:
            yield _form(fields, name, name, fields.value(name), f"structured_outputs.{name}")
    if fields.boolean("json_object"):
        yield AnswerForm("json", {"type": "object"}, "structured_outputs.json_object")
    fields.apply_rules()


def _form(fields: RequestFields, name: str, kind: FormKind, value: Any, where: str) -> AnswerForm:
    """Return a form; refuse a value of another type."""
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise fields.error(name, "must be a JSON schema, or its text.") from None
    if kind == "choice":
        fits = isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
    else:
        fits = isinstance(value, dict | bool) if kind == "json" else isinstance(value, str) and bool(value)
    if not fits:
        wanted = {"json": "a JSON schema", "choice": "a list of strings that is not empty"}
        raise fields.error(name, f"must be {wanted.get(kind, 'a string that is not empty')}.")
    return AnswerForm(kind, value, where)


def build_grammar(chat: ChatRenderer, prompt: Ids, request: ModelRequest, *, held: bool, strict: bool) -> AnswerGrammar:
    """Return the grammar of an answer.

    held: the engine can hold answers to grammars. strict: refuse a request that the answer would not follow.
    """
    limits = request.limits
    calls, unheld = _call_form(chat, request) if held else (None, limits.fields)
    if strict and unheld:
        raise APIError(f"'{unheld[0]}' {NOT_HELD}", param=unheld[0], code="unsupported_parameter")
    form = limits.form if held else None
    if form is None and calls is None:
        return AnswerGrammar(None, unheld)
    if request.prefill is not None:
        named = form.field if form is not None else limits.fields[0]
        raise APIError(f"'{named}' cannot hold an answer that the request begins. Send one of them.", param=named)
    try:
        text = answer_grammar(chat, prompt, form, calls, reasons=request.prompt is None)
        warnings = chat.tokenizer.grammars.warnings(text)
    except DataError as error:
        named = form.field if form is not None else "tools"
        raise APIError(f"'{named}' cannot be followed: {error}", param=named) from error
    if strict and warnings:
        named = form.field if form is not None else "tools"
        raise APIError(f"'{named}' cannot be followed: {warnings[0]}.", param=named, code="unsupported_parameter")
    where = form.field if form is not None else "tools.strict"
    return AnswerGrammar(text, (*unheld, *(where for _ in warnings[:1])))


def _call_form(chat: ChatRenderer, request: ModelRequest) -> tuple[CallForm | None, tuple[str, ...]]:
    """Return how the answer may call tools, if that is limited, and the fields that it will not follow."""
    limits, required = request.limits, request.tool_choice == "required"
    call_fields = tuple(name for name in limits.fields if limits.form is None or name != limits.form.field)
    if not request.tools or request.tool_choice == "none" or not (call_fields or required or limits.form):
        return None, ()
    if not can_hold_calls(chat, among_text=not required and limits.form is None):
        return None, call_fields
    allowed = [tool for tool in request.tools if not limits.allowed or tool["function"]["name"] in limits.allowed]
    form = CallForm(allowed, limits.strict, required, request.tool_name if required else "", bool(limits.single))
    return form, ()
