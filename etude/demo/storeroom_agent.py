"""The agent demo's task and agent: say how many items of a kind are in a storeroom.

Items are on shelves, one kind on each. Every task draws its own storeroom, so that a model cannot memorize it. Two tool
calls, one after the other, give the answer; a guess is right one time in ten.

The agent is normal code for the OpenAI client, and knows nothing of training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from etude.agents import LLM
from etude.agents.agent import agent
from etude.records import Task

KINDS = ("apples", "beets", "figs", "kiwis", "leeks", "limes", "pears", "plums")
SHELVES = "ABCDEFGH"
NUMBERS = "0123456789"
MOST_CALLS = 4
"""The most requests to the model before the agent gives up."""


def _function(name: str, description: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: list[Any] = [
    _function("find", "The shelf on which a kind of thing lies.", "kind"),
    _function("count", "How many things lie on a shelf.", "shelf"),
]


@agent
async def storeroom_agent(task: Task, llm: LLM) -> float:
    """Send the question, run the tool calls of the model, and compare its final answer."""
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
    """Return the result of a tool; `?` for an unknown shelf or kind."""
    table: Any = task["shelves"] if name == "find" else task["numbers"]
    try:
        argument = next(iter(json.loads(arguments).values()), "")
    except (ValueError, AttributeError):
        argument = ""
    return str(table.get(argument, "?")) if isinstance(argument, str) else "?"


def question(kind: str) -> str:
    """Return the question of a task."""
    return f"How many {kind} are there?"


def make_rows(seed: int, count: int, *, held_out: bool) -> list[Mapping[str, Any]]:
    """Return tasks, each with its own storeroom."""
    generator = random.Random(f"{seed} {held_out}")
    rows: list[Mapping[str, Any]] = []
    for _ in range(count):
        shelves = dict(zip(KINDS, generator.sample(SHELVES, len(KINDS)), strict=True))
        numbers = {shelf: generator.choice(NUMBERS) for shelf in SHELVES}
        kind = generator.choice(KINDS)
        task = {"question": question(kind), "answer": numbers[shelves[kind]]}
        rows.append({**task, "shelves": shelves, "numbers": numbers})
    return rows
