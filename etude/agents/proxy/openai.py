"""The parts that OpenAI's dialects share: messages, tools, log-probs and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from etude.agents.proxy.request import AnswerLimits, APIError, ErrorKind, JSONObject
from etude.agents.proxy.request_fields import FieldRule, RequestFields, ignored
from etude.chat.answer_grammar import AnswerForm
from etude.chat.messages import REASONING_KEYS, message_from_dict
from etude.chat.tokenizer import Ids, Tokenizer
from etude.records import Completion, Message

ACCEPTED = (
    "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention "
    "client_metadata"
)
"""Fields that no answer depends on."""
NO_REASONING_CONTROL = "has no effect: the run decides how long the model thinks. Leave it out."
COMMON: dict[str, FieldRule] = {
    "verbosity": ignored("has no effect: the run decides how long answers are. Leave it out."),
    "reasoning_effort": ignored(NO_REASONING_CONTROL),
    "thinking": ignored(NO_REASONING_CONTROL, {"type": "disabled"}),
    "chat_template_kwargs": ignored("has no effect: the run's `chat.template_kwargs` hold. Leave it out.", {}),
}
"""Fields of the dialects with tools that the run decides."""
ERROR_TYPES: dict[ErrorKind, str] = {
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "busy": "rate_limit_error",
    "timeout": "timeout_error",
    "failed": "server_error",
}
ERROR_CODES: dict[ErrorKind, str] = {
    "busy": "rate_limit_exceeded",
    "context": "context_length_exceeded",
    "failed": "server_error",
    "timeout": "timeout",
}
TEXT_PART_TYPES = ("text", "input_text", "output_text")


def error_body(refusal: APIError) -> JSONObject:
    """Return an error in the form that OpenAI's clients read."""
    error = {
        "message": refusal.message,
        "type": ERROR_TYPES.get(refusal.kind, "invalid_request_error"),
        "param": refusal.param,
        "code": refusal.code or ERROR_CODES.get(refusal.kind),
    }
    return {"error": error}


