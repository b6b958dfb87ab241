"""OpenAI's /v1/completions: a text, or its ids, goes on as it stands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from etude.agents.proxy import openai
from etude.agents.proxy.asked import MOST, Asked, Body, Refusal, Reply, Said, Terms
from etude.agents.proxy.chat_completions import streamed_usage, usage
from etude.agents.proxy.fields import Fields, Notes, Rules, drawing, neutral, refused, rules
from etude.chat import Content, Piece
from etude.chat.tokenizer import Ids

__all__ = ["COMPLETIONS", "Completions"]

COMPLETIONS: Rules = rules(
    obeyed="model prompt max_tokens stop stop_token_ids n best_of stream logprobs stream_options.include_usage",
    sampling="temperature top_p top_k min_p repetition_penalty min_tokens seed logit_bias frequency_penalty "
    "presence_penalty",
    accepted=f"{openai.ACCEPTED} store stream_options.include_obfuscation stream_options.continuous_usage_stats",
    others={
        "echo": refused("cannot be true: put the prompt before the answer yourself.", False),
        "suffix": refused("is not supported: this model continues a text, and does not fill gaps.", ""),
    },
)
"""The fields of a request, and the treatment of each."""


class Completions:
    """The dialect of agents that have no messages."""

    prefix = "cmpl-"

    def parse(self, body: Body, terms: Terms) -> Asked:
        """What a request asks for."""
        notes = Notes(COMPLETIONS, strict=terms.strict)
        fields = Fields(body, notes=notes)
        model, prompt = fields.text("model"), _prompt(fields)
        sampling = drawing(fields)
        sampling["max_tokens"] = fields.whole("max_tokens", 1, 2**31 - 1) or 16
        if stop := fields.texts("stop", 16):
            sampling["stop"] = stop
        top = fields.whole("logprobs", 0, 20)
        if top:
            sampling["top_logprobs"] = top
        n = fields.whole("n", 1, MOST) or 1
        fields.only("best_of", n, why="can be no other number than 'n': every answer is given.")
        asked = Asked(
            model=model,
            prompt=prompt,
            sampling=sampling,
            penalties=neutral(fields, "frequency_penalty", "presence_penalty"),
            n=n,
            stream=fields.flag("stream"),
            logprobs=top is not None,
            usage=streamed_usage(fields),
        )
        fields.settle()
        return replace(asked, ignored=notes.names)

    def whole(self, reply: Reply, said: Sequence[Said]) -> Body:
        """The answers in one piece."""
        choices = [
            _choice(n, str(each.message.content), each.finish, _scores(each, reply)) for n, each in enumerate(said)
        ]
        return {**_frame(reply), "choices": choices, "usage": usage(said)}

    def writer(self, reply: Reply) -> TextWriter:
        """The answers piece by piece."""
        return TextWriter(reply)

    def error(self, refusal: Refusal) -> Body:
        """Why there is none."""
        return openai.error(refusal)


class TextWriter:
    """Writes `text_completion` events. Log-probs come with the end of each answer."""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._frame = reply, _frame(reply)

    def begin(self) -> bytes:
        """Nothing comes before the text."""
        return b""

    def piece(self, index: int, piece: Piece) -> bytes:
        """New text."""
        assert isinstance(piece, Content), "a text that goes on is nothing else"
        return openai.event({**self._frame, "choices": [_choice(index, piece.text, None, None)]})

    def end(self, index: int, said: Said) -> bytes:
        """How it ended."""
        last = _choice(index, "", said.finish, _scores(said, self._reply))
        return openai.event({**self._frame, "choices": [last]})

    def close(self, said: Sequence[Said]) -> bytes:
        """What it cost, if that was asked."""
        last = openai.event({**self._frame, "choices": [], "usage": usage(said)}) if self._reply.asked.usage else b""
        return last + b"data: [DONE]\n\n"

    def failed(self, refusal: Refusal) -> bytes:
        """Nothing more will come."""
        return openai.event(openai.error(refusal))


def _prompt(fields: Fields) -> str | Ids:
    """The one prompt of a request."""
    prompt = fields.any("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = openai.token_ids(prompt)
    if ids is not None:
        return ids
    if not isinstance(prompt, str):
        raise fields.refuse("prompt", "must be one text, or one list of token ids; ask for each of several in its own.")
    return prompt


def _frame(reply: Reply) -> Body:
    return {"id": reply.id, "object": "text_completion", "created": int(time.time()), "model": reply.asked.model}


def _choice(index: int, text: str, finish: str | None, scores: Body | None) -> Body:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}


def _scores(said: Said, reply: Reply) -> Body | None:
    """Log-probs as this dialect has them, if they were asked for: columns, and where in the text each token begins."""
    if not reply.asked.logprobs:
        return None
    scored = openai.logprobs(said.completion, reply.tokenizer)
    tokens = [each["token"] for each in scored]
    starts = list(accumulate((len(token) for token in tokens[:-1]), initial=0)) if tokens else []
    tops = [{each["token"]: each["logprob"] for each in one["top_logprobs"]} for one in scored]
    return {
        "tokens": tokens,
        "token_logprobs": [each["logprob"] for each in scored],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": starts,
    }
