"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from etude.agents.proxy.asked import Asked, Body, Fields, Kind, Refusal, Reply, Said
from etude.agents.proxy.openai import event
from etude.chat import Called, Piece, Reasoning
from etude.chat.messages import message_of
from etude.records import Message

__all__ = ["Anthropic"]

TYPES: dict[Kind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "busy": "rate_limit_error",
    "timeout": "timeout_error",
    "failed": "api_error",
}
FINISHES = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Anthropic:
    """The dialect of Anthropic's clients. Reasoning goes as `thinking` blocks, whose signature is empty."""

    prefix = "msg_"

    def __init__(self, *, counting: bool = False) -> None:
        """counting: of `count_tokens`, which asks for no answer."""
        self._counting = counting

    def parse(self, body: Body) -> Asked:
        """What a request asks for."""
        fields = Fields(body)
        model = fields.text("model")
        system = _text(fields.any("system"), "system")
        forms = fields.many("messages", needed=True)
        if not forms:
            raise fields.refuse("messages", "is empty; give at least one.")
        messages = [Message("system", system)] if system else []
        for n, form in enumerate(forms):
            messages += _messages(form, f"messages[{n}]")
        if messages[-1].role == "assistant":
            raise fields.refuse(
                "messages", "ends with the assistant's own: this model cannot be made to go on from it."
            )
        tools = _tools(fields.many("tools"))
        choice, named = _choice(fields, tools)
        sampling = self._sampling(fields)
        fields.only(
            "thinking", {"type": "disabled"}, why="is not the agent's to say: the run says whether the model thinks."
        )
        asked = Asked(
            model=model,
            messages=tuple(messages),
            tools=tools,
            choice=choice,
            named=named,
            sampling=sampling,
            stream=fields.flag("stream"),
        )
        fields.ignore("metadata", "service_tier", "cache_control")
        fields.nothing_else()
        return asked

    def whole(self, reply: Reply, said: Sequence[Said]) -> Body:
        """The answer in one piece."""
        only = said[0]
        blocks: list[Body] = []
        if only.message.reasoning:
            blocks.append({"type": "thinking", "thinking": only.message.reasoning, "signature": ""})
        if only.message.content:
            blocks.append({"type": "text", "text": only.message.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in only.message.tool_calls
        ]
        usage = {"input_tokens": only.prompt_tokens, "output_tokens": len(only.completion.ids)}
        return {**_frame(reply), "content": blocks, **_ending(only), "usage": usage}

    def writer(self, reply: Reply) -> BlockWriter:
        """The answer piece by piece."""
        return BlockWriter(reply)

    def error(self, refusal: Refusal) -> Body:
        """Why there is none."""
        told = {"type": TYPES.get(refusal.kind, "invalid_request_error"), "message": refusal.message}
        return {"type": "error", "error": told}

    def _sampling(self, fields: Fields) -> dict[str, Any]:
        numbers = {
            "temperature": fields.number("temperature", 0, 2),
            "top_p": fields.number("top_p", 1e-9, 1),
            "top_k": fields.whole("top_k", 0, 2**31 - 1),
            "max_tokens": fields.whole("max_tokens", 1, 2**31 - 1),
        }
        if numbers["max_tokens"] is None and not self._counting:
            raise fields.refuse("max_tokens", "is missing.")
        stop = fields.texts("stop_sequences", 64)
        return {name: value for name, value in numbers.items() if value is not None} | ({"stop": stop} if stop else {})


class BlockWriter:
    """Writes an answer as content blocks: thinking, text, and then calls."""

    def __init__(self, reply: Reply) -> None:
        self._frame, self._prompt_tokens = _frame(reply), reply.prompt_tokens
        self._at = -1
        self._open = ""

    def begin(self) -> bytes:
        """The message, without content."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = {**self._frame, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def piece(self, _index: int, piece: Piece) -> bytes:
        """New text, or a call."""
        if isinstance(piece, Called):
            call = piece.call
            begun = self._stop() + self._block("tool_use", {"id": call.id, "name": call.name, "input": {}})
            return begun + self._delta("input_json_delta", partial_json=call.arguments) + self._stop()
        if isinstance(piece, Reasoning):
            begun = self._block("thinking", {"thinking": "", "signature": ""})
            return begun + self._delta("thinking_delta", thinking=piece.text)
        return self._block("text", {"text": ""}) + self._delta("text_delta", text=piece.text)

    def end(self, _index: int, _said: Said) -> bytes:
        """The end of its last block."""
        return self._stop()

    def close(self, said: Sequence[Said]) -> bytes:
        """How it ended, and what it cost."""
        usage = {"output_tokens": len(said[0].completion.ids)}
        return _event("message_delta", delta=_ending(said[0]), usage=usage) + _event("message_stop")

    def failed(self, refusal: Refusal) -> bytes:
        """Nothing more will come."""
        return event(Anthropic().error(refusal), "error")

    def _block(self, kind: str, empty: Body) -> bytes:
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
        signed = self._delta("signature_delta", signature="") if self._open == "thinking" else b""
        self._open = ""
        return signed + _event("content_block_stop", index=self._at)


def _event(name: str, **told: Any) -> bytes:
    return event({"type": name, **told}, name)


def _frame(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "type": "message", "role": "assistant", "model": reply.asked.model}


def _ending(said: Said) -> dict[str, Any]:
    if said.stop is not None and said.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": said.stop}
    return {"stop_reason": FINISHES[said.finish], "stop_sequence": None}


def _messages(form: Any, where: str) -> list[Message]:
    """A message of a request: what tools answered comes before what the user says beside it."""
    fields = Fields(form, where)
    role, content = fields.text("role"), fields.any("content")
    if role not in ("user", "assistant", "system"):
        raise fields.refuse("role", f"is '{role}'; a message is by user or assistant.")
    if isinstance(content, str):
        return [Message(role, content)]
    if not isinstance(content, list):
        raise fields.refuse("content", "must be a text or a list of blocks.")
    texts, thoughts, calls, results = [], [], [], []
    for n, block in enumerate(content):
        part = Fields(block, f"{where}.content[{n}]")
        kind = part.text("type")
        if kind == "text":
            texts.append(part.text("text"))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(part.text("thinking"))
        elif kind == "tool_use" and role == "assistant":
            arguments = json.dumps(part.any("input") or {}, ensure_ascii=False)
            calls.append({"id": part.text("id"), "function": {"name": part.text("name"), "arguments": arguments}})
        elif kind == "tool_result" and role == "user":
            text = _text(part.any("content"), f"{where}.content[{n}].content")
            results.append(Message("tool", text, tool_call_id=part.text("tool_use_id")))
        else:
            raise part.refuse("type", f"is '{kind}'; this model reads text, thinking, tool_use and tool_result alone.")
    said = {"role": role, "content": "".join(texts), "reasoning": "".join(thoughts), "tool_calls": calls}
    return [*results, message_of(said)] if texts or not results else results


def _text(content: Any, where: str) -> str:
    """A text, or blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"'{where}' must be a text or a list of blocks.", param=where)
    texts = []
    for n, block in enumerate(content):
        part = Fields(block, f"{where}[{n}]")
        kind = part.text("type")
        if kind != "text":
            raise part.refuse("type", f"is '{kind}'; this model reads text alone.")
        texts.append(part.text("text"))
    return "".join(texts)


