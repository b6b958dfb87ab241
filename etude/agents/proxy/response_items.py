"""The conversation of a request to /v1/responses: its items, as messages.

The model's one answer comes back as several items, each of which names the answer in its id. An item may also be named
alone (`item_reference`), and is then taken from the answers that the attempt was given and that are kept for it.
"""

from __future__ import annotations

import re
from typing import Any

from etude.agents.proxy import openai
from etude.agents.proxy.request import APIError, JSONObject, ParseContext
from etude.agents.proxy.request_fields import IgnoredFields, RequestFields
from etude.chat.messages import message_from_dict
from etude.records import Message

__all__ = ["CALL_MARK", "DROPPED", "ID_PREFIXES", "parse_items"]

RESPONSE = re.compile(r"resp_[0-9]+-[0-9]+-[0-9a-f]+-[0-9]+")
"""The answer's name, in the id of each of its items."""
ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
"""The beginning of an item's id, by its type."""
CALL_MARK = "_call"
"""Stands in the id of a call before its place among the calls of its answer."""
DROPPED = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools")
"""Records of tools that a provider ran: the model's next message says what came of them."""


def parse_items(given: Any, notes: IgnoredFields, context: ParseContext) -> list[Message]:
    """The messages that these items are."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not isinstance(given, list):
        raise APIError("'input' must be a text or a list of items.", param="input")
    found: list[Message] = []
    answer: dict[str, Any] | None = None
    for n, form in enumerate(given):
        where = f"input[{n}]"
        named = _resolve_reference(form, where, context)
        form = named or form
        fields = RequestFields(form, where)
        kind = fields.string("type", "message")
        if kind in DROPPED:
            notes.drop(f"input.{kind}", _no_item(fields, kind))
            continue
        role = fields.string("role", "") if kind == "message" else ""
        if kind in ("reasoning", "function_call") or role == "assistant":
            of = RESPONSE.search(fields.string("id", ""))
            name = of[0] if of else ""
            if answer is not None and (answer["of"] != name if name else _starts_another(kind, answer)):
                found += _finish_answer(answer)
                answer = None
            answer = answer or {
                "role": "assistant",
                "content": "",
                "reasoning": "",
                "tool_calls": [],
                "of": name,
                "spoken": False,
            }
            _add_item(answer, kind, fields, where, whole=named is not None)
            continue
        if answer is not None:
            found += _finish_answer(answer)
            answer = None
        found.append(_other(kind, role, form, fields, where))
    return [*found, *_finish_answer(answer)] if answer is not None else found


def _finish_answer(answer: dict[str, Any]) -> list[Message]:
    """The message of an answer; none where it is thinking alone of which nothing can be read."""
    return [message_from_dict(answer)] if answer["spoken"] or answer["reasoning"] else []


def _resolve_reference(form: Any, where: str, context: ParseContext) -> dict[str, Any] | None:
    """The item that a reference names; None where the form is no reference."""
    if not isinstance(form, dict) or form.get("type") != "item_reference":
        return None
    id = RequestFields(form, where).string("id")
    of = RESPONSE.search(id)
    answer = context.find_answer(of[0]) if of else None
    item = _item(answer, id) if answer is not None else None
    if item is None:
        raise APIError(
            f"This attempt has no item '{id[:100]}'. The items of its answers are kept for it, unless it said 'store': "
            "false. Send the item itself.",
            "not_found",
            param=f"{where}.id",
            code="item_not_found",
        )
    return {**item, "id": id}


def _item(answer: Message, id: str) -> dict[str, Any] | None:
    """The item of an answer that has this id. A streamed answer may have several with text, around its calls: each of
    them stands for all of its text here."""
    if id.startswith(ID_PREFIXES["message"]):
        return {"type": "message", "role": "assistant", "content": answer.content}
    if id.startswith(ID_PREFIXES["reasoning"]):
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": answer.reasoning}]}
    _, mark, place = id.rpartition(CALL_MARK)
    if not mark or not place.isdecimal() or int(place[:9]) >= len(answer.tool_calls):
        return None
    call = answer.tool_calls[int(place[:9])]
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _starts_another(kind: str, answer: JSONObject) -> bool:
    """Whether an item that does not say which answer it is of cannot be of the one before it: items come in the order
    reasoning, message, calls."""
    if kind == "reasoning":
        return True
    return kind == "message" and bool(answer["content"] or answer["tool_calls"])


def _add_item(answer: dict[str, Any], kind: str, fields: RequestFields, where: str, *, whole: bool) -> None:
    """Add an item to what the model said. whole: its text is all that the answer has of this kind."""
    answer["spoken"] |= kind != "reasoning"
    if kind == "function_call":
        function = {"name": fields.string("name"), "arguments": fields.string("arguments", "{}")}
        answer["tool_calls"].append({"id": fields.string("call_id"), "function": function})
        return
    if kind == "reasoning":
        parts = enumerate(fields.array("content"))
        text = "".join(RequestFields(part, f"{where}.content[{n}]").string("text") for n, part in parts)
    else:
        text = openai.parse_text(fields.value("content"), f"{where}.content")
    key = "reasoning" if kind == "reasoning" else "content"
    answer[key] = text if whole else answer[key] + text


def _other(kind: str, role: str, form: Any, fields: RequestFields, where: str) -> Message:
    """The messages of others."""
    if kind == "function_call_output":
        text = openai.parse_text(fields.value("output"), f"{where}.output")
        return Message("tool", text, tool_call_id=fields.string("call_id"))
    if kind != "message":
        raise _no_item(fields, kind)
    return openai.parse_message({**form, "role": role}, where)


def _no_item(fields: RequestFields, kind: str) -> APIError:
    return fields.error(
        "type",
        f"is '{kind}'; an item is a message, reasoning, a function_call or a function_call_output.",
        "unsupported_item",
    )
