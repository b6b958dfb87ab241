"""An agent for OpenAI's client: it looks things up for as long as the model asks for that."""

from __future__ import annotations

import json
from typing import Any

import etude
from etude.agents import LLM
from etude.records import Task

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look up what belongs to a key.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]


@etude.agent
async def looker(task: Task, llm: LLM) -> float:
    """Ask, look up what the model asks for, and score its final answer."""
    table: Any = task["table"]
    messages: list[Any] = [{"role": "user", "content": task["key"]}]
    for _ in range(3):
        response = await llm.async_client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        message = response.choices[0].message
        if not message.tool_calls:
            return float(message.content == task["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            value = table.get(json.loads(call.function.arguments).get("key"), "?")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    return 0.0
