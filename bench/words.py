"""The model and the tasks of whole-step benchmarks: a random model whose tokens are words of two alphabets."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from etude.models import create, save, tiny_config

__all__ = ["write_model", "write_tasks"]


def write_model(directory: Path, sizes: Mapping[str, Any]) -> int:
    """Write a model of these sizes with its tokenizer; return its number of parameters."""
    count = sizes["vocab_size"]
    words = ["<pad>", "<end>", *(f"{'ab'[index % 2]}{index}" for index in range(count - 2))]
    inner = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<pad>", "<end>"])
    model = create(tiny_config(context=1024, **sizes), seed=0)
    model.module.config.eos_token_id = model.module.generation_config.eos_token_id = 1
    model.module.config.pad_token_id = model.module.generation_config.pad_token_id = 0
    save(model, directory)
    inner.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return sum(weight.numel() for weight in model.parameters())


def write_tasks(file: Path, vocabulary: int, prompt: int, count: int = 512) -> None:
    """Return prompts of this number of random words."""
    chance, size = random.Random(file.stem), vocabulary - 2
    with file.open("w") as tasks:
        for _ in range(count):
            words = (chance.randrange(size) for _ in range(prompt))
            tasks.write(json.dumps({"prompt": " ".join(f"{'ab'[word % 2]}{word}" for word in words)}) + "\n")
