"""The demonstration of vision-language models: its pictures, its model, and a run that learns to count."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.batch import Batch
from etude.chat import Tokenizer
from etude.cli import main
from etude.demo import counting_model, vision
from etude.demo.counting_task import CIRCLES, SIDE, SQUARES, make_rows, puzzles
from etude.images.decoding import open_image
from etude.models import load
from etude.store import open_store


def test_a_picture_has_the_shapes_that_its_question_counts() -> None:
    found = list(islice(puzzles(0, held_out=False), 200))
    for puzzle in found:
        kinds = [shape.kind for shape in puzzle.shapes]
        assert kinds.count(puzzle.question) == puzzle.answer and {SQUARES, CIRCLES} == set(kinds)
        picture = open_image(puzzle.picture)
        background = sum(count for count, colour in picture.getcolors() or [] if colour == (255, 255, 255))
        squares = kinds.count(SQUARES)
        circle = (SIDE * SIDE - background - 49 * squares) / kinds.count(CIRCLES)
        assert picture.size == (SIDE, SIDE) and 30 < circle < 45, "a square covers 49 pixels, a circle fewer"
    assert {puzzle.answer for puzzle in found} == {1, 2, 3, 4}


def test_held_out_pictures_are_not_in_the_training_data() -> None:
    train, held_out = (list(make_rows(0, 200, held_out=held)) for held in (False, True))
    assert not {str(row["images"]) for row in train} & {str(row["images"]) for row in held_out}
    assert train == list(make_rows(0, 200, held_out=False)) != list(make_rows(1, 200, held_out=False))


def test_the_warm_up_writes_a_model_that_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demonstration shows a picture by 16 tokens, and its answer is a number."""
    monkeypatch.setattr(counting_model, "STEPS", 21)
    monkeypatch.setattr(counting_model, "BATCH", 16)
    steps: list[None] = []
    counting_model.warm_up(tmp_path, 0, lambda: steps.append(None))
    model = load(tmp_path, dtype=torch.float32)
    tokenizer = counting_model.make_tokenizer(tmp_path)
    batch = next(counting_model.demonstrations(tmp_path, tokenizer, 0))
    assert len(steps) == 21 and model.has_vision and tokenizer.vocab_size == 12
    assert _row(batch, tokenizer) == ["<|vision_start|>", *["<|image_pad|>"] * 16, "<|vision_end|>", "squares?"]
    assert batch.image is not None and int((batch.image == 0).sum()) == 16 and len(batch.images) == 16
    answers = {tokenizer.decode([id]) for id in batch.ids[batch.action].tolist()[::2]}
    assert answers == {"1", "2", "3", "4"}


def demonstrated(words: list[str], directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Return the demonstration's JSON report, and all its output."""
    threads = torch.get_num_threads()
    try:
        assert main(["demo", "vision", *words, f"directory={directory}", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    report: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return report, printed


@pytest.mark.slow
def test_its_turns_show_pictures_and_it_prints_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting_model, "STEPS", 21)
    monkeypatch.setattr(counting_model, "BATCH", 8)
    monkeypatch.setattr(vision, "COUNTS", {"train": 16, "held_out": 5})
    words = ["steps=1", "collect.tasks=2", "collect.group_size=2"]
    report, printed = demonstrated(words, tmp_path / "run", capsys)
    for text in ("■", "●", "squares?", "right answer", "held-out accuracy, greedy", "Try next:"):
        assert text in printed
    assert report["rl_steps"] == 1 and (tmp_path / "run" / "plot.png").exists()
    store = open_store(tmp_path / "run" / "journal.sqlite", read_only=True)
    ((span,),) = (turn.images for turn in store.turns(0))
    assert span.stop - span.start == 16 and store.images([span.digest])[span.digest].media_type == "image/png"
    store.close()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["mismatch/largest_gap"] < 1e-5, "sampler and trainer see the same picture"


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_to_count(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = demonstrated([f"seed={seed}"], tmp_path / "run", capsys)
    assert 0.35 < report["accuracy_before"] < 0.7 and report["accuracy_after"] > 0.75


def _row(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of the first prompt."""
    prompt = batch.ids[: int(batch.offsets[1])][~batch.action[: int(batch.offsets[1])]]
    return [tokenizer.decode([id], keep_special_tokens=True) for id in prompt.tolist()]
