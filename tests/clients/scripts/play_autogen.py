"""AutoGen's assistant over its client of chat completions."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from features import ASK, COUNT, HELLO, LOOK, MODEL, UNKNOWN, URL, Colour, look, play

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


def model(key: str, name: str = MODEL) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model=name, base_url=f"{URL}/v1", api_key=key, model_info=INFO)


def user(text: str) -> list:
    return [UserMessage(content=text, source="user")]


async def call(key: str, name: str = MODEL) -> str:
    return (await model(key, name).create(user(HELLO))).content


async def stream(key: str) -> str:
    return "".join([text async for text in model(key).create_stream(user(HELLO)) if isinstance(text, str)])


async def tools(key: str) -> str:
    agent = AssistantAgent("player", model(key), tools=[look], reflect_on_tool_use=False, max_tool_iterations=3)
    return (await agent.run(task=LOOK)).messages[-1].content


async def structured(key: str) -> str:
    done = await model(key).create(user(ASK), json_output=Colour)
    return Colour.model_validate_json(done.content).colour


async def error(key: str) -> str:
    return await call(key, UNKNOWN)


async def drop(key: str) -> str:
    chunks = model(key).create_stream(user(COUNT))
    async for _ in chunks:
        break
    await chunks.aclose()
    return "dropped"


play(call=call, stream=stream, tools=tools, structured=structured, error=error, drop=drop)
