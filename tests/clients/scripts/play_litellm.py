"""LiteLLM, as the server of an OpenAI-compatible model."""

from __future__ import annotations

import json
from typing import Any

import litellm
from features import ASK, COUNT, HELLO, LOOK, MODEL, SCHEMA, UNKNOWN, URL, Colour, look, play

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look up a key.", "parameters": SCHEMA}}]


def asked(key: str, messages: list, model: str = MODEL, **options: Any) -> Any:
    return litellm.completion(f"openai/{model}", messages, api_base=f"{URL}/v1", api_key=key, **options)


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def call(key: str, model: str = MODEL) -> str:
    return asked(key, user(HELLO), model).choices[0].message.content


def stream(key: str) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in asked(key, user(HELLO), stream=True))


def tools(key: str) -> str:
    messages = user(LOOK)
    while True:
        message = asked(key, messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for each in message.tool_calls:
            result = look(**json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


def structured(key: str) -> str:
    message = asked(key, user(ASK), response_format=Colour).choices[0].message
    return Colour.model_validate_json(message.content).colour


def drop(key: str) -> str:
    chunks = asked(key, user(COUNT), stream=True)
    next(chunk for chunk in chunks if chunk.choices[0].delta.content)
    chunks.completion_stream.close()
    return "dropped"


play(call=call, stream=stream, tools=tools, structured=structured, error=lambda key: call(key, UNKNOWN), drop=drop)
