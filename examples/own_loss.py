"""Train with a loss of your own: `python examples/own_loss.py [DIRECTORY]`, seconds on one core.

A loss is a class with its options as fields. `module:Name` chooses it by name, and it is checked like the built-in
losses. The quickest test is the tabular problem of `etude demo algorithms`. Its best policy is known exactly, and
training takes a second. This file must be on PYTHONPATH:

    PYTHONPATH=examples etude demo algorithms loss=own_loss:Fading loss.width=0.5
    PYTHONPATH=examples etude train grpo … loss=own_loss:Fading
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import Field
from torch import Tensor

from etude.algorithms import PolicyLoss, View
from etude.config.compose import compose
from etude.demo.sorting_model import make_tokenizer, new_model
from etude.models import save
from etude.observe import Mean, Metrics
from etude.recipes.run.config import Run
from etude.recipes.run.directory import read_metrics
from etude.recipes.run.loop import train


class Fading(PolicyLoss):
    """−A·w·tanh(log r / w), r = π_θ / π_old: PPO clips a token at an edge, this loss slows it down before the edge.

    At r = 1 the gradient is that of REINFORCE. It has fallen to 42 % at |log r| = w.
    """

    width: float = Field(0.2, gt=0, description="the log-ratio at which a token's gradient has lost more than half")

    def per_token_loss(self, view: View) -> tuple[Tensor, Metrics]:
        """Return the loss of each action token, and metrics; weights, masks and denominators are applied later."""
        bent = ((view.logp - view.column("old_logp")) / self.width).tanh()
        pace = 1 - bent.detach().square()
        return -view.column("advantage") * self.width * bent, Metrics({"pace": Mean.over(pace.sum(), len(pace))})


def main(directory: Path) -> None:
    """Train a tiny model to write sevens, with four optimizer steps a batch: from the second on, r differs from 1."""
    model, tasks = directory / "model", directory / "tasks.jsonl"
    save(new_model(make_tokenizer(model), seed=0), model)
    tasks.write_text('{"prompt": "sort:", "answer": "7"}\n')
    run = compose(
        Run,
        [
            "loss=own_loss:Fading",
            "loss.width=0.5",
            f"model.path='{model}'",
            f"data.train=['{tasks}']",
            "data.max_prompt_length=16",
            "sampling.max_tokens=2",
            "collect.tasks=1",
            "collect.group_size=64",
            "mini_batches=4",
            "train.precision=fp32",
            "train.learning_rate=2e-3",
            "steps=10",
            "threads=1",
            f"directory='{directory / 'run'}'",
        ],
    )
    train(run)
    first, *_, last = read_metrics(directory / "run")
    print(f"reward {first['reward']:.3f} → {last['reward']:.3f}; pace {first['pace']:.3f} → {last['pace']:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own-loss"))
