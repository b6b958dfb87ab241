"""OpenAI's Agents SDK, by its default API, responses."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from features import ASK, COUNT, HELLO, LOOK, MODEL, UNKNOWN, URL, Colour, look, play
from openai import AsyncOpenAI

set_tracing_disabled(True)


def agent(key: str, model: str = MODEL, **options: Any) -> Agent:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=key)
    return Agent("player", model=OpenAIResponsesModel(model, client), **options)


async def call(key: str, model: str = MODEL) -> str:
    return (await Runner.run(agent(key, model), HELLO)).final_output


async def stream(key: str) -> str:
    texts = []
    async for event in Runner.run_streamed(agent(key), HELLO).stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            texts.append(event.data.delta)
    return "".join(texts)


async def tools(key: str) -> str:
    return (await Runner.run(agent(key, tools=[function_tool(look)]), LOOK)).final_output


async def structured(key: str) -> str:
    return (await Runner.run(agent(key, output_type=Colour), ASK)).final_output.colour


async def error(key: str) -> str:
    return await call(key, UNKNOWN)


async def drop(key: str) -> str:
    result = Runner.run_streamed(agent(key), COUNT)
    async for event in result.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            result.cancel()
    return "dropped"


play(call=call, stream=stream, tools=tools, structured=structured, error=error, drop=drop)
