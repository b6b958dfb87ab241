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
    nonzero_penalties,
    parse_sampling,
    refused,
)
from etude.chat import ContentDelta, MessageDelta
from etude.chat.tokenizer import Ids

DEFAULT_MAX_TOKENS = 16
"""The most tokens of an answer whose request does not set it, as at OpenAI."""
COMPLETIONS: FieldRules = field_rules(
    obeyed="model prompt echo max_tokens stop stop_token_ids n best_of stream logprobs stream_options.include_usage "
    + FORM_FIELDS,
    sampling="temperature top_p top_k min_p repetition_penalty min_tokens seed logit_bias frequency_penalty "
    "presence_penalty",
    accepted=f"{openai.ACCEPTED} store stream_options.include_obfuscation stream_options.continuous_usage_stats",
    others={
        "suffix": refused("is not supported: this model continues a text, and cannot fill a gap in one.", ""),
    },
)
"""The fields of a request, and the treatment of each."""
MAX_PROMPTS = 128
"""The most prompts of one call."""


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
        with_prompt = fields.boolean("echo")
        hint = "" if with_prompt else " It may be 0 beside 'echo', which `etude serve` takes."
        max_tokens = fields.integer("max_tokens", 0 if with_prompt else 1, 2**31 - 1, hint)
        if (
            max_tokens is not None or "max_tokens" not in fields.sent
        ):  # null is as long as the run allows, as it is at vLLM
            sampling["max_tokens"] = max_tokens or DEFAULT_MAX_TOKENS
        num_top_logprobs = fields.integer("logprobs", 0, 20)
        if num_top_logprobs:
            sampling["top_logprobs"] = num_top_logprobs
        stream = fields.boolean("stream")
        if with_prompt and stream:
            raise fields.error(
                "echo", "cannot be true in a stream. Leave out 'stream', or put the prompt first yourself."
            )
        n = fields.integer("n", 1, MAX_CHOICES) or 1
        fields.require("best_of", n, reason="must equal 'n': every answer is returned.")
        return ModelRequest(
            model=model,
            prompt=prompt,
            limits=AnswerLimits(form=parse_form(fields)),
            sampling=sampling,
            penalties=nonzero_penalties(fields, "frequency_penalty", "presence_penalty"),
            n=n,
            stream=stream,
            logprobs=num_top_logprobs is not None,
            include_usage=wants_stream_usage(fields),
            with_prompt=with_prompt,
            prompt_only=max_tokens == 0,
        )

    def format_response(self, reply: ReplyHeader, answers: Sequence[ModelAnswer]) -> JSONObject:
        prompt = _prompt_text(reply)
        choices = [
            _choice(n, prompt + str(answer.message.content), answer.finish_reason, _format_logprobs(answer, reply))
            for n, answer in enumerate(answers)
        ]
        return {**reply_fields(reply, "text_completion"), "choices": choices, "usage": format_usage(reply, answers)}


def split_prompts(body: JSONObject) -> list[JSONObject]:
    """Return a call for each prompt of a call with several; else the call alone."""
    prompts = body.get("prompt")
    if not isinstance(prompts, list) or len(prompts) < 2 or not all(isinstance(one, str | list) for one in prompts):
        return [body]
    if len(prompts) > MAX_PROMPTS:
        raise APIError(f"'prompt' has {len(prompts)} prompts; send at most {MAX_PROMPTS} in a call.", param="prompt")
    if body.get("stream"):
        raise APIError("'stream' cannot be true for several prompts. Send each in its own request.", param="stream")
    return [{**body, "prompt": prompt} for prompt in prompts]


def merge_responses(responses: Sequence[JSONObject]) -> JSONObject:
    """Return the response to a call with several prompts, from the responses to each."""
    if len(responses) == 1:
        return responses[0]
    choices = [choice for response in responses for choice in response["choices"]]
    numbered = [{**choice, "index": index} for index, choice in enumerate(choices)]
    usage = {name: sum(response["usage"][name] for response in responses) for name in responses[0]["usage"]}
    return {**responses[0], "choices": numbered, "usage": usage}


def _prompt(fields: RequestFields) -> str | Ids:
    prompt = fields.value("prompt")
    if isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt):
        if len(prompt) > 1:
            raise fields.error(
                "prompt",
                "must be one string or one list of token ids: this endpoint records answers. Send each prompt in its "
                "own request; `etude serve` takes several in one.",
            )
        prompt = prompt[0]
    ids = openai.token_ids(prompt)
    if ids is not None:
        return ids
    if isinstance(prompt, str):
        return prompt
    if prompt == []:
        raise fields.error("prompt", "is empty. Send a string, or a list of token ids.")
    raise fields.error("prompt", "must be a string, or a list of token ids, which are integers from 0.")


def _choice(index: int, text: str, finish: str | None, logprobs: JSONObject | None) -> JSONObject:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _prompt_text(reply: ReplyHeader) -> str:
    """Return the prompt, if it is returned before the answer."""
    if reply.prompt is None:
        return ""
    prompt = reply.request.prompt
    return prompt if isinstance(prompt, str) else reply.tokenizer.decode(reply.prompt.ids, keep_special_tokens=True)


def _format_logprobs(answer: ModelAnswer, reply: ReplyHeader) -> JSONObject | None:
    """Return the log-probs in this dialect's columns, with each token's offset in the text; None if they were not
    requested."""
    if not reply.request.logprobs:
        return None
    answer_logprobs = openai.format_logprobs(answer.completion, reply.tokenizer)
    logprobs = [*_prompt_logprobs(reply), *answer_logprobs]
    tokens = [entry["token"] for entry in logprobs]
    starts = list(accumulate((len(token) for token in tokens[:-1]), initial=0)) if tokens else []
    tops = [_by_token(entry["top_logprobs"]) for entry in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in logprobs],
        "top_logprobs": tops if any(tops) else None,
        "text_offset": starts,
    }


def _prompt_logprobs(reply: ReplyHeader) -> list[JSONObject]:
    """Return the log-prob of each token of a returned prompt. Nothing comes before the first, which has none."""
    if reply.prompt is None or reply.prompt.scores is None:
        return []
    ids = reply.prompt.ids
    scores = reply.prompt.scores
    first = reply.tokenizer.decode(ids[:1], keep_special_tokens=True)
    following = openai.format_token_logprobs(ids[1:], scores.logp, scores.top_ids, scores.top_logp, reply.tokenizer)
    return [{"token": first, "logprob": None, "top_logprobs": None}, *following]


def _by_token(likeliest: Sequence[JSONObject] | None) -> dict[str, float] | None:
    """Return log-probs by the text of each token. Of several tokens with the same text, the likeliest has its place."""
    if likeliest is None:
        return None
    return {entry["token"]: entry["logprob"] for entry in reversed(likeliest)}
