"""Small inputs for tests of whole runs: a random model directory, and tasks that can be checked."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import Fuse

from etude.models import create, save, tiny_config

__all__ = ["ALPHABET", "make_model", "make_tasks", "make_tokenizer"]

ALPHABET = "0123456789 +-=:abcdefghijklmnopqrstuvwxyz"
PAD, END = "<pad>", "<end>"


def make_tokenizer(directory: Path, alphabet: str = ALPHABET, *, byte_level: bool = False) -> int:
    """Create a tokenizer of single characters, in the layout of a Hugging Face directory; return its size.

    byte_level: it stores its characters as Qwen's does, which llguidance reads.
    """
    directory.mkdir(parents=True, exist_ok=True)
    words = {token: i for i, token in enumerate([PAD, END, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    if byte_level:
        tokenizer.model = models.BPE({token.replace(" ", "Ġ"): i for token, i in words.items()}, [], unk_token=PAD)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"pad_token": PAD, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return len(words)


def make_model(
    directory: Path, *, seed: int = 0, layers: int = 2, hidden: int = 32, heads: int = 2, kv_heads: int = 1
) -> Path:
    """Create a tiny random Qwen3 with a tokenizer of characters."""
    size = make_tokenizer(directory)
    config = tiny_config(size, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, context=128)
    save(create(config, seed=seed, dtype=torch.float32), directory)
    return directory


def make_tasks(file: Path, count: int, *, seed: int = 0) -> Path:
    """Write sums of two digits, as lines of JSON."""
    chance = random.Random(seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        for _ in range(count):
            a, b = chance.randrange(10), chance.randrange(10)
            lines.write(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": "sums"}) + "\n")
    return file
