"""An agent written for OpenAI's client, trained as it is: `python examples/openai_sdk_agent.py [DIRECTORY] [STEPS]`.

It is asked how many of a thing there are in a storeroom, and lets the model call two functions: one knows the shelf on
which a thing lies, the other how many lie on a shelf. The model is a tiny one that has seen functions being called and
mostly guesses; in a minute or two it learns to ask, because that pays. Nothing in `solve` knows that it is trained.
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

OPTIONS = {  # with a model of yours, what changes is `model.path`, the lengths and the learning rate
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
    """Ask; call what the model wants called; see whether it knows in the end."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        told = await llm.async_client.chat.completions.create(model=llm.model, messages=messages, tools=TOOLS)
        said = told.choices[0].message
        if not said.tool_calls:
            return float(said.content == task["answer"])
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            table = task["shelves"] if call.function.name == "find" else task["numbers"]
            asked = next(iter(json.loads(call.function.arguments).values()), "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": table.get(asked, "?")})
    return 0.0


def main(directory: Path, steps: int) -> None:
    """Make the model and the tasks, train, and say what came of it."""
    warm_up(directory / "model", seed=0, advance=lambda: None)
    options = {"model.path": directory / "model", "steps": steps, **OPTIONS}
    trainer = etude.Trainer(etude.RL("grpo", options, directory / "run"))
    told = trainer.fit(solve, make_rows(0, 1000, held_out=False), make_rows(0, 50, held_out=True))
    print(f"\nRight answers to held-out questions: {told['eval/mean@1']:.0%}. Read some of the rollouts:")
    print(f"  etude answers {directory / 'run'}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/openai-sdk-agent"])[0]), int((sys.argv[2:] or ["12"])[0]))
