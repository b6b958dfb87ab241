"""Train an unchanged agent for OpenAI's client: `python examples/openai_sdk_agent.py [DIRECTORY] [STEPS]`.

The question is the number of things of a kind in a storeroom. The model may call two functions: one returns the shelf
of a kind of thing, the other the number of things on a shelf. The tiny model has seen tool calls and mostly guesses. In
a minute or two it learns to call the functions, because that earns the reward. `solve` contains no code for training.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import etude
from etude.agents import LLM
from etude.demo.storeroom_agent import TOOLS, make_rows
from etude.demo.storeroom_model import warm_up
from etude.records import Task

OPTIONS = {  # for your own model, change `model.path`, the lengths and the learning rate
    "collect.tasks": 16,
    "collect.group_size": 8,
    "sampling.max_tokens": 12,
    "data.max_prompt_length": 80,
    "train.precision": "fp32",
    "train.learning_rate": 2e-3,
    "threads": 1,
}


@etude.agent
async def solve(task: Task, llm: LLM) -> float:
    """Ask the model, execute its tool calls, and return 1 if its last message is the right answer."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        reply = await llm.async_client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return float(message.content == task["answer"])
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            table = task["shelves"] if call.function.name == "find" else task["numbers"]
            argument = next(iter(json.loads(call.function.arguments).values()), "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": table.get(argument, "?")})
    return 0.0


def main(directory: Path, steps: int) -> None:
    """Make the model and the tasks, train, and print the score."""
    warm_up(directory / "model", seed=0, advance=lambda: None)
    options = {"model.path": directory / "model", "steps": steps, **OPTIONS}
    trainer = etude.Trainer(etude.RL("grpo", options, directory / "run"))
    scores = trainer.fit(solve, make_rows(0, 1000, held_out=False), make_rows(0, 50, held_out=True))
    print(f"\nRight answers to held-out questions: {scores['eval/mean@1']:.0%}. Read some of the rollouts:")
    print(f"  etude answers {directory / 'run'}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/openai-sdk-agent"])[0]), int((sys.argv[2:] or ["12"])[0]))
