"""OpenAI's /v1/responses: a conversation as items, which may continue an earlier answer by its id."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from etude.agents.proxy import openai
from etude.agents.proxy.answer_limits import parse_format
from etude.agents.proxy.request import (
    AnswerWriter,
    APIDialect,
    APIError,
    FindAnswer,
    JSONObject,
    ModelAnswer,
    ModelRequest,
    ReplyHeader,
)
from etude.agents.proxy.request_fields import FieldRules, RequestFields, field_rules, ignored, refused
from etude.agents.proxy.response_items import CALL_MARK, ID_PREFIXES, parse_items
from etude.chat import MessageDelta, ReasoningDelta, ToolCallDelta
from etude.records import Message, ToolCall

LOGPROBS = "message.output_text.logprobs"
RESPONSES: FieldRules = field_rules(
    obeyed="model input instructions tools tool_choice max_output_tokens top_logprobs stream include store "
    "previous_response_id text.format parallel_tool_calls",
    sampling="temperature top_p seed",
    accepted=f"{openai.ACCEPTED} reasoning.summary reasoning.generate_summary stream_options",
    others=openai.COMMON
    | {
        "reasoning.effort": ignored(openai.NO_REASONING_CONTROL),
        "text.verbosity": openai.COMMON["verbosity"],
        "truncation": ignored("can only be 'disabled': this endpoint never truncates a prompt.", "disabled"),
        "context_management": ignored("is not supported: this endpoint never truncates a prompt. Leave it out."),
        "max_tool_calls": ignored("limits the provider's own tools, and this endpoint has none. Leave it out."),
        "background": refused("is not supported: the client waits for the answer. Leave it out.", False),
        "conversation": refused("is not stored by this endpoint; use 'previous_response_id', or send the items."),
        "prompt": refused("is not stored by this endpoint; send the messages themselves."),
    },
)
"""The fields of a request, and the treatment of each."""


class ItemWriter(AnswerWriter):
    """Writes an answer as the events of its items."""

    def __init__(self, reply: ReplyHeader) -> None:
        self._reply = reply
        self._id = reply.id
        self._items: list[JSONObject] = []
        self._sequence_number = 0
        self._output_index = -1
        self._open_kind = ""
        self._text = ""

    def begin(self) -> bytes:
        """Write the response without output."""
        empty = _response_body(self._reply, "in_progress", [], None)
        return self._event("response.created", response=empty) + self._event("response.in_progress", response=empty)

    def delta(self, _index: int, delta: MessageDelta) -> bytes:
        if not isinstance(delta, ToolCallDelta):
            return self._write_text("reasoning" if isinstance(delta, ReasoningDelta) else "message", delta.text)
        written = self._close_item()
        self._output_index += 1
        item = _call_item(self._id, delta.index, delta.call)
        location = {"item_id": item["id"], "output_index": self._output_index}
        started = {**item, "arguments": "", "status": "in_progress"}
        written += self._event("response.output_item.added", output_index=self._output_index, item=started)
        written += self._event("response.function_call_arguments.delta", **location, delta=item["arguments"])
        arguments = {"arguments": item["arguments"], "name": item["name"]}
        written += self._event("response.function_call_arguments.done", **location, **arguments)
        written += self._event("response.output_item.done", output_index=self._output_index, item=item)
        self._items.append(item)
        return written

    def end(self, _index: int, _answer: ModelAnswer) -> bytes:
        return self._close_item()

    def close(self, answers: Sequence[ModelAnswer]) -> bytes:
        """Write the whole response."""
        response = _response_body(self._reply, "completed", self._items, answers[0])
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, refusal: APIError) -> bytes:
        code = {"busy": "rate_limit_exceeded", "failed": "server_error", "timeout": "server_error"}
        error = {"code": code.get(refusal.kind, "invalid_prompt"), "message": refusal.message}
        failed = {**_response_body(self._reply, "failed", [], None), "error": error}
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **data: Any) -> bytes:
        self._sequence_number += 1
        return openai.sse_event({"type": kind, "sequence_number": self._sequence_number - 1, **data}, kind)

    def _write_text(self, kind: str, text: str) -> bytes:
        """Write text of an item. Begin the item, unless it is the open one."""
        written = b""
        if self._open_kind != kind:
            written = self._close_item()
            self._output_index = self._output_index + 1
            self._open_kind = kind
            self._text = ""
            item = {**self._item(kind), "content": [], "status": "in_progress"}
            written += self._event("response.output_item.added", output_index=self._output_index, item=item)
            written += self._event("response.content_part.added", **self._location(), part=_part(kind, "", ()))
        self._text += text
        extra_fields: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return written + self._event(
            f"response.{_part(kind, '', ())['type']}.delta", **self._location(), delta=text, **extra_fields
        )

    def _close_item(self) -> bytes:
        if not self._open_kind:
            return b""
        kind = self._open_kind
        part = _part(kind, self._text, ())
        extra_fields: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        written = self._event(f"response.{part['type']}.done", **self._location(), text=self._text, **extra_fields)
        written += self._event("response.content_part.done", **self._location(), part=part)
        item = self._item(kind)
        self._open_kind = ""
        self._items.append(item)
        return written + self._event("response.output_item.done", output_index=self._output_index, item=item)

    def _location(self) -> dict[str, Any]:
        return {"item_id": self._item(self._open_kind)["id"], "output_index": self._output_index, "content_index": 0}

    def _item(self, kind: str) -> dict[str, Any]:
        return _item(f"{self._id}_{self._output_index}", kind, self._text, ())


class ResponsesDialect(APIDialect):
    """The dialect of OpenAI's Agents SDK. Reasoning is a separate item, before the message and the calls."""

    prefix = "resp_"
    rules = RESPONSES
    writer = ItemWriter
    format_error = staticmethod(openai.error_body)

    def parse(self, fields: RequestFields, find_answer: FindAnswer) -> ModelRequest:
        model, instructions = fields.string("model"), fields.string("instructions", "")
        tools = openai.parse_tools(fields, flat=True)
        choice, tool_name, allowed = openai.parse_tool_choice(fields, tools)
        instruction_messages = [Message("system", instructions)] if instructions else []
        previous_id = fields.string("previous_response_id", "")
        include, stream = fields.strings("include", 16), fields.boolean("stream")
        for item in include:
            if item not in (LOGPROBS, "reasoning.encrypted_content"):
                reason = f"asks for '{item}', which this endpoint does not have."
                fields.ignored_fields.drop(f"include.{item}", fields.error("include", reason))
        if LOGPROBS in include and stream:
            raise fields.error(
                "include", f"asks for '{LOGPROBS}', which a stream does not have. Set 'stream' to false."
            )
        text = fields.section("text")
        form = parse_format(text, "format")
        text.apply_rules()
        fields.section("reasoning").apply_rules()
        echo: dict[str, Any] = {"instructions": instructions or None, "previous_response_id": previous_id or None}
        echo |= {"tools": list(fields.sent.get("tools") or ()), "tool_choice": fields.sent.get("tool_choice") or "auto"}
        return ModelRequest(
            model=model,
            messages=(*instruction_messages, *parse_items(fields, find_answer)),
            tools=tools,
            tool_choice=choice,
            tool_name=tool_name,
            limits=openai.parse_limits(fields, form, allowed),
            sampling=_sampling(fields),
            stream=stream,
            logprobs=LOGPROBS in include,
            previous_id=previous_id,
            instruction_count=len(instruction_messages),
            store=fields.boolean("store", True),
            echo=echo,
        )

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        return _response_body(reply, "completed", list(_items(reply, answers[0])), answers[0])


