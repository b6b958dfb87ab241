"""The client of Anthropic, by messages."""

from __future__ import annotations

from anthropic import Anthropic
from features import ASK, COUNT, HELLO, LOOK, MODEL, SCHEMA, UNKNOWN, URL, Colour, look, play

TOOLS = [{"name": "look", "description": "Look up a key.", "input_schema": SCHEMA}]


def client(key: str) -> Anthropic:
    return Anthropic(base_url=URL, api_key=key)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def call(key: str, model: str = MODEL) -> str:
    return client(key).messages.create(model=model, max_tokens=400, messages=user(HELLO)).content[0].text


def stream(key: str) -> str:
    with client(key).messages.stream(model=MODEL, max_tokens=400, messages=user(HELLO)) as events:
        return "".join(events.text_stream)


def tools(key: str) -> str:
    messages = user(LOOK)
    while True:
        answer = client(key).messages.create(model=MODEL, max_tokens=400, messages=messages, tools=TOOLS)
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return answer.content[0].text
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": look(**block.input)} for block in calls]
        messages.append({"role": "user", "content": results})


def structured(key: str) -> str:
    done = client(key).messages.parse(model=MODEL, max_tokens=400, messages=user(ASK), output_format=Colour)
    return done.parsed_output.colour


def drop(key: str) -> str:
    with client(key).messages.stream(model=MODEL, max_tokens=4000, messages=user(COUNT)) as events:
        next(iter(events.text_stream))
    return "dropped"


play(call=call, stream=stream, tools=tools, structured=structured, error=lambda key: call(key, UNKNOWN), drop=drop)
