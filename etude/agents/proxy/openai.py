"""What OpenAI's dialects have in common: how messages, tools and log-probs are written, and how errors are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from etude.agents.proxy.request import APIError, ErrorKind, JSONObject
from etude.agents.proxy.request_fields import FieldRule, IgnoredFields, RequestFields, ignored
from etude.chat.messages import REASONING_KEYS, message_from_dict
from etude.chat.tokenizer import Ids, Tokenizer
from etude.records import Completion, Message

__all__ = [
    "ACCEPTED",
    "COMMON",
    "NO_FORMAT",
    "error_body",
    "format_logprobs",
    "parse_message",
    "parse_text",
    "parse_tool_choice",
    "sse_event",
    "token_ids",
    "tools_of",
]

ACCEPTED = (
    "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention "
    "client_metadata"
)
"""Fields on which no answer depends."""
THINKS = "is not the agent's to say: the run decides how long the model thinks. Leave it out."
NO_FORMAT = "asks for a format, and nothing holds this model to one. Ask for it in the messages, and check the answer."
NOT_ONE = "cannot be false: nothing holds this model to one call at a time."
COMMON: dict[str, FieldRule] = {
    "parallel_tool_calls": ignored(NOT_ONE, True),
    "verbosity": ignored("is not the agent's to say: the run decides how long answers are. Leave it out."),
    "reasoning_effort": ignored(THINKS),
    "thinking": ignored(THINKS, {"type": "disabled"}),
    "chat_template_kwargs": ignored(
        "is not the agent's to say: the run's `chat.template_kwargs` hold. Leave it out.", {}
    ),
}
"""Fields of the dialects with tools that the run decides."""
TYPES: dict[ErrorKind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "busy": "rate_limit_error",
    "timeout": "timeout_error",
    "failed": "server_error",
}
CODES: dict[ErrorKind, str] = {
    "busy": "rate_limit_exceeded",
    "context": "context_length_exceeded",
    "failed": "server_error",
    "timeout": "timeout",
}
TEXTS = ("text", "input_text", "output_text")


def error_body(refusal: APIError) -> JSONObject:
    """Why there is no answer, as OpenAI's clients read it."""
    told = {
        "message": refusal.message,
        "type": TYPES.get(refusal.kind, "invalid_request_error"),
        "param": refusal.param,
        "code": refusal.code or CODES.get(refusal.kind),
    }
    return {"error": told}