def sse_event(body: JSONObject, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def parse_message(data: Any, where: str) -> Message:
    """Parse a message of a request."""
    fields = RequestFields(data, where)
    role = fields.string("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.error("role", f"is '{role}'; it must be system, developer, user, assistant or tool.")
    content = parse_text(fields.value("content"), f"{where}.content")
    texts = {key: fields.string(key, "") for key in (*REASONING_KEYS, "name", "tool_call_id", "refusal")}
    calls = [_parse_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(fields.array("tool_calls"))]
    if calls and role != "assistant":
        raise fields.error("tool_calls", "is allowed in assistant messages only.")
    fields.require("function_call", reason="is the deprecated form of a tool call; use 'tool_calls'.")
    fields.require("audio", reason="is not supported: this model reads text only.")
    return message_from_dict(
        {
            "role": "system" if role == "developer" else role,
            "content": content + texts["refusal"],
            "reasoning": next((texts[key] for key in REASONING_KEYS if texts[key]), ""),
            "tool_calls": calls,
            "tool_call_id": texts["tool_call_id"],
            "name": texts["name"],
        }
    )


def parse_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise APIError(f"'{where}' must be a string or a list of parts.", param=where)
    texts = []
    for n, part in enumerate(content):
        fields = RequestFields(part, f"{where}[{n}]")
        kind = fields.string("type")
        if kind not in (*TEXT_PART_TYPES, "refusal"):
            raise fields.error("type", f"is '{kind}'; this model reads text only.", "unsupported_content")
        texts.append(fields.string("refusal" if kind == "refusal" else "text"))
    return "".join(texts)


def _parse_call(data: Any, where: str) -> JSONObject:
    fields = RequestFields(data, where)
    fields.require("type", "function", reason="must be 'function', the only type that this endpoint supports.")
    function = RequestFields(fields.value("function"), f"{where}.function")
    function_data = {"name": function.string("name"), "arguments": function.string("arguments", "{}")}
    return {"id": fields.string("id", ""), "function": function_data}


def parse_tools(request: RequestFields, *, flat: bool = False) -> tuple[JSONObject, ...]:
    """Return the functions among a request's tools, in the form that chat templates take. Tools that a provider would
    run are left out. flat: the definitions have no nested `function`."""
    tools = []
    for n, definition in enumerate(request.array("tools")):
        fields = request.nested(definition, f"tools[{n}]")
        kind = fields.string("type")
        if kind != "function":
            reason = f"is '{kind}'; this endpoint supports functions only."
            fields.ignored_fields.drop(f"tools.{kind}", fields.error("type", reason, "unsupported_tool"))
            continue
        function = fields if flat else fields.nested(fields.value("function"), f"tools[{n}].function")
        tools.append(parse_function(function, "parameters", {"type": "object", "properties": {}}))
    return tuple(tools)


def parse_function(fields: RequestFields, schema_name: str, no_parameters: JSONObject | None = None) -> JSONObject:
    """Return a function that the model may call, in the form that chat templates take. schema_name: the field of its
    parameters. no_parameters: the schema of a function without; None requires one."""
    function: dict[str, Any] = {"name": fields.string("name")}
    if "description" in fields:
        function["description"] = fields.string("description")
    schema = fields.value(schema_name)
    function["parameters"] = schema if no_parameters is None else schema or no_parameters
    if not isinstance(function["parameters"], dict):
        raise fields.error(schema_name, "must be a JSON schema.")
    fields.value("strict")  # see `strict_tools`
    return {"type": "function", "function": function}


def strict_tools(fields: RequestFields) -> frozenset[str]:
    """Return the names of the tools whose arguments have to have their schema."""
    definitions = [tool for tool in fields.sent.get("tools") or () if isinstance(tool, Mapping)]
    functions = [tool.get("function") or tool for tool in definitions]
    return frozenset(
        str(function.get("name"))
        for function in functions
        if isinstance(function, Mapping) and function.get("strict") is True
    )


def parse_limits(fields: RequestFields, form: AnswerForm | None, allowed: tuple[str, ...]) -> AnswerLimits:
    """Take what else limits the answer. allowed: see `parse_tool_choice`."""
    parallel = fields.boolean("parallel_tool_calls", True)
    single = "" if parallel else "parallel_tool_calls"
    return AnswerLimits(form=form, strict=strict_tools(fields), single=single, allowed=allowed)


def parse_tool_choice(
    fields: RequestFields, tools: Sequence[JSONObject]
) -> tuple[Literal["auto", "none", "required"], str, tuple[str, ...]]:
    """Return the mode of the tool choice, the tool that has to be called, and the only tools that may be called."""
    choice = fields.value("tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    choice_data = choice if isinstance(choice, dict) else {}
    allowed: tuple[str, ...] = ()
    if choice_data.get("type") == "allowed_tools":
        choice, remaining = _allowed(fields, choice_data, names)
        allowed = tuple(remaining) if len(remaining) < len(names) else ()
        names = remaining
        if choice == "auto" and not names:
            choice = "none"
    if choice in (None, "auto", "none"):
        return choice or "auto", "", allowed
    if choice == "required" and names:
        return ("required", names[0], ()) if len(names) == 1 else ("required", "", allowed)
    function = choice_data.get("function", choice_data)
    name = function.get("name") if isinstance(function, dict) and choice_data.get("type") == "function" else None
    if name not in names or not isinstance(name, str):
        raise fields.error(
            "tool_choice",
            "must be 'auto', 'none', 'required', or name one of the 'tools'. 'required' needs at least one tool.",
        )
    return "required", name, ()


def _allowed(request: RequestFields, choice_data: JSONObject, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the mode of an `allowed_tools` choice, and the names of the allowed tools."""
    fields = request.nested(choice_data.get("allowed_tools", choice_data), "tool_choice")
    mode, allowed = fields.string("mode", "auto"), set[str]()
    for n, tool_data in enumerate(fields.array("tools")):
        tool = RequestFields(tool_data, f"tool_choice.tools[{n}]")
        inner = tool.value("function")
        allowed.add(
            (tool if inner is None else RequestFields(inner, f"tool_choice.tools[{n}].function")).string("name", "")
        )
    return mode, [name for name in names if name in allowed]


def format_logprobs(completion: Completion, tokenizer: Tokenizer) -> list[JSONObject]:
    """Return the log-prob of each sampled token, and of the most likely tokens at its position."""
    return format_token_logprobs(completion.ids, completion.logp, completion.top_ids, completion.top_logp, tokenizer)


def format_token_logprobs(
    ids: Ids,
    logp: NDArray[np.float32],
    top_ids: Ids | None,
    top_logp: NDArray[np.float32] | None,
    tokenizer: Tokenizer,
) -> list[JSONObject]:
    """Return the log-prob of each token, and of the most likely tokens at its position."""
    formatted: list[JSONObject] = []
    for position, (id, score) in enumerate(zip(ids, logp, strict=True)):
        likeliest: list[JSONObject] = []
        if top_ids is not None and top_logp is not None:
            pairs = zip(top_ids[position], top_logp[position], strict=True)
            likeliest = [_token_logprob(int(top), float(top_score), tokenizer) for top, top_score in pairs]
        formatted.append({**_token_logprob(int(id), float(score), tokenizer), "top_logprobs": likeliest})
    return formatted


def _token_logprob(id: int, logp: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = tokenizer.decode([id], keep_special_tokens=True)
    return {"token": text, "logprob": max(logp, -9999.0), "bytes": list(text.encode())}


def token_ids(values: Any) -> Ids | None:
    """Return a list of token ids as an array; None if the value is not such a list."""
    is_token_list = isinstance(values, list) and all(type(id) is int and 0 <= id < 2**31 for id in values)
    return np.array(values, np.int32) if is_token_list and values else None
