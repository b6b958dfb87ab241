"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from etude.agents.proxy import openai
from etude.agents.proxy.answer_limits import FORM_FIELDS, parse_form
from etude.agents.proxy.request import (
    MAX_CHOICES,
    AnswerWriter,
    APIDialect,
    APIError,
    FindAnswer,
    JSONObject,
    ModelAnswer,
    ModelRequest,
    ReplyHeader,
)
from etude.agents.proxy.request_fields import (
    FieldRules,
    RequestFields,
    field_rules,
    ignored,
    nonzero_penalties,
    parse_sampling,
    refused,
)
from etude.chat import MessageDelta, ReasoningDelta, ToolCallDelta
from etude.records import ToolCall

CHAT_COMPLETIONS: FieldRules = field_rules(
    obeyed="model messages tools tool_choice max_completion_tokens max_tokens stop stop_token_ids n stream logprobs "
    f"top_logprobs stream_options.include_usage continue_final_message parallel_tool_calls {FORM_FIELDS}",
    sampling="temperature top_p top_k min_p repetition_penalty min_tokens seed logit_bias frequency_penalty "
    "presence_penalty",
    accepted=f"{openai.ACCEPTED} store prediction stream_options.include_obfuscation "
    "stream_options.continuous_usage_stats",
    others=openai.COMMON
    | {
        "add_generation_prompt": ignored(
            "can only be true: this endpoint always generates an answer. Leave it out.", True
        ),
        "web_search_options": ignored("is not supported: the only tools here are functions. Leave it out."),
        "modalities": refused("can only be ['text']: this model writes text only.", ["text"]),
        "audio": refused("is not supported: this model writes text only. Leave it out."),
        "functions": refused("is the deprecated form of 'tools'; use 'tools'.", []),
        "function_call": refused("is the deprecated form of 'tool_choice'; use 'tool_choice'.", "none"),
    },
)
"""The fields of a request, and the treatment of each."""


class OpenAIWriter(AnswerWriter):
    """The parts that both writers of chunks share."""

    def __init__(self, reply: ReplyHeader, kind: str) -> None:
        self._reply = reply
        self._reply_fields = reply_fields(reply, kind)

    def close(self, answers: Sequence[ModelAnswer]) -> bytes:
        """Write the usage, if it was requested, and the end of the stream."""
        usage = b""
        if self._reply.request.include_usage:
            usage = openai.sse_event({**self._reply_fields, "choices": [], "usage": format_usage(self._reply, answers)})
        return usage + b"data: [DONE]\n\n"

    def fail(self, refusal: APIError) -> bytes:
        return openai.sse_event(openai.error_body(refusal))


class ChunkWriter(OpenAIWriter):
    """Writes `chat.completion.chunk` events. Log-probs come at the end of each answer."""

    def __init__(self, reply: ReplyHeader) -> None:
        super().__init__(reply, "chat.completion.chunk")
        self._extra_fields: dict[str, Any] = {"usage": None} if reply.request.include_usage else {}

    def begin(self) -> bytes:
        """Write the role of each answer."""
        return b"".join(self._chunk(n, {"role": "assistant", "content": ""}) for n in range(self._reply.request.n))

    def delta(self, index: int, delta: MessageDelta) -> bytes:
        if isinstance(delta, ToolCallDelta):
            return self._chunk(index, {"tool_calls": [{"index": delta.index, **_call(delta.call)}]})
        return self._chunk(index, {"reasoning_content" if isinstance(delta, ReasoningDelta) else "content": delta.text})

    def end(self, index: int, answer: ModelAnswer) -> bytes:
        return self._chunk(index, {}, answer.finish_reason, _logprobs(answer, self._reply))

    def _chunk(
        self, index: int, delta: JSONObject, finish: str | None = None, logprobs: JSONObject | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return openai.sse_event({**self._reply_fields, "choices": [choice], **self._extra_fields})


class ChatCompletionsDialect(APIDialect):
    """The dialect of most agents. Reasoning is sent as `reasoning_content`, separate from the content."""

    prefix = "chatcmpl-"
    rules = CHAT_COMPLETIONS
    writer = ChunkWriter
    format_error = staticmethod(openai.error_body)

    def parse(self, fields: RequestFields, _: FindAnswer) -> ModelRequest:
        model = fields.string("model")
        message_data = fields.array("messages", required=True)
        if not message_data:
            raise fields.error("messages", "is empty; send at least one message.")
        messages = tuple(
            openai.parse_message(data, f"messages[{n}]", fields.ignored_fields) for n, data in enumerate(message_data)
        )
        prefill = None
        if fields.boolean("continue_final_message"):
            *lead, prefill = messages
            messages = tuple(lead)
            if prefill.role != "assistant" or prefill.tool_calls or not lead:
                reason = "needs a last message by the assistant, without tool calls, after at least one other message."
                raise fields.error("continue_final_message", reason)
        tools = openai.parse_tools(fields)
        choice, tool_name, allowed = openai.parse_tool_choice(fields, tools)
        sampling = parse_sampling(fields)
        limits = [fields.integer(name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
        max_tokens = next((limit for limit in limits if limit is not None), None)
        if max_tokens is not None:
            sampling["max_tokens"] = max_tokens
        wants_logprobs = fields.boolean("logprobs")
        num_top_logprobs = fields.integer("top_logprobs", 0, 20)
        if num_top_logprobs and not wants_logprobs:
            raise fields.error("top_logprobs", "needs 'logprobs': true.")
        if num_top_logprobs:
            sampling["top_logprobs"] = num_top_logprobs
        return ModelRequest(
            model=model,
            messages=messages,
            prefill=prefill,
            tools=tools,
            tool_choice=choice,
            tool_name=tool_name,
            limits=openai.parse_limits(fields, parse_form(fields), allowed),
            sampling=sampling,
            penalties=nonzero_penalties(fields, "frequency_penalty", "presence_penalty"),
            n=fields.integer("n", 1, MAX_CHOICES) or 1,
            stream=fields.boolean("stream"),
            logprobs=wants_logprobs,
            include_usage=wants_stream_usage(fields),
        )

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        choices = [_choice(index, answer, reply) for index, answer in enumerate(answers)]
        return {**reply_fields(reply, "chat.completion"), "choices": choices, "usage": format_usage(reply, answers)}


def wants_stream_usage(fields: RequestFields) -> bool:
    """Return whether a stream ends with its usage."""
    options = fields.section("stream_options")
    wanted = options.boolean("include_usage")
    options.apply_rules()
    return wanted


def format_usage(reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
    """Return the number of prompt tokens and completion tokens."""
    prompt, completion = reply.prompt_tokens, sum(len(answer.completion.ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def reply_fields(reply: ReplyHeader, kind: str) -> JSONObject:
    """Return the fields with which each response and chunk begins."""
    return {"id": reply.id, "object": kind, "created": int(time.time()), "model": reply.request.model}


def _choice(index: int, answer: ModelAnswer, reply: ReplyHeader) -> JSONObject:
    message: dict[str, Any] = {"role": "assistant", "content": answer.message.content, "refusal": None}
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.message.tool_calls:
        message["tool_calls"] = [_call(call) for call in answer.message.tool_calls]
        message["content"] = answer.message.content or None
    logprobs = _logprobs(answer, reply)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}


def _logprobs(answer: ModelAnswer, reply: ReplyHeader) -> JSONObject | None:
    """Return the log-probs of an answer; None if they were not requested."""
    if not reply.request.logprobs:
        return None
    return {"content": openai.format_logprobs(answer.completion, reply.tokenizer), "refusal": None}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
