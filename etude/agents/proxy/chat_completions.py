"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from etude.agents.proxy import openai
from etude.agents.proxy.asked import MOST, Asked, Body, Fields, Refusal, Reply, Said, drawing, neutral
from etude.chat import Called, Piece, Reasoning
from etude.records import ToolCall

__all__ = ["ChatCompletions"]


class ChatCompletions:
    """The dialect of most agents. Reasoning goes as `reasoning_content`, apart from the content."""

    prefix = "chatcmpl-"

    def parse(self, body: Body) -> Asked:
        """What a request asks for."""
        fields = Fields(body)
        model = fields.text("model")
        forms = fields.many("messages", needed=True)
        if not forms:
            raise fields.refuse("messages", "is empty; give at least one.")
        tools = openai.tools_of(fields.many("tools"))
        choice, named = openai.choice_of(fields, tools)
        sampling = drawing(fields)
        limits = [fields.whole(name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
        longest = next((limit for limit in limits if limit is not None), None)
        if longest is not None:
            sampling["max_tokens"] = longest
        if stop := fields.texts("stop", 16):
            sampling["stop"] = stop
        wanted = fields.flag("logprobs")
        top = fields.whole("top_logprobs", 0, 20)
        if top and not wanted:
            raise fields.refuse("top_logprobs", "takes 'logprobs': true.")
        if top:
            sampling["top_logprobs"] = top
        openai.plain_format(fields, "response_format")
        fields.only("modalities", ["text"], why="can be ['text'] alone.")
        asked = Asked(
            model=model,
            messages=tuple(openai.message(form, f"messages[{n}]") for n, form in enumerate(forms)),
            tools=tools,
            choice=choice,
            named=named,
            sampling=sampling,
            penalties=neutral(fields, "frequency_penalty", "presence_penalty"),
            n=fields.whole("n", 1, MOST) or 1,
            stream=fields.flag("stream"),
            logprobs=wanted,
            usage=streamed_usage(fields),
        )
        fields.ignore(*openai.HARMLESS, "prediction")
        fields.nothing_else()
        return asked

    def whole(self, reply: Reply, said: Sequence[Said]) -> Body:
        """The answers in one piece."""
        choices = [_choice(index, each, reply) for index, each in enumerate(said)]
        return {**_frame(reply, "chat.completion"), "choices": choices, "usage": usage(said)}

    def writer(self, reply: Reply) -> ChunkWriter:
        """The answers piece by piece."""
        return ChunkWriter(reply)

    def error(self, refusal: Refusal) -> Body:
        """Why there is none."""
        return openai.error(refusal)


class ChunkWriter:
    """Writes `chat.completion.chunk` events. Log-probs come with the end of each answer."""

    def __init__(self, reply: Reply) -> None:
        self._asked, self._tokenizer = reply.asked, reply.tokenizer
        self._frame = _frame(reply, "chat.completion.chunk")
        self._more: dict[str, Any] = {"usage": None} if reply.asked.usage else {}

    def begin(self) -> bytes:
        """Who speaks."""
        return b"".join(self._chunk(n, {"role": "assistant", "content": ""}) for n in range(self._asked.n))

    def piece(self, index: int, piece: Piece) -> bytes:
        """New text, or a call."""
        if isinstance(piece, Called):
            return self._chunk(index, {"tool_calls": [{"index": piece.index, **_call(piece.call)}]})
        return self._chunk(index, {"reasoning_content" if isinstance(piece, Reasoning) else "content": piece.text})

    def end(self, index: int, said: Said) -> bytes:
        """How it ended."""
        scores = {"content": openai.logprobs(said.completion, self._tokenizer), "refusal": None}
        return self._chunk(index, {}, said.finish, scores if self._asked.logprobs else None)

    def close(self, said: Sequence[Said]) -> bytes:
        """What it cost, if that was asked."""
        last = openai.event({**self._frame, "choices": [], "usage": usage(said)}) if self._asked.usage else b""
        return last + b"data: [DONE]\n\n"

    def failed(self, refusal: Refusal) -> bytes:
        """Nothing more will come."""
        return openai.event(openai.error(refusal))

    def _chunk(self, index: int, delta: Body, finish: str | None = None, scores: Body | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return openai.event({**self._frame, "choices": [choice], **self._more})


def streamed_usage(fields: Fields) -> bool:
    """Whether a stream is to end with its usage."""
    options = Fields(fields.any("stream_options") or {}, "stream_options")
    wanted = options.flag("include_usage")
    options.ignore("include_obfuscation", "continuous_usage_stats")
    options.nothing_else()
    return wanted


def usage(said: Sequence[Said]) -> Body:
    """How many tokens were read and written."""
    prompt, written = said[0].prompt_tokens, sum(len(each.completion.ids) for each in said)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _frame(reply: Reply, kind: str) -> Body:
    return {"id": reply.id, "object": kind, "created": int(time.time()), "model": reply.asked.model}


def _choice(index: int, said: Said, reply: Reply) -> Body:
    told: dict[str, Any] = {"role": "assistant", "content": said.message.content, "refusal": None}
    if said.message.reasoning:
        told["reasoning_content"] = said.message.reasoning
    if said.message.tool_calls:
        told["tool_calls"] = [_call(call) for call in said.message.tool_calls]
        told["content"] = said.message.content or None
    wanted = reply.asked.logprobs
    scores = {"content": openai.logprobs(said.completion, reply.tokenizer), "refusal": None} if wanted else None
    return {"index": index, "message": told, "logprobs": scores, "finish_reason": said.finish}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
