"""Pydantic AI, by chat completions."""

from __future__ import annotations

from typing import Any

from features import ASK, COUNT, HELLO, LOOK, MODEL, UNKNOWN, URL, Colour, look, play
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(key: str, model: str = MODEL, **options: Any) -> Agent:
    return Agent(OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=key)), **options)


async def call(key: str) -> str:
    return (await agent(key).run(HELLO)).output


async def stream(key: str) -> str:
    async with agent(key).run_stream(HELLO) as result:
        return "".join([text async for text in result.stream_text(delta=True)])


async def tools(key: str) -> str:
    return (await agent(key, tools=[look]).run(LOOK)).output


async def structured(key: str) -> str:
    return (await agent(key, output_type=NativeOutput(Colour)).run(ASK)).output.colour


async def error(key: str) -> str:
    return (await agent(key, UNKNOWN).run(HELLO)).output


async def drop(key: str) -> str:
    async with agent(key).run_stream(COUNT) as result:
        async for _ in result.stream_text(delta=True):
            await result.cancel()
            return "dropped"
    return "ended"


play(call=call, stream=stream, tools=tools, structured=structured, error=error, drop=drop)
