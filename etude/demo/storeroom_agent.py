"""What the agent of the demonstration is for: to say how many of a kind there are in a storeroom.

Things lie on shelves, one kind on each, and every task has a storeroom of its own: where things lie and how many there
are is drawn anew, so that no model can know it by heart. Who asks two functions, one after the other, knows; who
guesses is right one time in ten.

The agent is code as one writes it for OpenAI's client, and knows nothing of training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from etude.agents import LLM
from etude.agents.agent import agent
from etude.records import Task

__all__ = ["KINDS", "MOST_CALLS", "NUMBERS", "SHELVES", "TOOLS", "make_rows", "question", "storeroom_agent"]

KINDS = ("apples", "beets", "figs", "kiwis", "leeks", "limes", "pears", "plums")
SHELVES = "ABCDEFGH"
NUMBERS = "0123456789"
MOST_CALLS = 4
"""How often the model is asked before the agent gives up."""


def _function(name: str, description: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[Any] = [
    _function("find", "The shelf on which a kind of thing lies.", "kind"),
    _function("count", "How many things lie on a shelf.", "shelf"),
]


@agent
async def storeroom_agent(task: Task, llm: LLM) -> float:
    """Ask the model, call what it wants called, and see whether it knows in the end."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(MOST_CALLS):
        response = await llm.async_client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        message = response.choices[0].message
        if not message.tool_calls:
            return float(message.content == task["answer"])
        messages.append(message.model_dump(exclude_none=True))
        calls: Any = message.tool_calls
        for call in calls:
            result = call_tool(task, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def call_tool(task: Task, name: str, arguments: str) -> str:
    """What a function says; `?` where there is no such shelf or thing."""
    table: Any = task["shelves"] if name == "find" else task["numbers"]
    try:
        argument = next(iter(json.loads(arguments).values()), "")
    except (ValueError, AttributeError):
        argument = ""
    return str(table.get(argument, "?")) if isinstance(argument, str) else "?"


def question(kind: str) -> str:
    """What the agent is asked."""
    return f"How many {kind} are there?"


def make_rows(seed: int, count: int, *, held_out: bool) -> list[Mapping[str, Any]]:
    """Tasks, each with a storeroom of its own."""
    generator = random.Random(f"{seed} {held_out}")
    rows: list[Mapping[str, Any]] = []
    for _ in range(count):
        shelves = dict(zip(KINDS, generator.sample(SHELVES, len(KINDS)), strict=True))
        numbers = {shelf: generator.choice(NUMBERS) for shelf in SHELVES}
        kind = generator.choice(KINDS)
        task = {"question": question(kind), "answer": numbers[shelves[kind]]}
        rows.append({**task, "shelves": shelves, "numbers": numbers})
    return rows
