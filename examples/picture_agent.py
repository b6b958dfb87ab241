"""Train an unchanged agent on tasks with pictures: `python examples/picture_agent.py [DIRECTORY] [STEPS]`.

The question is the number of squares, or circles, in a picture. The agent sends the task's messages as they are: each
picture in them is a data URL, which clients of every vision-language model take. The tiny model has seen right counts
and guesses, and learns to count better. `solve` contains no code for training.
"""

from __future__ import annotations

import sys
from pathlib import Path

import etude
from etude.agents import LLM
from etude.demo.counting_model import warm_up
from etude.demo.counting_task import make_rows
from etude.records import Task

OPTIONS = {  # for your own model, change `model.path`, the lengths and the learning rate
    "collect.tasks": 32,
    "collect.group_size": 8,
    "sampling.max_tokens": 1,
    "data.max_prompt_length": 24,
    "vision.train": True,
    "train.precision": "fp32",
    "train.learning_rate": 5e-4,
    "threads": 1,
}


@etude.agent
async def solve(task: Task, llm: LLM) -> float:
    """Show the model the picture and the question, and return 1 if it says the right number."""
    reply = await llm.async_client.chat.completions.create(model=llm.model, messages=task["prompt"])
    return float(reply.choices[0].message.content == task["ground_truth"])


def main(directory: Path, steps: int) -> None:
    """Make the model and the tasks, train, and print the score."""
    print("Making a tiny model, and warming it up for some minutes.", flush=True)
    warm_up(directory / "model", seed=0, advance=lambda: None)
    options = {"model.path": directory / "model", "steps": steps, **OPTIONS}
    trainer = etude.Trainer(etude.RL("grpo", options, directory / "run"))
    rows, held_out = make_rows(0, 1000, held_out=False), make_rows(0, 50, held_out=True)
    scores = trainer.fit(solve, rows, held_out)
    print(f"\nRight answers to held-out questions: {scores['eval/mean@1']:.0%}. Look at some of the rollouts:")
    print(f"  etude view {directory / 'run'}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/picture-agent"])[0]), int((sys.argv[2:] or ["20"])[0]))
