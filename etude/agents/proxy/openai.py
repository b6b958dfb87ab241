"""What OpenAI's dialects have in common: how messages, tools and log-probs are written, and how errors are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from etude.agents.proxy.asked import Body, Kind, Refusal
from etude.agents.proxy.fields import Fields, Notes, Rule, ignored
from etude.chat.messages import REASONING_KEYS, message_of
from etude.chat.tokenizer import Ids, Tokenizer
from etude.records import Completion, Message

__all__ = [
    "ACCEPTED",
    "COMMON",
    "NO_FORMAT",
    "choice_of",
    "error",
    "event",
    "logprobs",
    "message",
    "text_of",
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
COMMON: dict[str, Rule] = {
    "parallel_tool_calls": ignored(NOT_ONE, True),
    "verbosity": ignored("is not the agent's to say: the run decides how long answers are. Leave it out."),
    "reasoning_effort": ignored(THINKS),
    "thinking": ignored(THINKS, {"type": "disabled"}),
    "chat_template_kwargs": ignored("is not the agent's to say: the run's `chat.variables` hold. Leave it out.", {}),
}
"""Fields of the dialects with tools that the run decides."""
TYPES: dict[Kind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "busy": "rate_limit_error",
    "timeout": "timeout_error",
    "failed": "server_error",
}
CODES: dict[Kind, str] = {
    "busy": "rate_limit_exceeded",
    "context": "context_length_exceeded",
    "failed": "server_error",
    "timeout": "timeout",
}
TEXTS = ("text", "input_text", "output_text")


def error(refusal: Refusal) -> Body:
    """Why there is no answer, as OpenAI's clients read it."""
    told = {
        "message": refusal.message,
        "type": TYPES.get(refusal.kind, "invalid_request_error"),
        "param": refusal.param,
        "code": refusal.code or CODES.get(refusal.kind),
    }
    return {"error": told}


def event(body: Body, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def message(form: Any, where: str) -> Message:
    """A message of a request."""
    fields = Fields(form, where)
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.refuse("role", f"is '{role}'; a message is by system, developer, user, assistant or tool.")
    said: dict[str, Any] = {"role": "system" if role == "developer" else role}
    said["content"] = text_of(fields.any("content"), f"{where}.content")
    for key in (*REASONING_KEYS, "name", "tool_call_id"):
        said[key] = fields.text(key, "")
    reasoning = next((said[key] for key in REASONING_KEYS if said[key]), "")
    refused = fields.text("refusal", "")
    calls = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(fields.many("tool_calls"))]
    if calls and role != "assistant":
        raise fields.refuse("tool_calls", "are the assistant's alone.")
    fields.only("function_call", why="is the old form of a tool call; use 'tool_calls'.")
    fields.only("audio", why="cannot be read by this model, which reads text.")
    return message_of(
        {
            "role": said["role"],
            "content": said["content"] + refused,
            "reasoning": reasoning,
            "tool_calls": calls,
            "tool_call_id": said["tool_call_id"],
            "name": said["name"],
        }
    )


def text_of(content: Any, where: str) -> str:
    """The text of a message's content, which may be a list of texts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(f"'{where}' must be a text or a list of parts.", param=where)
    texts = []
    for n, part in enumerate(content):
        fields = Fields(part, f"{where}[{n}]")
        kind = fields.text("type")
        if kind not in (*TEXTS, "refusal"):
            raise fields.refuse("type", f"is '{kind}'; this model reads text alone.", "unsupported_content")
        texts.append(fields.text("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def _call(form: Any, where: str) -> Body:
    fields = Fields(form, where)
    fields.only("type", "function", why="must be 'function'; this endpoint has no other tools.")
    function = Fields(fields.any("function"), f"{where}.function")
    called = {"name": function.text("name"), "arguments": function.text("arguments", "{}")}
    return {"id": fields.text("id", ""), "function": called}


def tools_of(forms: Sequence[Any], notes: Notes, *, flat: bool = False) -> tuple[Body, ...]:
    """The functions among the tools of a request, in the form that chat templates know; tools that the provider would
    run are left out. flat: they come without their `function`."""
    tools = []
    for n, form in enumerate(forms):
        fields = Fields(form, f"tools[{n}]")
        kind = fields.text("type")
        if kind != "function":
            why = f"is '{kind}'; the only tools here are functions."
            notes.drop(f"tools.{kind}", fields.refuse("type", why, "unsupported_tool"))
            continue
        function = Fields(form if flat else fields.any("function"), f"tools[{n}]" + ("" if flat else ".function"))
        told: dict[str, Any] = {"name": function.text("name")}
        if "description" in function:
            told["description"] = function.text("description")
        told["parameters"] = function.any("parameters") or {"type": "object", "properties": {}}
        if not isinstance(told["parameters"], dict):
            raise function.refuse("parameters", "must be a JSON schema.")
        if function.any("strict") is True:  # several clients send it unasked
            notes.add("tools.strict")
        tools.append({"type": "function", "function": told})
    return tuple(tools)


def choice_of(fields: Fields, tools: Sequence[Body], notes: Notes) -> tuple[Literal["auto", "none", "required"], str]:
    """Whether a tool is to be called, and which."""
    choice = fields.any("tool_choice")
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
        raise fields.refuse("tool_choice", "must be 'auto', 'none', 'required', or name one of the 'tools'.")
    return "required", name


def _allowed(form: Body, names: Sequence[str], notes: Notes) -> tuple[str, list[str]]:
    """The mode of a choice that allows some of the tools, and the names of those. A single one that has to be called
    is as good as named; nothing else holds the model to some of its tools."""
    fields = Fields(form.get("allowed_tools", form), "tool_choice")
    mode, allowed = fields.text("mode", "auto"), set[str]()
    for n, each in enumerate(fields.many("tools")):
        tool = Fields(each, f"tool_choice.tools[{n}]")
        inner = tool.any("function")
        allowed.add((tool if inner is None else Fields(inner, f"tool_choice.tools[{n}].function")).text("name", ""))
    left = [name for name in names if name in allowed]
    if len(left) < len(names) and not (mode == "required" and len(left) == 1):
        why = "allows some of the 'tools' alone, and nothing holds this model to them. Send no others."
        notes.drop("tool_choice.allowed_tools", fields.refuse("tools", why))
    return mode, left


def logprobs(completion: Completion, tokenizer: Tokenizer) -> list[Body]:
    """The log-prob of each sampled token, and of the likeliest in its place."""
    return [
        {**_token(int(id), float(logp), tokenizer), "top_logprobs": _tops(completion, at, tokenizer)}
        for at, (id, logp) in enumerate(zip(completion.ids, completion.logp, strict=True))
    ]


def _tops(completion: Completion, at: int, tokenizer: Tokenizer) -> list[Body]:
    if completion.top_ids is None or completion.top_logp is None:
        return []
    pairs = zip(completion.top_ids[at], completion.top_logp[at], strict=True)
    return [_token(int(id), float(logp), tokenizer) for id, logp in pairs]


def _token(id: int, logp: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.decode([id], special=True)
    return {"token": text, "logprob": max(logp, -9999.0), "bytes": list(text.encode())}


def token_ids(values: Any) -> Ids | None:
    """A list of token ids as an array, where it is one."""
    whole = isinstance(values, list) and all(type(id) is int and 0 <= id < 2**31 for id in values)
    return np.array(values, np.int32) if whole and values else None
