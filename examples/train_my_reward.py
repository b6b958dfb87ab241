"""Tasks and a reward of your own: `python examples/train_my_reward.py [DIRECTORY]`, half a minute on one core.

The tasks are lines of JSON, the reward is a function in this file, and the model is a tiny one with random weights, so
that nothing has to be downloaded. It learns to write digits that rise from the one it is asked for: `3 to:` wants
`3468`, or `379`. With a model of yours, what changes is `model.path`, the lengths and the learning rate.
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
    """What an answer earns: the sum of named parts, each of which is a metric too (`reward/starts`, `reward/rises`)."""
    rises = [a < b for a, b in pairwise(answer) if a.isdigit() and b.isdigit()]
    return {
        "starts": 2.0 * answer.startswith(str(task.fields["ground_truth"])),
        "rises": sum(rises) / max(len(answer) - 1, 1),
    }


def write_tasks(file: Path) -> None:
    """A prompt and the right answer in each line. The reward sees every other key of it too, in `task.fields`."""
    rows = [{"prompt": f"{digit} to:", "answer": str(digit)} for digit in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(directory: Path) -> None:
    """A Hugging Face directory like one that was downloaded: configuration, weights, tokenizer."""
    save(new_model(make_tokenizer(directory), seed=0), directory)


def main(directory: Path) -> None:
    """Make the model and the tasks, train, and say what came of it."""
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
    print(f"reward {steps[0]['reward']:.3f} → {steps[-1]['reward']:.3f}. Now ask it:")
    print(f'  etude generate {directory / "run"} "3 to:" -n 4')


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/my-reward"))
