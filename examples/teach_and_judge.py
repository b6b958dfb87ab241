"""SFT, a reward model, then GRPO with its score: `python examples/teach_and_judge.py [DIRECTORY]`, a minute.

A model with random weights imitates demonstrations of sorting digits, half of them in the wrong order. A second model
learns from pairs which order is preferred. Its score then improves the first model, which never sees right answers. A
KL term holds the policy near its start. Without it, the policy soon finds answers that the reward model never saw and
scores high. For your own models, change `model.path`, the lengths and the learning rates. The data files are lines of
JSON like those written here.
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
    """Write demonstrations, preference pairs, prompts without answers, and held-out prompts with right answers."""
    chance = random.Random(seed)
    numbers = [f"{number:03}" for number in chance.sample(range(1000), 800)]
    prompts = [{"prompt": f"sort {number}:"} for number in numbers]
    right = ["".join(sorted(number)) for number in numbers]
    rows = list(zip(prompts, right, strict=True))
    demonstrations = [{**prompt, "completion": answer[:: chance.choice([1, -1])]} for prompt, answer in rows]
    pairs = [
        {**prompt, "chosen": answer, "rejected": _worse(answer, chance)}
        for prompt, answer in rows[:600]
        for _ in range(4)
    ]
    exam = [{**prompt, "answer": answer} for prompt, answer in rows]
    _write(directory / "demonstrations.jsonl", demonstrations[:600])
    _write(directory / "pairs.jsonl", [pair for pair in pairs if pair["chosen"] != pair["rejected"]])
    _write(directory / "tasks.jsonl", prompts[:600])
    _write(directory / "exam.jsonl", exam[600:])


def _worse(right: str, chance: random.Random) -> str:
    """Return the digits in another order, some of them replaced: a reward model knows only mistakes that it saw."""
    mixed = list(right)
    for place in chance.sample(range(3), chance.randrange(3)):
        mixed[place] = chance.choice("0123456789")
    chance.shuffle(mixed)
    return "".join(mixed)


def _write(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(command: str, *options: str) -> None:
    """Run the command line, as a shell would."""
    status = etude([*command.split(), *options])
    if status:
        raise SystemExit(status)


def main(directory: Path) -> None:
    """Make a model and the files, run SFT, the reward model and GRPO, and evaluate before and after GRPO."""
    save(new_model(make_tokenizer(directory / "untrained"), seed=0), directory / "untrained")
    write_examples(directory)
    common = [*SHARED, f"model.path='{directory / 'untrained'}'", "batch_size=64"]
    files = ("demonstrations", "pairs", "tasks")
    demonstrations, pairs, tasks = (f"data.train=['{directory / f'{name}.jsonl'}']" for name in files)
    run("sft", *common, demonstrations, "steps=300", "train.learning_rate=3e-3", f"directory='{directory / 'taught'}'")
    run("reward-model", *common, pairs, "steps=200", "train.learning_rate=2e-3", f"directory='{directory / 'judging'}'")
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
