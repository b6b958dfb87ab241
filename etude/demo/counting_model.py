"""The vision demo's model: its tokenizer, its random weights, and its warm-up on a teacher that often guesses.

The model is a Qwen3-VL of two layers of each kind, with the words of its task. Half of the teacher's answers are the
right count, and the others are any of the four numbers. The number of warm-up steps is fixed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from etude.batch import Batch
from etude.chat import ChatConfig, Tokenizer
from etude.demo.counting_task import MOST, QUESTIONS, SIDE, Puzzle, puzzles
from etude.demo.sorting_model import END, PAD, imitate, write_tokenizer
from etude.images import ImageRef, image_digest
from etude.images.pixel_cache import PixelCache
from etude.models import Model, create, save, tiny_vision_config
from etude.records import ContentPart, Message, Rollout, Sample
from etude.train import TrainConfig
from etude.train.optim import PRECISIONS

BEFORE = "<|vision_start|>"
IMAGE = "<|image_pad|>"
AFTER = "<|vision_end|>"
VIDEO = "<|video_pad|>"
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.content is string -%}{{ m.content }}{%- else -%}"
    "{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- if m.role == 'assistant' -%}<end>{%- endif -%}{%- endfor -%}"
)
PATCH = 4
"""The side of a patch in pixels. Four patches are one image token, so a picture has 16."""
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "context": 64}
HEAD_DIM = 16
INITIALIZER_RANGE = 0.1
"""The standard deviation of the first weights. With the 0.02 of large models, so small a model learns to count much
later."""
STEPS, BATCH = 300, 64
TEACHER_KNOWS = 0.5
"""The share of answers in which the teacher counts; else it guesses."""
TRAINING = TrainConfig(precision="fp32", learning_rate=3e-3, lr_scheduler="linear", warmup_steps=20, betas=(0.9, 0.95))


def make_tokenizer(directory: Path) -> Tokenizer:
    """Write a tokenizer of the task's words, with a chat template and the settings of the image processor."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    numbers = [str(number) for number in range(1, MOST + 1)]
    return write_tokenizer(directory, (PAD, END, BEFORE, IMAGE, AFTER, VIDEO), numbers, QUESTIONS)


def warm_up(directory: Path, seed: int, advance: Callable[[], None], *, head_dim: int = HEAD_DIM) -> None:
    """Train a new model on the teacher's answers for `STEPS` steps, and write it; `advance` is called after each
    step."""
    model, tokenizer = _new_model(directory, seed, head_dim)
    batches = islice(demonstrations(directory, tokenizer, seed), STEPS)
    imitate(model, TRAINING, batches, advance, steps=STEPS, pixels=PixelCache.load(directory))
    save(model, directory)


def make_tiny_vision_model(directory: Path, seed: int = 0) -> Path:
    """Write a model with random weights, and return its directory. It runs the task, and has learned nothing."""
    model, _ = _new_model(directory, seed, HEAD_DIM)
    save(model, directory)
    return directory


def _new_model(directory: Path, seed: int, head_dim: int) -> tuple[Model, Tokenizer]:
    """Return a model with random weights, whose tokenizer and configuration are written."""
    tokenizer = make_tokenizer(directory)
    words = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEFORE,
        "vision_end_token_id": AFTER,
    }
    image_ids = {name: int(tokenizer.encode(word)[0]) for name, word in words.items()}
    config = tiny_vision_config(
        tokenizer.vocab_size,
        head_dim=head_dim,
        patch=PATCH,
        initializer_range=INITIALIZER_RANGE,
        **image_ids,
        **SIZES,
    )
    model = create(config, seed=seed, dtype=PRECISIONS[TRAINING.precision])
    config.save_pretrained(directory)
    return model, tokenizer


def demonstrations(directory: Path, tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Iterate over batches of the teacher's answers, to new puzzles."""
    chat = ChatConfig().build_renderer(tokenizer, directory)
    generator = random.Random(seed)
    source = puzzles(seed, held_out=False)
    while True:
        chosen = list(islice(source, BATCH))
        digests = [image_digest(puzzle.picture) for puzzle in chosen]
        rows = []
        for index, (puzzle, digest) in enumerate(zip(chosen, digests, strict=True)):
            prompt = chat.render([_message(puzzle, digest)])
            ids = np.concatenate([prompt.ids, tokenizer.encode(f"{_teacher_answer(puzzle, generator)}{END}")])
            action = np.arange(len(ids)) >= len(prompt.ids)
            zeros = np.zeros(len(ids), np.int32)
            rows.append(Sample(ids, action, zeros.astype(np.float32), zeros, zeros, index, images=prompt.images))
        contents = dict(zip(digests, (puzzle.picture for puzzle in chosen), strict=True))
        yield Batch.from_records(rows, [Rollout(i, i, i, 0.0) for i in range(BATCH)], images=contents)


def _message(puzzle: Puzzle, digest: str) -> Message:
    picture = ContentPart("image", image=ImageRef(digest, SIDE, SIDE))
    return Message("user", (picture, ContentPart("text", text=puzzle.question)))


def _teacher_answer(puzzle: Puzzle, generator: random.Random) -> int:
    return puzzle.answer if generator.random() < TEACHER_KNOWS else generator.randint(1, MOST)
