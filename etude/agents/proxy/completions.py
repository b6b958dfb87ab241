"""OpenAI's /v1/completions: continues a text, or token ids, as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from etude.agents.proxy import openai
from etude.agents.proxy.answer_limits import FORM_FIELDS, parse_form
from etude.agents.proxy.chat_completions import OpenAIWriter, format_usage, reply_fields, wants_stream_usage
from etude.agents.proxy.request import (
    MAX_CHOICES,
    AnswerLimits,
    APIDialect,
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
    nonzero_penalties,
    parse_sampling,
    refused,
)
from etude.chat import ContentDelta, MessageDelta
from etude.chat.tokenizer import Ids

COMPLETIONS: FieldRules = field_rules(
    obeyed="model prompt max_tokens stop stop_token_ids n best_of stream logprobs stream_options.include_usage "
    + FORM_FIELDS,
    sampling="temperature top_p top_k min_p repetition_penalty min_tokens seed logit_bias frequency_penalty "
    "presence_penalty",
    accepted=f"{openai.ACCEPTED} store stream_options.include_obfuscation stream_options.continuous_usage_stats",
    others={
        "echo": refused("cannot be true: put the prompt before the answer yourself.", False),
        "suffix": refused("is not supported: this model continues a text, and cannot fill a gap in one.", ""),
    },
)
"""The fields of a request, and the treatment of each."""


class TextWriter(OpenAIWriter):
    """Writes `text_completion` events. Log-probs come at the end of each answer."""

    def __init__(self, reply: ReplyHeader) -> None:
        super().__init__(reply, "text_completion")

    def begin(self) -> bytes:
        """Write nothing: the stream begins with text."""
        return b""

    def delta(self, index: int, delta: MessageDelta) -> bytes:
        assert isinstance(delta, ContentDelta), "a continued text has only content"
        return openai.sse_event({**self._reply_fields, "choices": [_choice(index, delta.text, None, None)]})

    def end(self, index: int, answer: ModelAnswer) -> bytes:
        last = _choice(index, "", answer.finish_reason, _format_logprobs(answer, self._reply))
        return openai.sse_event({**self._reply_fields, "choices": [last]})


class CompletionsDialect(APIDialect):
    """The dialect of agents that send no messages."""

    prefix = "cmpl-"
    rules = COMPLETIONS
    writer = TextWriter
    format_error = staticmethod(openai.error_body)

    def parse(self, fields: RequestFields, _: FindAnswer) -> ModelRequest:
        model, prompt = fields.string("model"), _prompt(fields)
        sampling = parse_sampling(fields)
        sampling["max_tokens"] = fields.integer("max_tokens", 1, 2**31 - 1) or 16
        num_top_logprobs = fields.integer("logprobs", 0, 20)
        if num_top_logprobs:
            sampling["top_logprobs"] = num_top_logprobs
        n = fields.integer("n", 1, MAX_CHOICES) or 1
        fields.require("best_of", n, reason="must equal 'n': every answer is returned.")
        return ModelRequest(
            model=model,
            prompt=prompt,
            limits=AnswerLimits(form=parse_form(fields)),
            sampling=sampling,
            penalties=nonzero_penalties(fields, "frequency_penalty", "presence_penalty"),
            n=n,
            stream=fields.boolean("stream"),
            logprobs=num_top_logprobs is not None,
            include_usage=wants_stream_usage(fields),
        )

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        choices = [
            _choice(n, str(answer.message.content), answer.finish_reason, _format_logprobs(answer, reply))
            for n, answer in enumerate(answers)
        ]
        return {**reply_fields(reply, "text_completion"), "choices": choices, "usage": format_usage(reply, answers)}


def _prompt(fields: RequestFields) -> str | Ids:
    prompt = fields.value("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = openai.token_ids(prompt)
    if ids is not None:
        return ids
    if not isinstance(prompt, str):
        raise fields.error(
            "prompt", "must be one string or one list of token ids. Send each prompt in its own request."
        )
    return prompt


def _choice(index: int, text: str, finish: str | None, logprobs: JSONObject | None) -> JSONObject:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _format_logprobs(answer: ModelAnswer, reply: ReplyHeader) -> JSONObject | None:
    """Return the log-probs in this dialect's columns, with each token's offset in the text; None if they were not
    requested."""
    if not reply.request.logprobs:
        return None
    logprobs = openai.format_logprobs(answer.completion, reply.tokenizer)
    tokens = [entry["token"] for entry in logprobs]
    starts = list(accumulate((len(token) for token in tokens[:-1]), initial=0)) if tokens else []
    tops = [{entry["token"]: entry["logprob"] for entry in token["top_logprobs"]} for token in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in logprobs],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": starts,
    }
