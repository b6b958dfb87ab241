"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import hmac
import json
import secrets
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from etude.agents.proxy.openai import NO_FORMAT, NOT_ONE, THINKS, sse_event
from etude.agents.proxy.request import (
    APIError,
    ErrorKind,
    JSONObject,
    ModelAnswer,
    ModelRequest,
    ParseContext,
    ReplyHeader,
)
from etude.agents.proxy.request_fields import FieldRules, IgnoredFields, RequestFields, field_rules, ignored, refused
from etude.chat import MessageDelta, ReasoningDelta, ToolCallDelta
from etude.chat.messages import message_from_dict
from etude.records import Message

__all__ = ["MESSAGES", "AnthropicDialect"]

MESSAGES: FieldRules = field_rules(
    obeyed="model messages system tools tool_choice max_tokens stop_sequences stream",
    sampling="temperature top_p top_k",
    accepted="metadata service_tier cache_control",
    others={
        "thinking": ignored(THINKS, {"type": "disabled"}),
        "output_config": ignored("is not the agent's to say: the run decides how answers are. Leave it out.", {}),
        "output_format": ignored(NO_FORMAT),
        "context_management": ignored("is not supported: what the model reads is never cut. Leave it out."),
        "tool_choice.disable_parallel_tool_use": ignored(NOT_ONE.replace("false", "true"), False),
        "mcp_servers": ignored("names tools that a provider would run, and the only tools here are the agent's.", []),
        "container": refused("is not kept here; the only tools here are the agent's own."),
    },
)
"""The fields of a request, and the treatment of each."""
DROPPED = ("redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "tool_reference")
"""Blocks of tools that a provider ran, and of thinking that nobody can read: the text beside them keeps its meaning."""
SECRET = secrets.token_bytes(32)
"""Signs the thinking that this process gives. It remembers the conversations of no other."""

TYPES: dict[ErrorKind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "timeout": "timeout_error",
    "failed": "api_error",
}
FINISHES = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicDialect:
    """The dialect of Anthropic's clients. Reasoning goes as `thinking` blocks, each with its signature."""

    prefix = "msg_"

    def __init__(self, *, counting: bool = False) -> None:
        """counting: of `count_tokens`, which asks for no answer."""
        self._counting = counting

    def parse(self, body: JSONObject, context: ParseContext) -> ModelRequest:
        """What a request asks for."""
        notes = IgnoredFields(MESSAGES, strict=context.strict)
        fields = RequestFields(body, notes=notes)
        model = fields.string("model")
        system = _text(fields.value("system"), "system", notes)
        forms = fields.array("messages", required=True)
        if not forms:
            raise fields.error("messages", "is empty; give at least one.")
        messages = [Message("system", system)] if system else []
        for n, form in enumerate(forms):
            messages += _messages(form, f"messages[{n}]", notes)
        tools = _tools(fields.array("tools"), notes)
        choice, named = _choice(fields, tools)
        if not messages:
            raise fields.error("messages", "has nothing that is answered.")
        begun = messages.pop() if messages[-1].role == "assistant" else None
        if begun is not None and (begun.tool_calls or not messages):
            why = "ends with a call that has no 'tool_result'." if messages else "has nothing that is answered."
            raise fields.error("messages", why)
        asked = ModelRequest(
            model=model,
            messages=tuple(messages),
            prefill=begun,
            tools=tools,
            tool_choice=choice,
            tool_name=named,
            sampling=self._sampling(fields),
            stream=fields.boolean("stream"),
        )
        fields.apply_rules()
        return replace(asked, ignored=notes.names)

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        """The answer in one piece."""
        only = answers[0]
        blocks: list[JSONObject] = []
        if only.message.reasoning:
            thought = only.message.reasoning
            blocks.append({"type": "thinking", "thinking": thought, "signature": _signature(thought)})
        if only.message.content:
            blocks.append({"type": "text", "text": only.message.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in only.message.tool_calls
        ]
        usage = {"input_tokens": only.prompt_tokens, "output_tokens": len(only.completion.ids)}
        return {**_frame(reply), "content": blocks, **_ending(only), "usage": usage}

    def writer(self, reply: ReplyHeader) -> BlockWriter:
        """The answer piece by piece."""
        return BlockWriter(reply)

    def format_error(self, refusal: APIError) -> JSONObject:
        """Why there is none."""
        told = {"type": TYPES.get(refusal.kind, "invalid_request_error"), "message": refusal.message}
        return {"type": "error", "error": told}

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


class BlockWriter:
    """Writes an answer as content blocks: thinking, text, and then calls."""

    def __init__(self, reply: ReplyHeader) -> None:
        self._frame, self._prompt_tokens = _frame(reply), reply.prompt_tokens
        self._at = -1
        self._open = ""
        self._thought = ""

    def begin(self) -> bytes:
        """The message, without content."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = {**self._frame, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def delta(self, _index: int, piece: MessageDelta) -> bytes:
        """New text, or a call."""
        if isinstance(piece, ToolCallDelta):
            call = piece.call
            begun = self._stop() + self._block("tool_use", {"id": call.id, "name": call.name, "input": {}})
            return begun + self._delta("input_json_delta", partial_json=call.arguments) + self._stop()
        if isinstance(piece, ReasoningDelta):
            begun = self._block("thinking", {"thinking": "", "signature": ""})
            self._thought += piece.text
            return begun + self._delta("thinking_delta", thinking=piece.text)
        return self._block("text", {"text": ""}) + self._delta("text_delta", text=piece.text)

    def end(self, _index: int, _said: ModelAnswer) -> bytes:
        """The end of its last block."""
        return self._stop()

    def close(self, answers: Sequence[ModelAnswer]) -> bytes:
        """How it ended, and what it cost."""
        usage = {"output_tokens": len(answers[0].completion.ids)}
        return _event("message_delta", delta=_ending(answers[0]), usage=usage) + _event("message_stop")

    def fail(self, refusal: APIError) -> bytes:
        """Nothing more will come."""
        return sse_event(AnthropicDialect().format_error(refusal), "error")

    def _block(self, kind: str, empty: JSONObject) -> bytes:
        """Begin a block of a kind, unless that is what is being written."""
        if self._open == kind:
            return b""
        stopped = self._stop()
        self._at, self._open = self._at + 1, kind
        return stopped + _event("content_block_start", index=self._at, content_block={"type": kind, **empty})

    def _delta(self, kind: str, **told: str) -> bytes:
        return _event("content_block_delta", index=self._at, delta={"type": kind, **told})

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        thinking = self._open == "thinking"
        signed = self._delta("signature_delta", signature=_signature(self._thought)) if thinking else b""
        self._open = self._thought = ""
        return signed + _event("content_block_stop", index=self._at)


def _event(name: str, **told: Any) -> bytes:
    return sse_event({"type": name, **told}, name)


def _frame(reply: ReplyHeader) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.request.model}


def _ending(answer: ModelAnswer) -> dict[str, Any]:
    if answer.stop is not None and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
    return {"stop_reason": FINISHES[answer.finish_reason], "stop_sequence": None}


def _signature(thought: str) -> str:
    """Shows that this thinking was given here."""
    return b64encode(hmac.digest(SECRET, thought.encode(), "sha256")).decode()


def _messages(form: Any, where: str, notes: IgnoredFields) -> list[Message]:
    """A message of a request: what tools answered comes before what the user says beside it."""
    fields = RequestFields(form, where)
    role, content = fields.string("role"), fields.value("content")
    if role not in ("user", "assistant", "system"):
        raise fields.error("role", f"is '{role}'; a message is by user or assistant.")
    if isinstance(content, str):
        return [Message(role, content)]
    if not isinstance(content, list):
        raise fields.error("content", "must be a text or a list of blocks.")
    texts, thoughts, calls, results = [], [], [], []
    for n, block in enumerate(content):
        part = _part(block, f"{where}.content[{n}]", notes)
        kind = part.string("type")
        if kind == "text":
            texts.append(part.string("text"))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(_thought(part, notes))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(part.value("input") or {}, ensure_ascii=False)
            calls.append({"id": part.string("id"), "function": {"name": part.string("name"), "arguments": arguments}})
        elif kind == "tool_result" and role == "user":
            text = _text(part.value("content"), f"{where}.content[{n}].content", notes)
            results.append(Message("tool", text, tool_call_id=part.string("tool_use_id")))
        else:
            _drop(part, kind, notes, "this model reads text, thinking, tool_use and tool_result alone")
    said = {"role": role, "content": "".join(texts), "reasoning": "".join(thoughts), "tool_calls": calls}
    left_out = bool(content) and not (texts or calls or said["reasoning"])  # all of it: nothing was said
    return results if left_out and (results or role == "assistant") else [*results, message_from_dict(said)]


def _part(block: Any, where: str, notes: IgnoredFields) -> RequestFields:
    """A block, whose place in a cache is noted."""
    part = RequestFields(block, where)
    if part.value("cache_control"):
        notes.add("cache_control")
    return part


def _thought(part: RequestFields, notes: IgnoredFields) -> str:
    """Thinking that was given here; none where it was not, or where it came back as another."""
    thought, signature = part.string("thinking"), part.string("signature", "")
    if hmac.compare_digest(signature.encode(), _signature(thought).encode()):
        return thought
    why = "is not of this thinking: it was not given here as it stands."
    notes.drop("messages.thinking", part.error("signature", why))
    return ""


def _drop(part: RequestFields, kind: str, notes: IgnoredFields, reads: str) -> None:
    """Leave a block out, where the conversation keeps its meaning without it."""
    refusal = part.error("type", f"is '{kind}'; {reads}.")
    if kind not in DROPPED:
        raise refusal
    notes.drop(f"messages.{kind}", refusal)


def _text(content: Any, where: str, notes: IgnoredFields) -> str:
    """A text, or blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise APIError(f"'{where}' must be a text or a list of blocks.", param=where)
    texts = []
    for n, block in enumerate(content):
        part = _part(block, f"{where}[{n}]", notes)
        kind = part.string("type")
        if kind == "text":
            texts.append(part.string("text"))
        else:
            _drop(part, kind, notes, "this model reads text alone")
    return "".join(texts)


def _tools(forms: Sequence[Any], notes: IgnoredFields) -> tuple[JSONObject, ...]:
    """The agent's own tools, in the form that chat templates know; those that a provider would run are left out."""
    tools = []
    for n, form in enumerate(forms):
        fields = _part(form, f"tools[{n}]", notes)
        kind = fields.string("type", "custom")
        if kind != "custom":
            notes.drop(f"tools.{kind}", fields.error("type", f"is '{kind}'; the only tools here are the agent's own."))
            continue
        told: dict[str, Any] = {"name": fields.string("name")}
        if "description" in fields:
            told["description"] = fields.string("description")
        told["parameters"] = fields.value("input_schema")
        if not isinstance(told["parameters"], dict):
            raise fields.error("input_schema", "must be a JSON schema.")
        if fields.value("strict") is True:
            notes.add("tools.strict")
        tools.append({"type": "function", "function": told})
    return tuple(tools)


def _choice(fields: RequestFields, tools: Sequence[JSONObject]) -> tuple[Literal["auto", "none", "required"], str]:
    """Whether a tool is to be called, and which."""
    form = fields.section("tool_choice")
    kind, name = form.string("type", "auto"), form.string("name", "")
    form.apply_rules()
    names = [tool["function"]["name"] for tool in tools]
    if kind == "auto":
        return "auto", ""
    if kind == "none":
        return "none", ""
    if kind == "any" and names:
        return "required", names[0] if len(names) == 1 else ""
    if kind != "tool" or name not in names:
        raise form.error("type", "must be auto, none, any, or tool with the name of one of the 'tools'.")
    return "required", name
