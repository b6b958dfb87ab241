"""LangGraph's agent over LangChain's client of chat completions."""

from __future__ import annotations

from features import ASK, COUNT, HELLO, LOOK, MODEL, UNKNOWN, URL, Colour, look, play
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def model(key: str, name: str = MODEL) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=f"{URL}/v1", api_key=key)


def call(key: str, name: str = MODEL) -> str:
    return model(key, name).invoke(HELLO).content


def stream(key: str) -> str:
    return "".join(chunk.content for chunk in model(key).stream(HELLO))


def tools(key: str) -> str:
    return create_react_agent(model(key), [look]).invoke({"messages": [("user", LOOK)]})["messages"][-1].content


def structured(key: str) -> str:
    return model(key).with_structured_output(Colour, method="json_schema").invoke(ASK).colour


def drop(key: str) -> str:
    chunks = model(key).stream(COUNT)
    next(chunk for chunk in chunks if chunk.content)
    chunks.close()
    return "dropped"


play(call=call, stream=stream, tools=tools, structured=structured, error=lambda key: call(key, UNKNOWN), drop=drop)
