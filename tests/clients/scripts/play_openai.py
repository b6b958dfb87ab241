"""The client of OpenAI, by chat completions."""

from __future__ import annotations

import json

from features import ASK, COUNT, HELLO, LOOK, MODEL, SCHEMA, UNKNOWN, URL, Colour, look, play
from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look up a key.", "parameters": SCHEMA}}]


def client(key: str) -> OpenAI:
    return OpenAI(base_url=f"{URL}/v1", api_key=key)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def call(key: str, model: str = MODEL) -> str:
    return client(key).chat.completions.create(model=model, messages=user(HELLO)).choices[0].message.content


def stream(key: str) -> str:
    chunks = client(key).chat.completions.create(model=MODEL, messages=user(HELLO), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def tools(key: str) -> str:
    messages = user(LOOK)
    while True:
        message = client(key).chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for each in message.tool_calls:
            result = look(**json.loads(each.function.arguments))
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


def structured(key: str) -> str:
    done = client(key).chat.completions.parse(model=MODEL, messages=user(ASK), response_format=Colour)
    return done.choices[0].message.parsed.colour


def drop(key: str) -> str:
    with client(key).chat.completions.create(model=MODEL, messages=user(COUNT), stream=True) as chunks:
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                return "dropped"
    return "ended"


play(call=call, stream=stream, tools=tools, structured=structured, error=lambda key: call(key, UNKNOWN), drop=drop)
