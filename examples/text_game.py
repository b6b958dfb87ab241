"""A text game with Gymnasium's interface: `python examples/text_game.py [DIRECTORY]`, half a minute on one core.

The model sees a range, names a digit, and sees the remaining range: `0 to 3:`, then `2 to 3:` after a 1. It starts with
random weights, and learns to name digits within the range. `Game` wraps any Gymnasium environment whose observations
and actions are text: replace `Range()` by `gymnasium.make(…)`.

    PYTHONPATH=examples etude train grpo … env.path=text_game:Game env.kwargs.turns=3 reward=environment
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from etude.config.compose import compose
from etude.demo.sorting_model import make_tokenizer, new_model
from etude.envs import Observation
from etude.models import save
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import train
from etude.records import Message, Task


class Range:
    """Find a digit: an environment with Gymnasium's interface, in which `reset` and `step` return tuples."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Return the first observation, and the info."""
        self.secret, self.low, self.high = random.Random(seed).randint(0, 3), 0, 3
        return self._text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Return observation, reward, terminated, truncated and info."""
        if not action.isdigit() or not self.low <= int(action) <= self.high:
            return "", 0.0, True, False, {}
        if int(action) == self.secret:
            return "", 1.0, True, False, {}
        self.low, self.high = (int(action) + 1, self.high) if int(action) < self.secret else (self.low, int(action) - 1)
        return self._text(), 0.0, False, False, {}

    def close(self) -> None:
        """There is nothing to release."""

    def _text(self) -> str:
        return f"{self.low} to {self.high}:"


class Game:
    """An adapter from a Gymnasium environment to one of Etude."""

    def __init__(self, turns: int = 3) -> None:
        self.env, self.left = Range(), turns

    def reset(self, task: Task) -> Observation:
        """Start the game of the task's seed: the same game for all rollouts of the task."""
        text, _ = self.env.reset(seed=int(str(task.fields["seed"])))
        return Observation(text)

    def step(self, answer: Message) -> Observation:
        """Take the answer as an action, and return what the model sees next."""
        self.left -= 1
        text, reward, done, truncated, _ = self.env.step(str(answer.content))
        return Observation(text, reward=reward, done=done, truncated=truncated or (self.left == 0 and not done))

    def close(self) -> None:
        """Release the environment; called when the rollout has ended."""
        self.env.close()


def main(directory: Path) -> None:
    """Make the model and the tasks, train, and print the reward."""
    save(new_model(make_tokenizer(directory / "model"), seed=0), directory / "model")
    rows = [{"prompt": "find it:", "seed": seed} for seed in range(1000)]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = compose(
        Run,
        [
            f"model.path='{directory / 'model'}'",
            f"data.train=['{directory / 'tasks.jsonl'}']",
            "data.max_prompt_length=24",
            f"env.path='{Path(__file__).resolve()}:Game'",
            "env.kwargs.turns=3",
            "reward=environment",
            "advantage=turn_baseline",
            "sampling.max_tokens=1",  # an answer is one token and always cut off, so `truncated` means nothing here
            "collect.tasks=16",
            "collect.group_size=8",
            "train.precision=fp32",
            "train.learning_rate=4e-3",
            "steps=16",
            "threads=1",
            f"directory='{directory / 'run'}'",
        ],
    )
    train(run)
    steps = read_metrics(directory / "run")
    print(f"reward {steps[0]['reward']:.3f} → {steps[-1]['reward']:.3f}. Look at the rollouts:")
    print(f"  etude answers {directory / 'run'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/text-game"))
