"""A text game with Gymnasium's interface: `python examples/text_game.py [DIRECTORY]`, half a minute on one core.

The model is shown a range, names a digit, and is shown the range that is left: `0 to 3:`, then `2 to 3:` after a 1. It
begins with random weights, and learns to name digits that may be right. `Game` takes any environment of Gymnasium whose
observations and actions are text: put `gymnasium.make(…)` where `Range()` stands.

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
    """Find a digit. An environment as Gymnasium has it: `reset` and `step` return tuples."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The first observation, and what else there is to know."""
        self.secret, self.low, self.high = random.Random(seed).randint(0, 3), 0, 3
        return self._told(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Observation, reward, whether it is over, whether it was cut off, and what else there is to know."""
        if not action.isdigit() or not self.low <= int(action) <= self.high:
            return "", 0.0, True, False, {}
        if int(action) == self.secret:
            return "", 1.0, True, False, {}
        self.low, self.high = (int(action) + 1, self.high) if int(action) < self.secret else (self.low, int(action) - 1)
        return self._told(), 0.0, False, False, {}

    def close(self) -> None:
        """Nothing is held."""

    def _told(self) -> str:
        return f"{self.low} to {self.high}:"


class Game:
    """An environment of Gymnasium, as one of Etude."""

    def __init__(self, turns: int = 3) -> None:
        self.env, self.left = Range(), turns

    def reset(self, task: Task) -> Observation:
        """The game that the task's seed begins: the same for all tries at it."""
        shown, _ = self.env.reset(seed=int(str(task.fields["seed"])))
        return Observation(shown)

    def step(self, answer: Message) -> Observation:
        """What comes of an answer."""
        self.left -= 1
        shown, reward, over, cut, _ = self.env.step(str(answer.content))
        return Observation(shown, reward=reward, done=over, truncated=cut or (self.left == 0 and not over))

    def close(self) -> None:
        """Called when the rollout has ended."""
        self.env.close()


def main(directory: Path) -> None:
    """Make the model and the tasks, train, and say what came of it."""
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
            "sampling.max_tokens=1",  # an answer is one token, and so is always cut off: `truncated` says nothing here
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
    print(f"reward {steps[0]['reward']:.3f} → {steps[-1]['reward']:.3f}. Look at what was said:")
    print(f"  etude answers {directory / 'run'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/text-game"))
