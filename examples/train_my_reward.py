"""Tasks and a reward of your own: `python examples/train_my_reward.py [DIRECTORY]`, half a minute on one core.

The tasks are lines of JSON, and the reward is a function in this file. The model is tiny and has random weights, so
nothing is downloaded. It learns to write digits that rise from the digit of the prompt: `3 to:` wants `3468`, or `379`.
For your own model, change `model.path`, the lengths and the learning rate.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

from etude.config.compose import compose
from etude.demo.sorting_model import make_tokenizer, new_model
from etude.models import save
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import train
from etude.records import Task


def score(task: Task, answer: str) -> dict[str, float]:
    """Return the parts of the reward, which are added; each is also a metric (`reward/starts`, `reward/rises`)."""
    rises = [a < b for a, b in pairwise(answer) if a.isdigit() and b.isdigit()]
    return {
        "starts": 2.0 * answer.startswith(str(task.fields["ground_truth"])),
        "rises": sum(rises) / max(len(answer) - 1, 1),
    }


def write_tasks(file: Path) -> None:
    """Write a prompt and the right answer in each line. The reward gets every other key too, in `task.fields`."""
    rows = [{"prompt": f"{digit} to:", "answer": str(digit)} for digit in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(directory: Path) -> None:
    """Write a Hugging Face directory, as after a download: configuration, weights, tokenizer."""
    save(new_model(make_tokenizer(directory), seed=0), directory)


def main(directory: Path) -> None:
    """Make the model and the tasks, train, and print the reward."""
    make_model(directory / "model")
    write_tasks(directory / "tasks.jsonl")
    run = compose(
        Run,
        [
            f"model.path='{directory / 'model'}'",
            f"data.train=['{directory / 'tasks.jsonl'}']",
            "data.max_prompt_length=16",
            "reward=function",
            f"reward.path='{Path(__file__).resolve()}:score'",
            "sampling.max_tokens=6",
            "collect.tasks=9",
            "collect.group_size=16",
            "train.precision=fp32",
            "train.learning_rate=4e-3",
            "steps=40",
            "threads=1",
            f"directory='{directory / 'run'}'",
        ],
    )
    train(run)
    steps = read_metrics(directory / "run")
    print(f"reward {steps[0]['reward']:.3f} → {steps[-1]['reward']:.3f}. Now ask the model:")
    print(f'  etude generate {directory / "run"} "3 to:" -n 4')


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/my-reward"))
