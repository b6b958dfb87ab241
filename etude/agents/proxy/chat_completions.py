"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from etude.agents.proxy import openai
from etude.agents.proxy.asked import MOST, Asked, Body, Refusal, Reply, Said, Terms
from etude.agents.proxy.fields import Fields, Notes, Rules, drawing, ignored, neutral, refused, rules
from etude.chat import Called, Piece, Reasoning
from etude.records import ToolCall

__all__ = ["CHAT_COMPLETIONS", "ChatCompletions"]

CHAT_COMPLETIONS: Rules = rules(
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


class ChatCompletions:
    """The dialect of most agents. Reasoning goes as `reasoning_content`, apart from the content."""

    prefix = "chatcmpl-"

    def parse(self, body: Body, terms: Terms) -> Asked:
        """What a request asks for."""
        notes = Notes(CHAT_COMPLETIONS, strict=terms.strict)
        fields = Fields(body, notes=notes)
        model = fields.text("model")
        forms = fields.many("messages", needed=True)
        if not forms:
            raise fields.refuse("messages", "is empty; give at least one.")
        messages = tuple(openai.message(form, f"messages[{n}]") for n, form in enumerate(forms))
        begun = None
        if fields.flag("continue_final_message"):
            *lead, begun = messages
            messages = tuple(lead)
            if begun.role != "assistant" or begun.tool_calls or not lead:
                why = "takes a last message that is the beginning of the assistant's answer, after others."
                raise fields.refuse("continue_final_message", why)
        tools = openai.tools_of(fields.many("tools"), notes)
        choice, named = openai.choice_of(fields, tools, notes)
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
        asked = Asked(
            model=model,
            messages=messages,
            begun=begun,
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
        fields.settle()
        return replace(asked, ignored=notes.names)

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
    options = fields.section("stream_options")
    wanted = options.flag("include_usage")
    options.settle()
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