def sse_event(body: JSONObject, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def parse_message(form: Any, where: str) -> Message:
    """A message of a request."""
    fields = RequestFields(form, where)
    role = fields.string("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.error("role", f"is '{role}'; a message is by system, developer, user, assistant or tool.")
    said: dict[str, Any] = {"role": "system" if role == "developer" else role}
    said["content"] = parse_text(fields.value("content"), f"{where}.content")
    for key in (*REASONING_KEYS, "name", "tool_call_id"):
        said[key] = fields.string(key, "")
    reasoning = next((said[key] for key in REASONING_KEYS if said[key]), "")
    refused = fields.string("refusal", "")
    calls = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(fields.array("tool_calls"))]
    if calls and role != "assistant":
        raise fields.error("tool_calls", "are the assistant's alone.")
    fields.require("function_call", why="is the old form of a tool call; use 'tool_calls'.")
    fields.require("audio", why="cannot be read by this model, which reads text.")
    return message_from_dict(
        {
            "role": said["role"],
            "content": said["content"] + refused,
            "reasoning": reasoning,
            "tool_calls": calls,
            "tool_call_id": said["tool_call_id"],
            "name": said["name"],
        }
    )


def parse_text(content: Any, where: str) -> str:
    """The text of a message's content, which may be a list of texts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise APIError(f"'{where}' must be a text or a list of parts.", param=where)
    texts = []
    for n, part in enumerate(content):
        fields = RequestFields(part, f"{where}[{n}]")
        kind = fields.string("type")
        if kind not in (*TEXTS, "refusal"):
            raise fields.error("type", f"is '{kind}'; this model reads text alone.", "unsupported_content")
        texts.append(fields.string("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def _call(form: Any, where: str) -> JSONObject:
    fields = RequestFields(form, where)
    fields.require("type", "function", why="must be 'function'; this endpoint has no other tools.")
    function = RequestFields(fields.value("function"), f"{where}.function")
    called = {"name": function.string("name"), "arguments": function.string("arguments", "{}")}
    return {"id": fields.string("id", ""), "function": called}


def tools_of(forms: Sequence[Any], notes: IgnoredFields, *, flat: bool = False) -> tuple[JSONObject, ...]:
    """The functions among the tools of a request, in the form that chat templates know; tools that the provider would
    run are left out. flat: they come without their `function`."""
    tools = []
    for n, form in enumerate(forms):
        fields = RequestFields(form, f"tools[{n}]")
        kind = fields.string("type")
        if kind != "function":
            why = f"is '{kind}'; the only tools here are functions."
            notes.drop(f"tools.{kind}", fields.error("type", why, "unsupported_tool"))
            continue
        function = RequestFields(
            form if flat else fields.value("function"), f"tools[{n}]" + ("" if flat else ".function")
        )
        told: dict[str, Any] = {"name": function.string("name")}
        if "description" in function:
            told["description"] = function.string("description")
        told["parameters"] = function.value("parameters") or {"type": "object", "properties": {}}
        if not isinstance(told["parameters"], dict):
            raise function.error("parameters", "must be a JSON schema.")
        if function.value("strict") is True:  # several clients send it unasked
            notes.add("tools.strict")
        tools.append({"type": "function", "function": told})
    return tuple(tools)


def parse_tool_choice(
    fields: RequestFields, tools: Sequence[JSONObject], notes: IgnoredFields
) -> tuple[Literal["auto", "none", "required"], str]:
    """Whether a tool is to be called, and which."""
    choice = fields.value("tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    form = choice if isinstance(choice, dict) else {}
    if form.get("type") == "allowed_tools":
        choice, names = _allowed(form, names, notes)
    if choice in (None, "auto", "none"):
        return choice or "auto", ""
    if choice == "required" and names:
        return "required", names[0] if len(names) == 1 else ""
    named = form.get("function", form)
    name = named.get("name") if isinstance(named, dict) and form.get("type") == "function" else None
    if name not in names or not isinstance(name, str):
        raise fields.error("tool_choice", "must be 'auto', 'none', 'required', or name one of the 'tools'.")
    return "required", name


def _allowed(form: JSONObject, names: Sequence[str], notes: IgnoredFields) -> tuple[str, list[str]]:
    """The mode of a choice that allows some of the tools, and the names of those. A single one that has to be called
    is as good as named; nothing else holds the model to some of its tools."""
    fields = RequestFields(form.get("allowed_tools", form), "tool_choice")
    mode, allowed = fields.string("mode", "auto"), set[str]()
    for n, each in enumerate(fields.array("tools")):
        tool = RequestFields(each, f"tool_choice.tools[{n}]")
        inner = tool.value("function")
        allowed.add(
            (tool if inner is None else RequestFields(inner, f"tool_choice.tools[{n}].function")).string("name", "")
        )
    left = [name for name in names if name in allowed]
    if len(left) < len(names) and not (mode == "required" and len(left) == 1):
        why = "allows some of the 'tools' alone, and nothing holds this model to them. Send no others."
        notes.drop("tool_choice.allowed_tools", fields.error("tools", why))
    return mode, left


def format_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[JSONObject]:
    """The log-prob of each sampled token, and of the likeliest in its place."""
    return [
        {**_token(int(id), float(logp), tokenizer), "top_logprobs": _tops(completion, at, tokenizer)}
        for at, (id, logp) in enumerate(zip(completion.ids, completion.logp, strict=True))
    ]


def _tops(completion: Completion, at: int, tokenizer: Tokenizer) -> list[JSONObject]:
    if completion.top_ids is None or completion.top_logp is None:
        return []
    pairs = zip(completion.top_ids[at], completion.top_logp[at], strict=True)
    return [_token(int(id), float(logp), tokenizer) for id, logp in pairs]


def _token(id: int, logp: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.decode([id], keep_special_tokens=True)
    return {"token": text, "logprob": max(logp, -9999.0), "bytes": list(text.encode())}


def token_ids(values: Any) -> Ids | None:
    """A list of token ids as an array, where it is one."""
    whole = isinstance(values, list) and all(type(id) is int and 0 <= id < 2**31 for id in values)
    return np.array(values, np.int32) if whole and values else None
