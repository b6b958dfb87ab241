"""An agent written for OpenAI's client, trained as it is: `python examples/openai_sdk_agent.py MODEL TASKS [STEPS]`.

MODEL is a Hugging Face directory whose chat template knows tools; TASKS is a file of rows with `question` and `answer`,
sums such as `12*7`. The agent lets the model use a calculator as often as it likes, and is paid for a right answer that
is short. Nothing in `solve` knows that it is trained.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import etude
from etude.agents import LLM
from etude.records import Task

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
SUM = re.compile(r"(?!.*\*\*)[\d+\-*() ]{1,40}")
FUNCTION = {"name": "calculate", "description": "Work out a sum, such as 3*(4+5).", "parameters": PARAMETERS}


def calculate(arguments: str) -> str:
    """What the calculator says: it knows digits, + - * and brackets."""
    try:
        expression = str(json.loads(arguments)["expression"])
        return str(eval(expression)) if SUM.fullmatch(expression) else "I know digits, + - * ()"
    except Exception as error:
        return f"Error: {error}"


@etude.agent
async def solve(task: Task, llm: LLM) -> dict[str, float]:
    """Ask; calculate what the model wants calculated; see whether it is right in the end."""
    messages: list[Any] = [{"role": "user", "content": f"What is {task['question']}? Answer with the number alone."}]
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    for _ in range(4):
        told = await llm.async_client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
        said = told.choices[0].message
        if not said.tool_calls:
            answer = (said.content or "").strip()
            return {"right": float(answer == str(task["answer"])), "short": 0.1 * (len(answer) < 8)}
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            found = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return {"right": 0.0, "short": 0.0}


if __name__ == "__main__":
    model, tasks, *steps = sys.argv[1:]
    options = {"model.path": model, "steps": steps[0] if steps else "100", "sampling.max_tokens": 256}
    etude.Trainer(etude.RL("grpo", options)).fit(solve, tasks)
