"""Agents of other frameworks, written as their documentation shows: each has a model look things up until it has an
answer. None of them knows of Etude; they only get the model's address."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import agents
import openai
import requests
import smolagents
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr
from smolagents import tool
from smolagents.monitoring import LogLevel

FOUND: Mapping[str, str] = {"x1": "  seven\n", "x1 ": "7", "y2": '{"it": "is  so"}', "ü2 ": "🌧"}
QUESTION = "What is x1? Look it up."
SYSTEM = "Be kind. \n"
MOST = 12
"""Turns after which an agent gives up."""


def look_up(key: str) -> str:
    """Answer as the tool of all these agents."""
    return FOUND.get(key, "nothing")


def langgraph(url: str, key: str, *, streamed: bool) -> None:
    """Run a graph of a model and its tools, as LangGraph's tutorials draw it."""

    @langchain_tool
    def look(key: str) -> str:
        """Look up what belongs to a key."""
        return look_up(key)

    model = ChatOpenAI(model="policy", base_url=url, api_key=SecretStr(key), streaming=streamed).bind_tools([look])

    def speak(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("speak", speak)
    graph.add_node("tools", ToolNode([look]))
    graph.add_edge(START, "speak")
    graph.add_conditional_edges("speak", tools_condition)
    graph.add_edge("tools", "speak")
    messages: Any = {"messages": [("system", SYSTEM), ("user", QUESTION)]}
    try:
        graph.compile().invoke(messages, {"recursion_limit": 2 * MOST})
    except GraphRecursionError:
        return


async def openai_agents(url: str, key: str, *, responses: bool, streamed: bool) -> None:
    """Run an agent of OpenAI's Agents SDK, over its default interface or over chat completions."""

    @agents.function_tool
    def look(key: str) -> str:
        """Look up what belongs to a key."""
        return look_up(key)

    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        kind: Any = agents.OpenAIResponsesModel if responses else agents.OpenAIChatCompletionsModel
        agent = agents.Agent(name="looker", instructions=SYSTEM, tools=[look], model=kind("policy", client))
        config = agents.RunConfig(tracing_disabled=True)
        try:
            if not streamed:
                await agents.Runner.run(agent, QUESTION, max_turns=MOST, run_config=config)
                return
            run = agents.Runner.run_streamed(agent, QUESTION, max_turns=MOST, run_config=config)
            async for _ in run.stream_events():
                pass
        except agents.MaxTurnsExceeded:
            return


def smolagent(url: str, key: str, kind: Callable[..., Any], *, streamed: bool, most: int = 20, **more: Any) -> None:
    """Run an agent of smolagents that writes Python, or one that calls tools."""

    @tool
    def look(key: str) -> str:
        """Look up what belongs to a key.

        Args:
            key: what to look up
        """
        return look_up(key)

    model = smolagents.OpenAIModel("policy", api_base=url, api_key=key, **more)
    agent = kind(tools=[look], model=model, max_steps=most, stream_outputs=streamed, verbosity_level=LogLevel.OFF)
    agent.run(QUESTION)


LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look up what belongs to a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def plain(url: str, key: str, *, streamed: bool = False) -> list[dict[str, Any]]:
    """Run a loop over HTTP that keeps role, content and calls of each message, and serializes the arguments anew.
    Return the last messages that it sent."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    with requests.Session() as session:
        session.headers["authorization"] = f"Bearer {key}"
        for _ in range(MOST):
            request = {"model": "policy", "messages": messages, "tools": [LOOK], "stream": streamed}
            response = session.post(f"{url}/chat/completions", json=request, stream=streamed, timeout=60)
            response.raise_for_status()
            message = _joined(response) if streamed else response.json()["choices"][0]["message"]
            if not message.get("tool_calls"):
                break
            calls = [
                {**call, "function": {**call["function"], "arguments": _again(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            keys = [json.loads(call["function"]["arguments"])["key"] for call in calls]
            answers = [
                {"role": "tool", "tool_call_id": call["id"], "content": look_up(key)}
                for call, key in zip(calls, keys, strict=True)
            ]
            messages = [*messages, {"role": "assistant", "content": message["content"], "tool_calls": calls}, *answers]
    return messages


def _again(arguments: str) -> str:
    return json.dumps(json.loads(arguments), indent=1)


def _joined(response: requests.Response) -> dict[str, Any]:
    """Join a streamed answer into one message."""
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    for line in response.iter_lines():
        data = line.decode().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        delta = json.loads(data)["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        message["tool_calls"] += delta.get("tool_calls") or []
    return message | {"content": message["content"] or None}