def _response_body(
    reply: ReplyHeader, status: str, items: Sequence[JSONObject], answer: ModelAnswer | None
) -> JSONObject:
    """Return a response with the items so far."""
    request = reply.request
    if answer is not None and answer.finish_reason == "length":
        status = "incomplete"
    body = {
        "id": reply.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": request.model,
        "output": list(items),
        "parallel_tool_calls": True,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "metadata": {},
        "store": request.store,
        **request.echo,
    }
    if answer is not None:
        input_tokens, output_tokens = reply.prompt_tokens, len(answer.completion.ids)
        body["usage"] = {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + output_tokens,
        }
    return body


def _items(reply: ReplyHeader, answer: ModelAnswer) -> Iterator[dict[str, Any]]:
    message, id = answer.message, reply.id
    if message.reasoning:
        yield _item(id, "reasoning", message.reasoning, ())
    if message.content or not (message.reasoning or message.tool_calls):
        logprobs = openai.format_logprobs(answer.completion, reply.tokenizer) if reply.request.logprobs else ()
        yield _item(id, "message", str(message.content), logprobs)
    for n, call in enumerate(message.tool_calls):
        yield _call_item(id, n, call)


def _call_item(id: str, n: int, call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"{ID_PREFIXES['function_call']}{id}{CALL_MARK}{n}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _item(id: str, kind: str, text: str, logprobs: Sequence[JSONObject]) -> dict[str, Any]:
    extra_fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
    part = _part(kind, text, logprobs)
    return {"type": kind, "id": f"{ID_PREFIXES[kind]}{id}", "status": "completed", "content": [part], **extra_fields}


def _part(kind: str, text: str, logprobs: Sequence[JSONObject]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _sampling(fields: RequestFields) -> dict[str, Any]:
    numbers = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 1e-9, 1),
        "max_tokens": fields.integer("max_output_tokens", 1, 2**31 - 1),
        "top_logprobs": fields.integer("top_logprobs", 0, 20),
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
    }
    return {name: value for name, value in numbers.items() if value is not None}
