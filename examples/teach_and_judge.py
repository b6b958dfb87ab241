"""Demonstrations, preferences, then reinforcement: `python examples/teach_and_judge.py [DIRECTORY]`, a minute.

A model with random weights is shown how digits are put in order, now rightly and now the wrong way round. Another one
learns from pairs which of the two is preferred. By its score the first one is then improved, without being told what is
right, and held to what it was by a KL: without one it soon finds answers that the judge never saw, and likes. With
models of yours, what changes is `model.path`, the lengths and the learning rates; the files are lines of JSON like
those that are written here.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from etude.cli import main as etude
from etude.demo.sorting_model import make_tokenizer, new_model
from etude.models import save

SHARED = ["train.precision=fp32", "threads=1", "observe.every=10"]


def write_examples(directory: Path, seed: int = 0) -> None:
    """What each of the three learns from: what is shown, what is preferred, what is only asked; and what is asked in
    the end, with the right answers."""
    chance = random.Random(seed)
    numbers = [f"{number:03}" for number in chance.sample(range(1000), 800)]
    asked = [{"prompt": f"sort {number}:"} for number in numbers]
    right = ["".join(sorted(number)) for number in numbers]
    shown = [{**one, "completion": each[:: chance.choice([1, -1])]} for one, each in zip(asked, right, strict=True)]
    pairs = [
        {**one, "chosen": each, "rejected": _worse(each, chance)}
        for one, each in zip(asked[:600], right, strict=False)
        for _ in range(4)
    ]
    exam = [{**one, "answer": each} for one, each in zip(asked, right, strict=True)]
    _write(directory / "shown.jsonl", shown[:600])
    _write(directory / "pairs.jsonl", [pair for pair in pairs if pair["chosen"] != pair["rejected"]])
    _write(directory / "tasks.jsonl", asked[:600])
    _write(directory / "exam.jsonl", exam[600:])


def _worse(right: str, chance: random.Random) -> str:
    """The wrong way round, or with digits that were never asked for: a judge knows of no mistake that it never saw."""
    mixed = list(right)
    for place in chance.sample(range(3), chance.randrange(3)):
        mixed[place] = chance.choice("0123456789")
    chance.shuffle(mixed)
    return "".join(mixed)


def _write(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(command: str, *options: str) -> None:
    """The command line, as a shell would call it."""
    done = etude([*command.split(), *options])
    if done:
        raise SystemExit(done)


def main(directory: Path) -> None:
    """Make a model and the files, and go the whole way."""
    save(new_model(make_tokenizer(directory / "beginner"), seed=0), directory / "beginner")
    write_examples(directory)
    given = [*SHARED, f"model.path='{directory / 'beginner'}'", "batch_size=64"]
    shown, pairs, tasks = (f"data.train=['{directory / f'{name}.jsonl'}']" for name in ("shown", "pairs", "tasks"))
    run("sft", *given, shown, "steps=300", "train.learning_rate=3e-3", f"directory='{directory / 'taught'}'")
    run("reward-model", *given, pairs, "steps=200", "train.learning_rate=2e-3", f"directory='{directory / 'judging'}'")
    for name in ("taught", "judging"):
        run("export", str(directory / name), str(directory / f"{name}-model"))
    run(
        "train grpo",
        *(*SHARED, tasks, f"model.path='{directory / 'taught-model'}'", "reward=reward_model", "reward.precision=fp32"),
        *(f"reward.path='{directory / 'judging-model'}'", "data.max_prompt_length=12", "sampling.max_tokens=5"),
        *(
            "collect.tasks=12",
            "collect.group_size=8",
            "train.learning_rate=3e-4",
            "steps=60",
            "kl=reverse",
            "kl.coefficient=0.05",
        ),
        f"directory='{directory / 'run'}'",
    )
    exam = [
        f"data.val=['{directory / 'exam.jsonl'}']",
        "data.max_prompt_length=12",
        "sampling.max_tokens=5",
        "reward=exact_match",
    ]
    for name in ("taught", "run"):
        run("eval", str(directory / name), *exam)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/taught-and-judged"))
