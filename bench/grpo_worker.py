"""One trainer of `bench.grpo_vs_trl`, in its own process: it makes a step for each line of its input.

    python -m bench.grpo_worker TRAINER SPECIFICATION

It runs under the trainer's own Python, possibly without Etude, so it imports nothing of it. The specification is a file
of the benchmark: model, tasks, sizes, precision, learning rates. The first output line has the versions. After that
each step prints `{"seconds": …, "reward": …}`, the time from the input line to the end of the step. Output of libraries
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

Specification = dict[str, Any]
PHASES = ("time/collect", "time/annotate", "time/estimate", "time/update", "time/publish")
"""Etude's phases of a step."""


class Pace:
    """Steps on demand, one by one."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._began = 0.0
        self._packages = packages
        self._ready = False

    def wait(self) -> None:
        """Wait for the next input line; end the process at the end of input."""
        if not self._ready:
            self._ready = True
            self._say({package: version(package) for package in self._packages})
        if not sys.stdin.readline():
            os._exit(0)
        self._began = time.perf_counter()

    def done(self, reward: float, **more: Any) -> None:
        """Print the time of the step and its reward."""
        self._say({"seconds": time.perf_counter() - self._began, "reward": reward} | more)

    def _say(self, what: dict[str, Any]) -> None:
        self._answers.write(json.dumps(what) + "\n")
        self._answers.flush()


def earned(answer: str) -> float:
    """Return the reward of an answer: the share of its words from the first half of the vocabulary."""
    words = answer.split()
    return sum(word.startswith("a") for word in words) / max(len(words), 1)


def etude(specification: Specification, pace: Pace) -> None:
    """Run the loop of `etude train`, with its journal and its metrics."""
    from etude.config.compose import compose
    from etude.recipes.run.builders.assemble import build
    from etude.recipes.run.config import Run
    from etude.recipes.run.loop import run_loop

    options = {
        "model.path": specification["model"],
        "data.train": f"[{specification['tasks']}]",
        "data.max_prompt_length": specification["prompt"] + 8,
        "reward": "function",
        "reward.path": f"{Path(__file__)}:judge",
        "sampling.max_tokens": specification["new"],
        "collect.tasks": specification["groups"],
        "collect.group_size": specification["group_size"],
        "loss.reduction": "token-mean",
        "train.precision": specification["precision"],
        "train.learning_rate": specification["learning_rate"],
        "rollout.max_num_seqs": specification["groups"] * specification["group_size"],
        "rollout.kv_gib": 2.0,
        "checkpoint.every": 1_000_000,
        "steps": 1_000_000,
        "observe.console": "off",
        "observe.level": "error",
        "directory": specification["directory"],
    } | specification.get("etude", {})
    with build(compose(Run, _written(options))) as parts:
        remaining, metrics = parts.checkpoint.remaining_steps, Path(specification["directory"]) / "metrics.jsonl"

        def paced() -> Iterator[int]:
            for step in remaining():
                if step > 1:
                    last_step = json.loads(metrics.read_text(encoding="utf-8").splitlines()[-1])
                    pace.done(last_step["reward"], phases={k: v for k, v in last_step.items() if k in PHASES})
                pace.wait()
                yield step

        parts.checkpoint.remaining_steps = paced  # type: ignore[method-assign]
        run_loop(parts)


def judge(task: Any, answer: str) -> float:  # noqa: ARG001
    """The reward with the signature of Etude."""
    return earned(answer)


def trl(specification: Specification, pace: Pace) -> None:
    """Run GRPOTrainer as in its documentation, without a reference and without a tracker."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    class Paced(TrainerCallback):  # type: ignore[misc]
        """Runs a step for each input line."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pace.wait()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "reward" in logs:
                pace.done(logs["reward"])

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [earned(completion) for completion in completions]

    rows = [json.loads(line) for line in Path(specification["tasks"]).read_text(encoding="utf-8").splitlines()]
    rollouts = specification["groups"] * specification["group_size"]
    config = GRPOConfig(
        output_dir=specification["directory"],
        use_cpu=not torch.cuda.is_available(),
        bf16=specification["precision"] == "bf16",
        per_device_train_batch_size=rollouts // specification["accumulate"],
        gradient_accumulation_steps=specification["accumulate"],
        num_generations=specification["group_size"],
        max_completion_length=specification["new"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        learning_rate=specification["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        max_steps=1_000_000,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(specification["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(specification["model"], padding_side="left"),
        reward_funcs=[reward],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Paced()],
    )
    trainer.train()


def _written(options: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]


TRAINERS: dict[str, tuple[Callable[[Specification, Pace], None], tuple[str, ...]]] = {
    "etude": (etude, ("torch", "transformers")),
    "trl": (trl, ("trl", "torch", "transformers", "accelerate")),
}
"""Each trainer, and the packages whose versions it prints."""


def main(name: str, specification: str) -> None:
    """Start the trainer, and make steps."""
    start, packages = TRAINERS[name]
    start(json.loads(Path(specification).read_text(encoding="utf-8")), Pace(packages))


if __name__ == "__main__":
    main(*sys.argv[1:])
