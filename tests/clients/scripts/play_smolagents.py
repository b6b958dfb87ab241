"""The model of smolagents for OpenAI-compatible servers, and its agent that calls tools by code."""

from __future__ import annotations

from features import ASK, COUNT, HELLO, LOOK, MODEL, UNKNOWN, URL, Colour, look, play
from smolagents import ChatMessage, CodeAgent, OpenAIServerModel, tool

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


def tools(key: str) -> str:
    return CodeAgent(tools=[tool(look)], model=model(key), max_steps=3, verbosity_level=0).run(LOOK)


def structured(key: str) -> str:
    return Colour.model_validate_json(model(key).generate(user(ASK), response_format=FORM).content).colour


def drop(key: str) -> str:
    deltas = model(key).generate_stream(user(COUNT))
    next(delta for delta in deltas if delta.content)
    deltas.close()
    return "dropped"


play(call=call, stream=stream, tools=tools, structured=structured, error=lambda key: call(key, UNKNOWN), drop=drop)
