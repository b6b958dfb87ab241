"""Supervised runs on examples with images: the answer depends on the picture, and every model of a run sees it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chat.conversations import by
from tests.data.test_example_images import url
from tests.recipes.runs import Captured, step_metrics
from tests.recipes.supervised_runs import began, learned, refusal, weights, write
from tests.vision_rows import png
from tests.vlms import make_vlm

FAMILY = "qwen3_vl"
PICTURES = {"two": (0, 40, 40), "six": (3, 40, 40)}
ASK = [by("user", "<image> How many?")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, and examples of two pictures with equal questions."""
    directory = tmp_path_factory.mktemp("pictures")
    (directory / "model").symlink_to(make_vlm(FAMILY))
    images = {answer: [url(png(picture))] for answer, picture in PICTURES.items()}
    told = [{"messages": [*ASK, by("assistant", answer)], "images": shown} for answer, shown in images.items()]
    write(directory / "told.jsonl", told * 4)
    others = dict(zip(PICTURES, reversed(PICTURES), strict=True))
    pairs = [
        {"prompt": ASK, "chosen": answer, "rejected": others[answer], "images": shown}
        for answer, shown in images.items()
    ]
    write(directory / "pairs.jsonl", pairs * 4)
    return directory


def options(world: Path, file: str, **changes: Any) -> dict[str, Any]:
    return {"data.train": f"[{world / file}]", "data.sampler": "sequential", "batch_size": 8} | changes


def test_a_model_learns_the_answer_to_each_picture(world: Path, tmp_path: Path) -> None:
    changes = options(
        world,
        "told.jsonl",
        steps=60,
        train__learning_rate=0.01,
        data__val=f"[{world / 'told.jsonl'}]",
        vision__train=True,
    )
    run = learned("sft", world, tmp_path / "run", **changes)
    last = step_metrics(run)[-1]
    blind = math.log(2) / 3  # of two answers as often, each of three tokens
    assert last["loss"] < blind / 4 and last["eval/loss"] < blind / 4
    first, then = began(run), weights(run)
    towers = [name for name in first if "visual" in name]
    assert towers and any(not torch.equal(first[name], then[name]) for name in towers)


def test_a_tower_stays_as_it_is_by_default_and_the_reference_sees_the_same_pictures(
    world: Path, tmp_path: Path
) -> None:
    run = learned("dpo", world, tmp_path / "run", **options(world, "pairs.jsonl", steps=2))
    losses = [step["loss"] for step in step_metrics(run)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6) and losses[1] < losses[0]
    first, then = began(run), weights(run)
    assert all(torch.equal(first[name], then[name]) for name in first if "visual" in name)


def test_a_teacher_sees_the_pictures(world: Path, tmp_path: Path) -> None:
    changes = options(world, "told.jsonl", steps=1, teacher__path=world / "model", teacher__top=350)
    run = learned("distill", world, tmp_path / "run", **changes)
    assert step_metrics(run)[0]["loss"] == pytest.approx(0, abs=1e-6)


def test_a_score_of_pictures_is_refused(world: Path, tmp_path: Path, capsys: Captured) -> None:
    message = refusal(capsys, "reward-model", world, tmp_path / "run", **options(world, "pairs.jsonl"))
    assert "a score of a vision-language model is not supported" in message
