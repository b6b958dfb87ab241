"""A game with pictures whose moves show parts of them: `python examples/picture_game.py [DIRECTORY] [STEPS]`.

The model sees a picture and names one of its four quarters. It then sees that quarter twice as large, and says how many
squares, or circles, are in it. A tiny vision-language model that can count a little learns to look where there is
something to count. `Zoom` is the environment: it shows a picture of Pillow.

    PYTHONPATH=examples etude train grpo … env.path=picture_game:Zoom reward=environment
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from etude.config.compose import compose
from etude.demo.counting_model import warm_up
from etude.demo.counting_task import PER_SIDE, SIDE, puzzles
from etude.envs import Observation, read_image
from etude.images.addresses import to_data_url
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import train
from etude.records import Message, Task

HALF = SIDE // 2


class Zoom:
    """Name a quarter of a picture, and count the shapes in it."""

    def reset(self, task: Task) -> Observation:
        """Show the task's prompt, which has the picture."""
        self.task = task
        self.quarter = -1
        return Observation()

    def step(self, answer: Message) -> Observation:
        """Show the quarter that the first answer names; judge the second."""
        said = str(answer.content)
        if self.quarter >= 0:
            return Observation(done=True, reward=float(said == str(self.task["counts"][self.quarter])))
        if said not in ("1", "2", "3", "4"):
            return Observation(done=True, reward=0.0)
        self.quarter = int(said) - 1
        row, column = divmod(self.quarter, 2)
        box = (HALF * column, HALF * row, HALF * (column + 1), HALF * (row + 1))
        part = read_image(self.task["images"][0]).crop(box).resize((SIDE, SIDE))
        return Observation([part, self.task["question"]])


def write_tasks(path: Path, count: int) -> None:
    """Write pictures with the number of shapes in each quarter. A quarter without any has no right answer."""
    lines = []
    for puzzle in islice(puzzles(0, held_out=False), count):
        counts = [0, 0, 0, 0]
        for shape in puzzle.shapes:
            counts[2 * (2 * shape.row // PER_SIDE) + 2 * shape.column // PER_SIDE] += shape.kind == puzzle.question
        prompt = [{"role": "user", "content": f"<image>{puzzle.question}"}]
        images = [to_data_url(puzzle.picture, "image/png")]
        lines.append(json.dumps({"prompt": prompt, "images": images, "question": puzzle.question, "counts": counts}))
    path.write_text("\n".join(lines))


def main(directory: Path, steps: int) -> None:
    """Make the model and the tasks, train, and print the reward."""
    print("Making a tiny model, and warming it up for some minutes.", flush=True)
    warm_up(directory / "model", seed=0, advance=lambda: None)
    write_tasks(directory / "tasks.jsonl", 1000)
    run = compose(
        Run,
        [
            f"model.path='{directory / 'model'}'",
            f"data.train=['{directory / 'tasks.jsonl'}']",
            "data.max_prompt_length=24",
            f"env.path='{Path(__file__).resolve()}:Zoom'",
            "env.max_turns=2",
            "reward=environment",
            "vision.train=true",
            "sampling.max_tokens=1",  # an answer is one token and always cut off, so `truncated` means nothing here
            "collect.tasks=16",
            "collect.group_size=8",
            "train.precision=fp32",
            "train.learning_rate=5e-4",
            f"steps={steps}",
            "threads=1",
            f"directory='{directory / 'run'}'",
        ],
    )
    train(run)
    metrics = read_metrics(directory / "run")
    print(f"reward {metrics[0]['reward']:.3f} → {metrics[-1]['reward']:.3f}. Look at the rollouts:")
    print(f"  etude view {directory / 'run'}")


if __name__ == "__main__":
    main(Path((sys.argv[1:] or ["runs/picture-game"])[0]), int((sys.argv[2:] or ["40"])[0]))
