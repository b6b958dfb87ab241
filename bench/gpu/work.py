"""The models, prompts and rows that the items compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu.battery import Place
from bench.train_engines_worker import batch_of
from etude.batch import Batch
from etude.models import Model, create, tiny_config
from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig

Ids = NDArray[np.int32]

MODELS: dict[str, dict[str, int]] = {
    "0.5b": {"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "intermediate": 3072},
    "4b": {"layers": 36, "hidden": 2560, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 9728},
    "tiny": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64},
}
"""Shapes of Qwen3."""
VOCABULARY = {"0.5b": 32_768, "4b": 151_936, "tiny": 64}
GROUP = 8
"""Answers to each prompt."""


def make_model(place: Place, size: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Return a random model; a tiny one where the place is."""
    name = "tiny" if place.tiny else size
    config = tiny_config(VOCABULARY[name], context=40_960, **MODELS[name])
    return create(config, seed=0, dtype=dtype, device=place.device)


def make_engine(place: Place, model: Model, kv_gib: float = 40.0, **options: Any) -> TorchEngine:
    """Return an embedded engine for 256 requests."""
    gib = 0.05 if place.tiny else kv_gib
    return TorchEngine(model, None, TorchEngineConfig(kv_gib=gib, max_num_seqs=256, **options))


def prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[Ids]:
    """Return different random prompts."""
    chance = np.random.default_rng([seed, count, length])
    return [chance.integers(0, vocabulary, length, dtype=np.int32) for _ in range(count)]


def make_batch(model: Model, groups: int, prompt: int, answers: list[int], seed: int = 0) -> Batch:
    """Return groups of random answers that share their prompts. answers: the length of each answer of a group."""
    chance = np.random.default_rng(seed)
    rows = []
    for group in range(groups):
        shared = chance.integers(0, model.vocab_size, prompt)
        for length in answers:
            own = chance.integers(0, model.vocab_size, length)
            ids = np.concatenate([shared, own]).tolist()
            rows.append({"ids": ids, "prompt": prompt, "group": group, "advantage": float(chance.standard_normal())})
    return batch_of(rows)
