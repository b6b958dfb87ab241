"""The conversation of a request to /v1/responses: converts its items to messages.

One answer of the model comes back as several items, each of which has the answer's id in its own. An item may also be
referenced (`item_reference`). It is then looked up among the answers that are kept for the attempt.
"""

from __future__ import annotations

import re
from typing import Any

from etude.agents.proxy import openai
from etude.agents.proxy.request import APIError, FindAnswer, JSONObject
from etude.agents.proxy.request_fields import IgnoredFields, RequestFields
from etude.chat.messages import message_from_dict
from etude.records import Message

RESPONSE_ID = re.compile(r"resp_[0-9]+-[0-9]+-[0-9a-f]+-[0-9]+")
"""The answer's id, within the id of each of its items."""
ID_PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}
"""The prefix of an item's id, by its type."""
CALL_MARK = "_call"
"""Separates the answer's id and the call's index in the id of a call."""
DROPPED = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools")
"""Records of tools that a provider ran: the model's next message has their result."""


def parse_items(request: RequestFields, find_answer: FindAnswer) -> list[Message]:
    """Return the messages that the items of a request form."""
    items = request.value("input")
    if isinstance(items, str):
        return [Message("user", items)]
    if not isinstance(items, list):
        raise APIError("'input' must be a string or a list of items.", param="input")
    messages: list[Message] = []
    answer: dict[str, Any] | None = None
    for n, data in enumerate(items):
        where = f"input[{n}]"
        referenced = _resolve_reference(data, where, find_answer)
        data = referenced or data
        fields = RequestFields(data, where)
        kind = fields.string("type", "message")
        if kind in DROPPED:
            request.ignored_fields.drop(f"input.{kind}", _unsupported_item_error(fields, kind))
            continue
        role = fields.string("role", "") if kind == "message" else ""
        if kind in ("reasoning", "function_call") or role == "assistant":
            match = RESPONSE_ID.search(fields.string("id", ""))
            answer_id = match[0] if match else ""
            if answer is not None and (
                answer["answer_id"] != answer_id if answer_id else _starts_another(kind, answer)
            ):
                messages += _finish_answer(answer)
                answer = None
            answer = answer or {
                "role": "assistant",
                "content": "",
                "reasoning": "",
                "tool_calls": [],
                "answer_id": answer_id,
                "has_output": False,
            }
            _add_item(answer, kind, fields, where, is_complete=referenced is not None)
            continue
        if answer is not None:
            messages += _finish_answer(answer)
            answer = None
        messages.append(_parse_other_item(kind, role, data, fields, where, request.ignored_fields))
    return [*messages, *_finish_answer(answer)] if answer is not None else messages


def _finish_answer(answer: dict[str, Any]) -> list[Message]:
    """Return the message of an answer; none if it only has reasoning that cannot be read."""
    return [message_from_dict(answer)] if answer["has_output"] or answer["reasoning"] else []


def _resolve_reference(data: Any, where: str, find_answer: FindAnswer) -> dict[str, Any] | None:
    """Return the item that a reference names; None if this is not a reference."""
    if not isinstance(data, dict) or data.get("type") != "item_reference":
        return None
    id = RequestFields(data, where).string("id")
    match = RESPONSE_ID.search(id)
    answer = find_answer(match[0]) if match else None
    item = _item(answer, id) if answer is not None else None
    if item is None:
        raise APIError(
            f"This attempt has no item '{id[:100]}'. The items of its answers are kept, except for requests with "
            "'store': false. Send the item itself.",
            "not_found",
            param=f"{where}.id",
            code="item_not_found",
        )
    return {**item, "id": id}


def _item(answer: Message, id: str) -> dict[str, Any] | None:
    """Return the item of an answer with this id. A streamed answer may have several text items, around its calls. Each
    of them stands for all of the answer's text here."""
    if id.startswith(ID_PREFIXES["message"]):
        return {"type": "message", "role": "assistant", "content": answer.content}
    if id.startswith(ID_PREFIXES["reasoning"]):
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": answer.reasoning}]}
    _, mark, position = id.rpartition(CALL_MARK)
    if not mark or not position.isdecimal() or int(position[:9]) >= len(answer.tool_calls):
        return None
    call = answer.tool_calls[int(position[:9])]
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def _starts_another(kind: str, answer: JSONObject) -> bool:
    """Return whether an item without an answer's id must belong to a new answer: items come in the order reasoning,
    message, calls."""
    if kind == "reasoning":
        return True
    return kind == "message" and bool(answer["content"] or answer["tool_calls"])


def _add_item(answer: dict[str, Any], kind: str, fields: RequestFields, where: str, *, is_complete: bool) -> None:
    """Add an item to the answer. is_complete: its text is all that the answer has of this kind."""
    answer["has_output"] |= kind != "reasoning"
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
    answer[key] = text if is_complete else answer[key] + text


def _parse_other_item(
    kind: str, role: str, data: Any, fields: RequestFields, where: str, ignored_fields: IgnoredFields
) -> Message:
    """Return the message of an item that is not the assistant's."""
    if kind == "function_call_output":
        content = openai.parse_content(fields.value("output"), f"{where}.output", ignored_fields)
        return Message("tool", content, tool_call_id=fields.string("call_id"))
    if kind != "message":
        raise _unsupported_item_error(fields, kind)
    return openai.parse_message({**data, "role": role}, where, ignored_fields)


def _unsupported_item_error(fields: RequestFields, kind: str) -> APIError:
    return fields.error(
        "type",
        f"is '{kind}'; it must be message, reasoning, function_call or function_call_output.",
        "unsupported_item",
    )
