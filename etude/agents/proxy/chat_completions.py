"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from etude.agents.proxy import openai
from etude.agents.proxy.request import (
    MAX_CHOICES,
    APIError,
    JSONObject,
    ModelAnswer,
    ModelRequest,
    ParseContext,
    ReplyHeader,
)
from etude.agents.proxy.request_fields import (
    FieldRules,
    IgnoredFields,
    RequestFields,
    field_rules,
    ignored,
    nonzero_penalties,
    parse_sampling,
    refused,
)
from etude.chat import MessageDelta, ReasoningDelta, ToolCallDelta
from etude.records import ToolCall

__all__ = ["CHAT_COMPLETIONS", "ChatCompletionsDialect"]

CHAT_COMPLETIONS: FieldRules = field_rules(
    obeyed="model messages tools tool_choice max_completion_tokens max_tokens stop stop_token_ids n stream logprobs "
    "top_logprobs stream_options.include_usage continue_final_message",
    sampling="temperature top_p top_k min_p repetition_penalty min_tokens seed logit_bias frequency_penalty "
    "presence_penalty",
    accepted=f"{openai.ACCEPTED} store prediction stream_options.include_obfuscation "
    "stream_options.continuous_usage_stats",
    others=openai.COMMON
    | {
        "response_format": ignored(openai.NO_FORMAT, {"type": "text"}),
        "add_generation_prompt": ignored("is not the agent's to say: an answer is asked for. Leave it out.", True),
        "web_search_options": ignored("asks for a search, and the only tools here are functions."),
        "modalities": refused("can be ['text'] alone.", ["text"]),
        "audio": refused("asks for speech, and this model writes text alone."),
        "functions": refused("is the old form of 'tools'; use those.", []),
        "function_call": refused("is the old form of 'tool_choice'; use that.", "none"),
    },
)
"""The fields of a request, and the treatment of each."""


class ChatCompletionsDialect:
    """The dialect of most agents. Reasoning goes as `reasoning_content`, apart from the content."""

    prefix = "chatcmpl-"

    def parse(self, body: JSONObject, context: ParseContext) -> ModelRequest:
        """What a request asks for."""
        notes = IgnoredFields(CHAT_COMPLETIONS, strict=context.strict)
        fields = RequestFields(body, notes=notes)
        model = fields.string("model")
        forms = fields.array("messages", required=True)
        if not forms:
            raise fields.error("messages", "is empty; give at least one.")
        messages = tuple(openai.parse_message(form, f"messages[{n}]") for n, form in enumerate(forms))
        begun = None
        if fields.boolean("continue_final_message"):
            *lead, begun = messages
            messages = tuple(lead)
            if begun.role != "assistant" or begun.tool_calls or not lead:
                why = "takes a last message that is the beginning of the assistant's answer, after others."
                raise fields.error("continue_final_message", why)
        tools = openai.tools_of(fields.array("tools"), notes)
        choice, named = openai.parse_tool_choice(fields, tools, notes)
        sampling = parse_sampling(fields)
        limits = [fields.integer(name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
        longest = next((limit for limit in limits if limit is not None), None)
        if longest is not None:
            sampling["max_tokens"] = longest
        if stop := fields.strings("stop", 16):
            sampling["stop"] = stop
        wanted = fields.boolean("logprobs")
        top = fields.integer("top_logprobs", 0, 20)
        if top and not wanted:
            raise fields.error("top_logprobs", "takes 'logprobs': true.")
        if top:
            sampling["top_logprobs"] = top
        asked = ModelRequest(
            model=model,
            messages=messages,
            prefill=begun,
            tools=tools,
            tool_choice=choice,
            tool_name=named,
            sampling=sampling,
            penalties=nonzero_penalties(fields, "frequency_penalty", "presence_penalty"),
            n=fields.integer("n", 1, MAX_CHOICES) or 1,
            stream=fields.boolean("stream"),
            logprobs=wanted,
            include_usage=wants_stream_usage(fields),
        )
        fields.apply_rules()
        return replace(asked, ignored=notes.names)

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        """The answers in one piece."""
        choices = [_choice(index, each, reply) for index, each in enumerate(answers)]
        return {**_frame(reply, "chat.completion"), "choices": choices, "usage": format_usage(answers)}

    def writer(self, reply: ReplyHeader) -> ChunkWriter:
        """The answers piece by piece."""
        return ChunkWriter(reply)

    def format_error(self, refusal: APIError) -> JSONObject:
        """Why there is none."""
        return openai.error_body(refusal)


class ChunkWriter:
    """Writes `chat.completion.chunk` events. Log-probs come with the end of each answer."""

    def __init__(self, reply: ReplyHeader) -> None:
        self._asked, self._tokenizer = reply.request, reply.tokenizer
        self._frame = _frame(reply, "chat.completion.chunk")
        self._more: dict[str, Any] = {"usage": None} if reply.request.include_usage else {}

    def begin(self) -> bytes:
        """Who speaks."""
        return b"".join(self._chunk(n, {"role": "assistant", "content": ""}) for n in range(self._asked.n))

    def delta(self, index: int, piece: MessageDelta) -> bytes:
        """New text, or a call."""
        if isinstance(piece, ToolCallDelta):
            return self._chunk(index, {"tool_calls": [{"index": piece.index, **_call(piece.call)}]})
        return self._chunk(index, {"reasoning_content" if isinstance(piece, ReasoningDelta) else "content": piece.text})

    def end(self, index: int, answer: ModelAnswer) -> bytes:
        """How it ended."""
        scores = {"content": openai.format_logprobs(answer.completion, self._tokenizer), "refusal": None}
        return self._chunk(index, {}, answer.finish_reason, scores if self._asked.logprobs else None)

    def close(self, answers: Sequence[ModelAnswer]) -> bytes:
        """What it cost, if that was asked."""
        last = (
            openai.sse_event({**self._frame, "choices": [], "usage": format_usage(answers)})
            if self._asked.include_usage
            else b""
        )
        return last + b"data: [DONE]\n\n"

    def fail(self, refusal: APIError) -> bytes:
        """Nothing more will come."""
        return openai.sse_event(openai.error_body(refusal))

    def _chunk(
        self, index: int, delta: JSONObject, finish: str | None = None, scores: JSONObject | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return openai.sse_event({**self._frame, "choices": [choice], **self._more})


def wants_stream_usage(fields: RequestFields) -> bool:
    """Whether a stream is to end with its usage."""
    options = fields.section("stream_options")
    wanted = options.boolean("include_usage")
    options.apply_rules()
    return wanted


def format_usage(answers: Sequence[ModelAnswer]) -> JSONObject:
    """How many tokens were read and written."""
    prompt, written = answers[0].prompt_tokens, sum(len(each.completion.ids) for each in answers)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _frame(reply: ReplyHeader, kind: str) -> JSONObject:
    return {"id": reply.id, "object": kind, "created": int(time.time()), "model": reply.request.model}


def _choice(index: int, answer: ModelAnswer, reply: ReplyHeader) -> JSONObject:
    told: dict[str, Any] = {"role": "assistant", "content": answer.message.content, "refusal": None}
    if answer.message.reasoning:
        told["reasoning_content"] = answer.message.reasoning
    if answer.message.tool_calls:
        told["tool_calls"] = [_call(call) for call in answer.message.tool_calls]
        told["content"] = answer.message.content or None
    wanted = reply.request.logprobs
    scores = (
        {"content": openai.format_logprobs(answer.completion, reply.tokenizer), "refusal": None} if wanted else None
    )
    return {"index": index, "message": told, "logprobs": scores, "finish_reason": answer.finish_reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
