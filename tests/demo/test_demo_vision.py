"""The demonstration of vision-language models: its pictures, its model, and a run that learns to count."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from etude.batch import Batch
from etude.chat import Tokenizer
from etude.demo import counting_model
from etude.demo.counting_task import CIRCLES, SIDE, SQUARES, make_rows, puzzles
from etude.images.decoding import open_image
from etude.models import load


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


def _row(batch: Batch, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of the first prompt."""
    prompt = batch.ids[: int(batch.offsets[1])][~batch.action[: int(batch.offsets[1])]]
    return [tokenizer.decode([id], keep_special_tokens=True) for id in prompt.tolist()]
