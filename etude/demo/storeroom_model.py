"""The agent demo's model: its tokenizer, its random weights, and its warm-up on a lazy teacher.

The teacher mostly guesses. Sometimes it finds the shelf and then guesses; otherwise it finds, counts and gives the
right number. A model that imitates it can do all three, and the reward tells which one is best. The number of warm-up
steps is fixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from etude.batch import Batch
from etude.chat import Tokenizer
from etude.demo.sorting_model import END, PAD, STEPS, imitate, write_tokenizer
from etude.demo.storeroom_agent import KINDS, NUMBERS, SHELVES, question
from etude.models import create, save, tiny_config
from etude.records import Rollout, Sample
from etude.train import TrainConfig
from etude.train.optim import PRECISIONS

__all__ = ["HEAD_DIM", "STEPS", "dialogue", "make_tokenizer", "warm_up"]

ROLES = ("<user>", "<model>", "<tool>")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FIND, COUNT = ('\n{"name": "find", "arguments": {"kind": "', '\n{"name": "count", "arguments": {"shelf": "')
AFTER = '"}}\n'
BEFORE_KIND, AFTER_KIND = question("|").split("|")
PIECES = (OPEN, CLOSE, FIND, COUNT, AFTER, BEFORE_KIND, AFTER_KIND, *KINDS)
"""The strings that are one token each, so that a tiny model can write a call."""
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<model>{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}"
    '<tool_call>\n{{ \'{\' }}"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}'
    "{{ '}' }}\n</tool_call>{%- endfor -%}"
    "{%- else -%}<{{ m.role }}>{{ m.content }}{%- endif -%}<end>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<model>{%- endif -%}"
)
SIZES: dict[str, Any] = {"layers": 1, "hidden": 48, "heads": 4, "kv_heads": 2, "intermediate": 96, "context": 96}
HEAD_DIM, INITIALIZER_RANGE = 16, 0.1
"""The size of a head, and the standard deviation of the first weights. With the 0.02 of large models, so small a model
may not learn within 600 steps to repeat a tool's result. RL cannot reward an answer that the model never samples."""
BATCH = 64
CALLS_BOTH, CALLS_ONE = 0.25, 0.25
"""The shares of dialogues in which the teacher makes both calls, and only the first call."""
TRAINING = TrainConfig(precision="fp32", learning_rate=1e-2, lr_scheduler="cosine", warmup_steps=20)


def make_tokenizer(directory: Path) -> Tokenizer:
    """Write a tokenizer of the storeroom's words with a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return write_tokenizer(directory, (PAD, END, *ROLES), (*SHELVES, *NUMBERS, "?"), PIECES)


def warm_up(directory: Path, seed: int, advance: Callable[[], None], *, head_dim: int = HEAD_DIM) -> None:
    """Train a new model on the teacher's dialogues for `STEPS` steps, and write it; `advance` is called after each
    step."""
    tokenizer = make_tokenizer(directory)
    config = tiny_config(tokenizer.vocab_size, head_dim=head_dim, initializer_range=INITIALIZER_RANGE, **SIZES)
    model = create(config, seed=seed, dtype=PRECISIONS[TRAINING.precision])
    imitate(model, TRAINING, islice(_demonstrations(tokenizer, seed), STEPS), advance)
    save(model, directory)


def _demonstrations(tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Iterate over batches of the teacher's dialogues, each in its own storeroom."""
    generator = random.Random(seed)
    while True:
        rows = [_row(tokenizer, _teacher_dialogue(generator), index) for index in range(BATCH)]
        yield Batch.from_records(rows, [Rollout(index, index, index, 0.0) for index in range(BATCH)])


def dialogue(kind: str, shelf: str, number: str, *, calls: int) -> list[tuple[str, bool]]:
    """Return a dialogue as texts, each with True if the model writes it. calls: the tool calls before the answer."""
    pieces = [(f"<user>{question(kind)}{END}<model>", False)]
    for call_start, argument, result in ((FIND, kind, shelf), (COUNT, shelf, number))[:calls]:
        pieces += [(f"{OPEN}{call_start}{argument}{AFTER}{CLOSE}{END}", True), (f"<tool>{result}{END}<model>", False)]
    return [*pieces, (f"{number}{END}", True)]


def _teacher_dialogue(generator: random.Random) -> list[tuple[str, bool]]:
    draw = generator.random()
    calls = 2 if draw < CALLS_BOTH else 1 if draw < CALLS_BOTH + CALLS_ONE else 0
    return dialogue(generator.choice(KINDS), generator.choice(SHELVES), generator.choice(NUMBERS), calls=calls)


def _row(tokenizer: Tokenizer, texts: list[tuple[str, bool]], rollout: int) -> Sample:
    pieces = [(tokenizer.encode(text), is_action) for text, is_action in texts]
    ids = np.concatenate([piece for piece, _ in pieces])
    action = np.concatenate([np.full(len(piece), is_action) for piece, is_action in pieces])
    zeros = np.zeros(len(ids), np.int32)
    return Sample(ids, action, zeros.astype(np.float32), zeros, zeros, rollout)
