"""Train a program as an agent, here in bash: `python examples/command_agent/train.py [DIRECTORY] [STEPS]`, two minutes.

Each attempt runs `agent.sh` once, with the task on its standard input, and the model's address and key in its
environment. The tiny model has seen tool calls and mostly guesses. It learns to call the tools.
"""

from __future__ import annotations

import sys
from pathlib import Path

import etude
from etude.demo.storeroom_agent import make_rows
from etude.demo.storeroom_model import warm_up

OPTIONS = {  # for your own model, change `model.path`, the lengths and the learning rate
    "collect.tasks": 8,
    "collect.group_size": 8,
    "sampling.max_tokens": 12,
    "data.max_prompt_length": 80,
    "train.precision": "fp32",
    "train.learning_rate": 2e-3,
    "threads": 1,
}
AGENT = etude.command(["bash", str(Path(__file__).resolve().with_name("agent.sh"))], timeout_s=60)


def main(directory: Path, steps: int) -> None:
    """Make the model and the tasks, try the agent on one task, train, and print the score."""
    warm_up(directory / "model", seed=0, advance=lambda: None)
    options = {"model.path": directory / "model", "steps": steps, **OPTIONS}
    trainer = etude.Trainer(etude.RL("grpo", options, directory / "run"), n_runners=2)
    train, held_out = make_rows(0, 1000, held_out=False), make_rows(0, 25, held_out=True)
    trainer.dev(AGENT, train, count=1)
    scores = trainer.fit(AGENT, train, held_out)
    print(f"\nRight answers to held-out questions: {scores['eval/mean@1']:.0%}. Read some of the rollouts:")
    print(f"  etude answers {directory / 'run'}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/command-agent"])[0]), int((sys.argv[2:] or ["16"])[0]))
