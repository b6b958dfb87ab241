"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import hmac
import json
import secrets
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from etude.agents.proxy.answer_limits import parse_format
from etude.agents.proxy.openai import NO_REASONING_CONTROL, join_parts, parse_function, reads, sse_event, strict_tools
from etude.agents.proxy.request import (
    AnswerLimits,
    AnswerWriter,
    APIDialect,
    APIError,
    ErrorKind,
    FindAnswer,
    JSONObject,
    ModelAnswer,
    ModelRequest,
    ReplyHeader,
)
from etude.agents.proxy.request_fields import FieldRules, RequestFields, field_rules, ignored, refused
from etude.chat import MessageDelta, ReasoningDelta, ToolCallDelta
from etude.chat.messages import message_from_dict
from etude.records import ContentPart, Message

MESSAGES: FieldRules = field_rules(
    obeyed="model messages system tools tool_choice max_tokens stop_sequences stream output_format "
    "output_config.format tool_choice.disable_parallel_tool_use",
    sampling="temperature top_p top_k",
    accepted="metadata service_tier cache_control",
    others={
        "thinking": ignored(NO_REASONING_CONTROL, {"type": "disabled"}),
        "output_config.effort": ignored("has no effect: the run decides how answers are generated. Leave it out."),
        "context_management": ignored("is not supported: this endpoint never truncates a prompt. Leave it out."),
        "mcp_servers": ignored("is not supported: the agent runs all of its tools itself. Leave it out.", []),
        "container": refused("is not supported: the agent runs all of its tools itself. Leave it out."),
    },
)
"""The fields of a request, and the treatment of each."""
DROPPED = ("redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "tool_reference")
"""Blocks of tools that a provider ran, and encrypted thinking: the text beside them keeps its meaning."""
SECRET = secrets.token_bytes(32)
"""Signs the thinking that this process sends. No other process remembers its conversations."""

ERROR_TYPES: dict[ErrorKind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "timeout": "timeout_error",
    "failed": "api_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _error_body(refusal: APIError) -> JSONObject:
    error = {"type": ERROR_TYPES.get(refusal.kind, "invalid_request_error"), "message": refusal.message}
    return {"type": "error", "error": error}


class BlockWriter(AnswerWriter):
    """Writes an answer as content blocks: thinking, text, and then tool calls."""

    def __init__(self, reply: ReplyHeader) -> None:
        self._reply_fields = _reply_fields(reply)
        self._prompt_tokens = reply.prompt_tokens
        self._index = -1
        self._open_kind = ""
        self._reasoning = ""

    def begin(self) -> bytes:
        """Write the message without content."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = {**self._reply_fields, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def delta(self, _index: int, delta: MessageDelta) -> bytes:
        if isinstance(delta, ToolCallDelta):
            call = delta.call
            events = self._stop() + self._block("tool_use", {"id": call.id, "name": call.name, "input": {}})
            return events + self._delta("input_json_delta", partial_json=call.arguments) + self._stop()
        if isinstance(delta, ReasoningDelta):
            events = self._block("thinking", {"thinking": "", "signature": ""})
            self._reasoning += delta.text
            return events + self._delta("thinking_delta", thinking=delta.text)
        return self._block("text", {"text": ""}) + self._delta("text_delta", text=delta.text)

    def end(self, _index: int, _answer: ModelAnswer) -> bytes:
        return self._stop()

    def close(self, answers: Sequence[ModelAnswer]) -> bytes:
        """Write the stop reason and the usage."""
        usage = {"output_tokens": len(answers[0].completion.ids)}
        return _event("message_delta", delta=_stop_fields(answers[0]), usage=usage) + _event("message_stop")

    def fail(self, refusal: APIError) -> bytes:
        return sse_event(_error_body(refusal), "error")

    def _block(self, kind: str, empty: JSONObject) -> bytes:
        """Begin a block of a kind, unless such a block is open."""
        if self._open_kind == kind:
            return b""
        stopped = self._stop()
        self._index = self._index + 1
        self._open_kind = kind
        return stopped + _event("content_block_start", index=self._index, content_block={"type": kind, **empty})

    def _delta(self, kind: str, **data: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **data})

    def _stop(self) -> bytes:
        if not self._open_kind:
            return b""
        is_thinking = self._open_kind == "thinking"
        signature_event = self._delta("signature_delta", signature=_signature(self._reasoning)) if is_thinking else b""
        self._open_kind = self._reasoning = ""
        return signature_event + _event("content_block_stop", index=self._index)


class AnthropicDialect(APIDialect):
    """The dialect of Anthropic's clients. Reasoning is sent as `thinking` blocks, each with a signature."""

    prefix = "msg_"
    rules = MESSAGES
    writer = BlockWriter
    format_error = staticmethod(_error_body)

    def __init__(self, *, counting: bool = False) -> None:
        """counting: parse requests of `count_tokens`, which has no answer."""
        self._counting = counting

    def parse(self, fields: RequestFields, _: FindAnswer) -> ModelRequest:
        model = fields.string("model")
        system = _text(fields, "system", "system")
        message_data = fields.array("messages", required=True)
        if not message_data:
            raise fields.error("messages", "is empty; send at least one message.")
        messages = [Message("system", system)] if system else []
        for n, data in enumerate(message_data):
            messages += _parse_messages(fields.nested(data, f"messages[{n}]"), f"messages[{n}]")
        tools = _parse_tools(fields)
        choice, tool_name, single = _parse_tool_choice(fields, tools)
        config = fields.section("output_config")
        form = parse_format(config, "format") or parse_format(fields, "output_format")
        config.apply_rules()
        if not messages:
            raise fields.error("messages", "has no message to answer.")
        prefill = messages.pop() if messages[-1].role == "assistant" else None
        if prefill is not None and (prefill.tool_calls or not messages):
            reason = "ends with a 'tool_use' that has no 'tool_result'." if messages else "has no message to answer."
            raise fields.error("messages", reason)
        return ModelRequest(
            model=model,
            messages=tuple(messages),
            prefill=prefill,
            tools=tools,
            tool_choice=choice,
            tool_name=tool_name,
            limits=AnswerLimits(form=form, strict=strict_tools(fields), single=single),
            sampling=self._sampling(fields),
            stream=fields.boolean("stream"),
        )

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        answer = answers[0]
        blocks: list[JSONObject] = []
        if answer.message.reasoning:
            reasoning = answer.message.reasoning
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": _signature(reasoning)})
        if answer.message.content:
            blocks.append({"type": "text", "text": answer.message.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in answer.message.tool_calls
        ]
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": len(answer.completion.ids)}
        return {**_reply_fields(reply), "content": blocks, **_stop_fields(answer), "usage": usage}

    def _sampling(self, fields: RequestFields) -> dict[str, Any]:
        numbers = {
            "temperature": fields.number("temperature", 0, 2),
            "top_p": fields.number("top_p", 1e-9, 1),
            "top_k": fields.integer("top_k", 0, 2**31 - 1),
            "max_tokens": fields.integer("max_tokens", 1, 2**31 - 1),
        }
        if numbers["max_tokens"] is None and not self._counting:
            raise fields.error("max_tokens", "is missing.")
        stop = fields.strings("stop_sequences", 64)
        return {name: value for name, value in numbers.items() if value is not None} | ({"stop": stop} if stop else {})


def _event(name: str, **data: Any) -> bytes:
    return sse_event({"type": name, **data}, name)


def _reply_fields(reply: ReplyHeader) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.request.model}


def _stop_fields(answer: ModelAnswer) -> dict[str, Any]:
    if answer.stop is not None and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}


def _signature(reasoning: str) -> str:
    return b64encode(hmac.digest(SECRET, reasoning.encode(), "sha256")).decode()


def _parse_messages(fields: RequestFields, where: str) -> list[Message]:
    """Return the messages of one request message: tool results come before the user's text."""
    role, content = fields.string("role"), fields.value("content")
    if role not in ("user", "assistant", "system"):
        raise fields.error("role", f"is '{role}'; it must be user or assistant.")
    if isinstance(content, str):
        return [Message(role, content)]
    if not isinstance(content, list):
        raise fields.error("content", "must be a string or a list of blocks.")
    parts = list[ContentPart]()
    reasonings = []
    calls = []
    results = []
    for n, block in enumerate(content):
        part = _part(fields, block, f"{where}.content[{n}]")
        kind = part.string("type")
        if kind == "text":
            parts.append(ContentPart("text", part.string("text")))
        elif kind == "image" and role == "user":
            parts.append(_parse_image(part))
        elif kind == "thinking" and role == "assistant":
            reasonings.append(_parse_thinking(part))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(part.value("input") or {}, ensure_ascii=False)
            calls.append({"id": part.string("id"), "function": {"name": part.string("name"), "arguments": arguments}})
        elif kind == "tool_result" and role == "user":
            shown = _content(part, "content", f"{where}.content[{n}].content", with_images=True)
            results.append(Message("tool", shown, tool_call_id=part.string("tool_use_id")))
        else:
            _drop(part, kind)
    message = message_from_dict({"role": role, "content": "", "reasoning": "".join(reasonings), "tool_calls": calls})
    is_all_dropped = bool(content) and not (parts or calls or message.reasoning)  # all of the content was dropped
    if is_all_dropped and (results or role == "assistant"):
        return results
    return [*results, replace(message, content=join_parts(parts))]


def _part(fields: RequestFields, block: Any, where: str) -> RequestFields:
    """Return the fields of a block. Its `cache_control` is added to the ignored fields."""
    part = fields.nested(block, where)
    if part.value("cache_control"):
        part.ignored_fields.add("cache_control")
    return part


def _parse_thinking(part: RequestFields) -> str:
    """Return thinking that this process sent; an empty string if it was changed, or comes from elsewhere."""
    reasoning, signature = part.string("thinking"), part.string("signature", "")
    if hmac.compare_digest(signature.encode(), _signature(reasoning).encode()):
        return reasoning
    reason = "does not match the thinking: this endpoint did not send that text."
    part.ignored_fields.drop("messages.thinking", part.error("signature", reason))
    return ""


def _parse_image(part: RequestFields) -> ContentPart:
    """Return an image with its address, and the name of its field as text."""
    source = part.nested(part.value("source"), part.path("source"))
    kind = source.string("type")
    if kind == "url":
        return ContentPart("image", source.path("url"), source.string("url"))
    if kind != "base64":
        raise source.error("type", f"is '{kind}'; it must be base64 or url. Send the bytes.", "unsupported_content")
    url = f"data:{source.string('media_type', '')};base64,{source.string('data')}"
    return ContentPart("image", source.path("data"), url)


def _drop(part: RequestFields, kind: str) -> None:
    """Leave a block out, if the conversation keeps its meaning without it."""
    refusal = part.error("type", f"is '{kind}'; {reads(kind)}.", "unsupported_content")
    if kind not in DROPPED:
        raise refusal
    part.ignored_fields.drop(f"messages.{kind}", refusal)


def _text(fields: RequestFields, name: str, where: str) -> str:
    """Return the text of a field: a string, or text blocks."""
    content = _content(fields, name, where, with_images=False)
    assert isinstance(content, str), "images are refused"
    return content


def _content(fields: RequestFields, name: str, where: str, *, with_images: bool) -> str | tuple[ContentPart, ...]:
    """Return the content of a field: a string, or blocks of text and images."""
    content = fields.value(name)
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise APIError(f"'{where}' must be a string or a list of blocks.", param=where)
    parts = list[ContentPart]()
    for n, block in enumerate(content):
        part = _part(fields, block, f"{where}[{n}]")
        kind = part.string("type")
        if kind == "text":
            parts.append(ContentPart("text", part.string("text")))
        elif kind == "image" and with_images:
            parts.append(_parse_image(part))
        else:
            _drop(part, kind)
    return join_parts(parts)


def _parse_tools(request: RequestFields) -> tuple[JSONObject, ...]:
    """Return the agent's own tools, in the form that chat templates take. Tools that a provider would run are left
    out."""
    tools = []
    for n, definition in enumerate(request.array("tools")):
        fields = _part(request, definition, f"tools[{n}]")
        kind = fields.string("type", "custom")
        if kind != "custom":
            reason = f"is '{kind}'; it must be custom: the agent runs all of its tools itself."
            fields.ignored_fields.drop(f"tools.{kind}", fields.error("type", reason))
            continue
        tools.append(parse_function(fields, "input_schema"))
    return tuple(tools)


def _parse_tool_choice(
    fields: RequestFields, tools: Sequence[JSONObject]
) -> tuple[Literal["auto", "none", "required"], str, str]:
    """Return the mode of the tool choice, the tool that has to be called, and the field that allows one call."""
    choice = fields.section("tool_choice")
    kind, name = choice.string("type", "auto"), choice.string("name", "")
    single = choice.path("disable_parallel_tool_use") if choice.boolean("disable_parallel_tool_use") else ""
    choice.apply_rules()
    names = [tool["function"]["name"] for tool in tools]
    if kind == "auto":
        return "auto", "", single
    if kind == "none":
        return "none", "", single
    if kind == "any" and names:
        return "required", names[0] if len(names) == 1 else "", single
    if kind != "tool" or name not in names:
        raise choice.error(
            "type", "must be auto, none, any, or tool with the name of one of the 'tools'. any needs at least one tool."
        )
    return "required", name, single
