"""The environments of the learn tests: look a thing up instead of guessing it, and find a number by asking."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse

from etude.algorithms.losses.supervised import SFT
from etude.batch import Batch
from etude.chat import Tokenizer as Chats
from etude.envs import Observation, TextEnv
from etude.models import create, save, tiny_config
from etude.recipes.workers.policy_worker import LossObjective
from etude.records import Rollout, Sample, Task
from etude.train import Learner, TrainConfig

KEYS, DIGITS = "abcdefgh", "0123456789"
CALL = ("<tool_call>", '\n{"name": "look", "arguments": {"key": "', '"}}\n', "</tool_call>")
"""The pieces of a call, each one token, so that a tiny model can write one."""
ROLES = ("<user>", "<model>", "<tool>", "<end>")
TEMPLATE = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}<model>{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}"
    '<tool_call>\n{{ \'{\' }}"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}'
    "{{ '}' }}\n</tool_call>{%- endfor -%}"
    "{%- else -%}<{{ m.role }}>{{ m.content }}{%- endif -%}<end>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<model>{%- endif -%}"
)
OFTEN = 0.3
"""The share of tasks in which the teacher looks a thing up; otherwise it guesses."""


def look(key: str, task: Task) -> str:
    """Look up what belongs to a key.

    Args:
        key: a letter
    """
    table = task.fields["table"]
    assert isinstance(table, dict)
    return str(table[key])


def lookups(count: int, seed: int) -> list[dict[str, object]]:
    """Write rows that ask for the value of a letter. Each has a different table, so that it cannot be memorized."""
    chance = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        table, key = {letter: chance.choice(DIGITS) for letter in KEYS}, chance.choice(KEYS)
        rows.append({"prompt": [{"role": "user", "content": key}], "answer": table[key], "table": table})
    return rows


def make_tokenizer(directory: Path, more: str = "") -> Chats:
    """Create a tokenizer of characters and the pieces of a call, with a chat template, in the layout of Hugging
    Face."""
    directory.mkdir(parents=True, exist_ok=True)
    words = {token: i for i, token in enumerate(["<pad>", *ROLES, *CALL, *KEYS, *DIGITS, *more])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = Fuse()
    inner.add_special_tokens(["<pad>", *ROLES])
    inner.add_tokens([AddedToken(piece, normalized=False) for piece in CALL])
    inner.save(str(directory / "tokenizer.json"))
    config = {"pad_token": "<pad>", "eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return Chats.load(directory)


def make_speaker(directory: Path, steps: int = 200, head_dim: int = 12) -> Path:
    """Create a model that imitates a teacher who sometimes looks things up, and guesses otherwise."""
    tokenizer = make_tokenizer(directory)
    config = tiny_config(
        tokenizer.vocab_size, layers=1, hidden=48, heads=4, kv_heads=1, head_dim=head_dim, intermediate=96, context=48
    )
    model = create(config, seed=0, dtype=torch.float32)
    training = TrainConfig(precision="fp32", learning_rate=1e-2, lr_scheduler="cosine", warmup_steps=10)
    learner, shown = Learner(model, training, steps=steps), _shown(tokenizer)
    for _ in range(steps):
        learner.update(next(shown), LossObjective(SFT()))
    save(model, directory)
    return directory


def _shown(tokenizer: Chats, batch: int = 48) -> Iterator[Batch]:
    """Return the teacher's messages, and the tool's answers between them."""
    chance = random.Random(1)
    while True:
        rows = []
        for place in range(batch):
            key, digit = chance.choice(KEYS), chance.choice(DIGITS)
            parts: list[tuple[str, bool]] = [(f"<user>{key}<end><model>", False)]
            if chance.random() < OFTEN:
                parts += [
                    (f"{CALL[0]}{CALL[1]}{key}{CALL[2]}{CALL[3]}<end>", True),
                    (f"<tool>{digit}<end><model>", False),
                ]
            pieces = [(tokenizer.encode(text), act) for text, act in [*parts, (f"{digit}<end>", True)]]
            ids = np.concatenate([ids for ids, _ in pieces])
            zeros = np.zeros(len(ids), np.int32)
            action = np.concatenate([np.full(len(ids), act) for ids, act in pieces])
            rows.append(Sample(ids, action, zeros.astype(np.float32), zeros, zeros, place))
        yield Batch.from_records(rows, [Rollout(place, place, place, 0.0) for place in range(batch)])


class Seek(TextEnv):
    """Find a digit in a few questions. Each answer says whether the secret is larger or smaller."""

    def __init__(self, highest: int = 7) -> None:
        self.highest = highest

    def begin(self) -> str:
        self.secret = self.rng.randint(0, self.highest)
        return "?"

    def play(self, answer: str) -> Observation:
        if not answer.isdigit():
            return Observation("?", reward=-0.1)
        if int(answer) == self.secret:
            return Observation(reward=1.0, done=True)
        return Observation("+" if int(answer) < self.secret else "-", reward=0.0)
