"""The model of smolagents for OpenAI-compatible servers. Its agents write code, which other tests run."""

from __future__ import annotations

from features import ASK, COUNT, HELLO, MODEL, UNKNOWN, URL, Colour, play
from smolagents import ChatMessage, OpenAIServerModel

FORM = {
    "type": "json_schema",
    "json_schema": {"name": "colour", "strict": True, "schema": Colour.model_json_schema()},
}


def model(key: str, name: str = MODEL) -> OpenAIServerModel:
    return OpenAIServerModel(name, api_base=f"{URL}/v1", api_key=key)


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def call(key: str, name: str = MODEL) -> str:
    return model(key, name).generate(user(HELLO)).content


def stream(key: str) -> str:
    return "".join(delta.content or "" for delta in model(key).generate_stream(user(HELLO)))


def structured(key: str) -> str:
    return Colour.model_validate_json(model(key).generate(user(ASK), response_format=FORM).content).colour


def drop(key: str) -> str:
    deltas = model(key).generate_stream(user(COUNT))
    next(delta for delta in deltas if delta.content)
    deltas.close()
    return "dropped"


play(call=call, stream=stream, structured=structured, error=lambda key: call(key, UNKNOWN), drop=drop)
