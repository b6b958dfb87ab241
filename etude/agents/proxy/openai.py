"""The parts that OpenAI's dialects share: messages, tools, log-probs and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from etude.agents.proxy.request import AnswerLimits, APIError, ErrorKind, JSONObject
from etude.agents.proxy.request_fields import FieldRule, IgnoredFields, RequestFields, ignored
from etude.chat.answer_grammar import AnswerForm
from etude.chat.messages import REASONING_KEYS, message_from_dict
from etude.chat.tokenizer import Ids, Tokenizer
from etude.records import Completion, ContentPart, Message

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
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
IMAGE_PART_TYPES = ("image_url", "input_image")
OTHER_TYPES = {"image": "an image is a part of the type 'image_url', or 'input_image' in Responses"}
"""The sentence for a type that other APIs have, where this one has images too."""
WITH_IMAGES = ("user", "tool")
"""The roles whose messages may have images."""


def error_body(refusal: APIError) -> JSONObject:
    """Return an error in the form that OpenAI's clients read."""
    error = {
        "message": refusal.message,
        "type": ERROR_TYPES.get(refusal.kind, "invalid_request_error"),
        "param": refusal.param,
        "code": refusal.code or ERROR_CODES.get(refusal.kind),
    }
    return {"error": error}


def json_line(body: JSONObject) -> str:
    """Return JSON of one line, with infinities as Python writes them: a model may write one into a call of a tool.

    Line ends of Unicode are escaped, since clients that read by lines, such as httpx, would divide the JSON there.
    """
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).translate(_LINE_ENDS)


def sse_event(body: JSONObject, name: str = "") -> bytes:
    """Return a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json_line(body)}\n\n".encode()


def parse_message(data: Any, where: str, ignored_fields: IgnoredFields) -> Message:
    """Parse a message of a request."""
    fields = RequestFields(data, where, ignored_fields)
    role = fields.string("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise fields.error("role", f"is '{role}'; it must be system, developer, user, assistant or tool.")
    raw, place = fields.value("content"), f"{where}.content"
    content = parse_content(raw, place, ignored_fields) if role in WITH_IMAGES else parse_text(raw, place)
    texts = {key: fields.string(key, "") for key in (*REASONING_KEYS, "name", "tool_call_id", "refusal")}
    calls = [_parse_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(fields.array("tool_calls"))]
    if calls and role != "assistant":
        raise fields.error("tool_calls", "is allowed in assistant messages only.")
    fields.require("function_call", reason="is the deprecated form of a tool call; use 'tool_calls'.")
    fields.require("audio", reason="is not supported: this model does not hear.")
    message = message_from_dict(
        {
            "role": "system" if role == "developer" else role,
            "content": content + texts["refusal"] if isinstance(content, str) else "",
            "reasoning": next((texts[key] for key in REASONING_KEYS if texts[key]), ""),
            "tool_calls": calls,
            "tool_call_id": texts["tool_call_id"],
            "name": texts["name"],
        }
    )
    return message if isinstance(content, str) else replace(message, content=content)


def parse_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or a list of text parts."""
    parts = parse_content(content, where, None)
    assert isinstance(parts, str), "images are refused"
    return parts


def parse_content(content: Any, where: str, ignored_fields: IgnoredFields | None) -> str | tuple[ContentPart, ...]:
    """Return a message's content: its text, if it has no image, else its parts. ignored_fields: None for content that
    has no images."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise APIError(f"'{where}' must be a string or a list of parts.", param=where)
    parts = list[ContentPart]()
    for n, part in enumerate(content):
        fields = RequestFields(part, f"{where}[{n}]", ignored_fields)
        kind = fields.string("type")
        if kind in IMAGE_PART_TYPES and ignored_fields is not None:
            parts.append(_parse_image(fields))
        elif kind in (*TEXT_PART_TYPES, "refusal"):
            parts.append(ContentPart("text", fields.string("refusal" if kind == "refusal" else "text")))
        else:
            instead = OTHER_TYPES.get(kind, "") if ignored_fields is not None else ""
            raise fields.error("type", f"is '{kind}'; {instead or reads(kind)}.", "unsupported_content")
    return join_parts(parts)


def reads(kind: str) -> str:
    """Return what a message may have in place of a part of this type."""
    if "video" in kind:
        return "give a video's frames as images"
    if "image" in kind:
        return "images are read in messages of the user and in results of tools only"
    return "this endpoint reads text and images only"


def join_parts(parts: Sequence[ContentPart]) -> str | tuple[ContentPart, ...]:
    """Return parts as the content of a message: as one text, if they have no image."""
    if all(part.kind == "text" for part in parts):
        return "".join(part.text for part in parts)
    return tuple(part for part in parts if part.kind != "text" or part.text)


def _parse_image(fields: RequestFields) -> ContentPart:
    """Return an image with its address, and the name of its field as text."""
    url = fields.value("image_url")
    where = fields
    name = "image_url"
    if isinstance(url, Mapping):
        where = fields.nested(url, fields.path("image_url"))
        name = "url"
        url = where.value("url")
    for owner in (fields, where):
        if owner.value("detail") not in (None, "auto"):
            reason = "has no effect: `vision.max_pixels` decides how many pixels the model sees. Leave it out."
            owner.ignored_fields.drop("detail", owner.error("detail", reason, "unsupported_parameter"))
    if fields.value("file_id") is not None:
        raise fields.error("file_id", "is not stored by this endpoint; send a data URL.", "unsupported_content")
    if not isinstance(url, str) or not url:
        raise where.error(name, "must be the address of an image, or a data URL.")
    return ContentPart("image", where.path(name), url)


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