def _tools(forms: Sequence[Any]) -> tuple[Body, ...]:
    """Tools in the form that chat templates know."""
    tools = []
    for n, form in enumerate(forms):
        fields = Fields(form, f"tools[{n}]")
        kind = fields.text("type", "custom")
        if kind != "custom":
            raise fields.refuse("type", f"is '{kind}'; the only tools here are the agent's own.")
        told: dict[str, Any] = {"name": fields.text("name")}
        if "description" in fields:
            told["description"] = fields.text("description")
        told["parameters"] = fields.any("input_schema")
        if not isinstance(told["parameters"], dict):
            raise fields.refuse("input_schema", "must be a JSON schema.")
        tools.append({"type": "function", "function": told})
    return tuple(tools)


def _choice(fields: Fields, tools: Sequence[Body]) -> tuple[Literal["auto", "none", "required"], str]:
    """Whether a tool is to be called, and which."""
    form = Fields(fields.any("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = form.text("type")
    if form.flag("disable_parallel_tool_use"):
        raise form.refuse(
            "disable_parallel_tool_use", "cannot be true: nothing holds this model to one call at a time."
        )
    names = [tool["function"]["name"] for tool in tools]
    if kind == "auto":
        return "auto", ""
    if kind == "none":
        return "none", ""
    if kind == "any" and names:
        return "required", names[0] if len(names) == 1 else ""
    name = form.text("name", "")
    if kind != "tool" or name not in names:
        raise form.refuse("type", "must be auto, none, any, or tool with the name of one of the 'tools'.")
    return "required", name
