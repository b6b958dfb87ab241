"""Each recipe that learns from examples beats a control with a learning rate of zero, on unseen problems.

The first model sorts in the wrong direction more often than not; the examples show the right one, or prefer it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.config.compose import compose
from etude.demo import sorting_task as digits
from etude.demo.sorting_model import make_tokenizer, new_model
from etude.models import save
from etude.recipes.registry import SUPERVISED
from etude.recipes.supervised.builder import train_supervised

TRAINED, HELD_OUT = 1000, 200


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `shown`, `pairs` and `tasks`, each with held-out ones."""
    directory = tmp_path_factory.mktemp("examples")
    for name, count, held_out in (("", TRAINED, False), ("held_out_", HELD_OUT, True)):
        rows = digits.make_rows(0, count, held_out=held_out)
        shown = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
        pairs = [{**one, "chosen": one["completion"], "rejected": one["completion"][::-1]} for one in shown]
        distinct = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
        for kind, lines in (("shown", shown), ("pairs", distinct), ("tasks", rows)):
            (directory / f"{name}{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def learned(
    recipe: str, examples: Path, model: Path, directory: Path, rate: float, **more: Any
) -> tuple[Mapping[str, float], Path]:
    """Return the metrics of a short run on held-out examples at its end, and its directory."""
    of_pairs = recipe in ("dpo", "reward-model")
    options = {
        "model.path": model,
        "data.train": f"[{examples / ('pairs.jsonl' if of_pairs else 'shown.jsonl')}]",
        "data.val": f"[{examples / ('held_out_pairs.jsonl' if of_pairs else 'held_out_shown.jsonl')}]",
        "train.precision": "fp32",
        "train.learning_rate": rate,
        "batch_size": 64,
        "steps": 30,
        "evaluate.first": "false",
        "threads": 1,
        "observe.console": "off",
        "observe.level": "error",
        "directory": directory,
    } | more
    train_supervised(compose(SUPERVISED[recipe], [f"{key}={value}" for key, value in options.items()]))
    last: dict[str, float] = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    return last, directory


def accuracy(run: Path, examples: Path, capsys: pytest.CaptureFixture[str]) -> float:
    """Return the share of held-out problems that the model of a run solves by greedy sampling."""
    capsys.readouterr()
    words = [f"data.val=[{examples / 'held_out_tasks.jsonl'}]", "reward=exact_match", "sampling.max_tokens=8"]
    assert (
        main(["eval", str(run), *words, "data.max_prompt_length=16", "evaluate.sampling.temperature=0", "--json"]) == 0
    )
    return float(json.loads(capsys.readouterr().out.splitlines()[-1])["eval/mean@1"])


def test_demonstrations_are_imitated(
    warmed: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after, run = learned("sft", examples, warmed, tmp_path / "run", 1e-3)
    before, control = learned("sft", examples, warmed, tmp_path / "control", 0.0, steps=2)
    assert after["eval/loss"] < 0.05 < 0.1 < before["eval/loss"], (before["eval/loss"], after["eval/loss"])
    assert accuracy(run, examples, capsys) > 0.9 > 0.3 > accuracy(control, examples, capsys)


def test_preferred_answers_become_likelier(
    warmed: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after, run = learned("dpo", examples, warmed, tmp_path / "run", 3e-4, steps=10)
    before, control = learned("dpo", examples, warmed, tmp_path / "control", 0.0, steps=2)
    assert before["eval/margin"] == 0 and before["eval/accuracy"] == 0, "the policy is its reference"
    assert after["eval/margin"] > 1 and after["eval/accuracy"] > 0.95, after
    assert accuracy(run, examples, capsys) > 0.4 > 0.25 > accuracy(control, examples, capsys)


def test_a_reward_model_learns_preferences(warmed: Path, examples: Path, tmp_path: Path) -> None:
    after, _ = learned("reward-model", examples, warmed, tmp_path / "run", 1e-3)
    before, _ = learned("reward-model", examples, warmed, tmp_path / "control", 0.0, steps=2)
    assert after["eval/accuracy"] > 0.95 and after["eval/loss"] < 0.1, after
    assert before["eval/accuracy"] <= 0.5 and before["eval/loss"] > 0.69


def test_a_student_nears_its_teacher(warmed: Path, examples: Path, tmp_path: Path) -> None:
    beginner = tmp_path / "beginner"
    save(new_model(make_tokenizer(beginner), seed=1), beginner)
    given = {"teacher.path": warmed, "teacher.top": 8, "steps": 40}
    after, _ = learned("distill", examples, beginner, tmp_path / "run", 3e-3, **given)
    before, _ = learned("distill", examples, beginner, tmp_path / "control", 0.0, **given | {"steps": 2})
    assert after["eval/loss"] < 0.2 * before["eval/loss"], (before["eval/loss"], after["eval/loss"])
