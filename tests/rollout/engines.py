"""Real engines over tiny real models, and a plain restatement of a model: one sequence, no cache, no batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.chat import Tokenizer
from etude.models import Model, create, tiny_config
from etude.records import Completion, SamplingParams
from etude.rollout.image_reader import ImageReader
from etude.rollout.kv_cache import count_slots
from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig
from tests.chat.made import byte_level, save

Ids = NDArray[np.int32]
V = 300


def model_of(family: str = "qwen3", vocabulary: int = V, seed: int = 0, **sizes: Any) -> Model:
    """Return a random model whose next token depends strongly on its context."""
    model = create(tiny_config(vocabulary, family=family, **sizes), seed=seed, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


@contextmanager
def engine_of(
    model: Model | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    blocks: int | None = None,
    merge: bool = False,
    records_routes: bool = False,
    images: ImageReader | None = None,
    **config: Any,
) -> Iterator[TorchEngine]:
    """Start an engine, closed afterwards. `blocks` sets its memory by the number of its blocks."""
    model = model or model_of()
    size = config.get("block_size", 16)
    if blocks is not None:
        held = model.kv_values_per_token * size * model.dtype.itemsize
        states = model.state_bytes * count_slots(config.get("max_num_seqs", TorchEngineConfig().max_num_seqs))
        config["kv_gib"] = ((blocks + 0.5) * held + states) / 2**30
    options = TorchEngineConfig(**{"kv_gib": 0.01, **config})
    engine = TorchEngine(model, tokenizer, options, merge=merge, records_routes=records_routes, images=images)
    try:
        yield engine
    finally:
        engine.close()


async def during_step(engine: TorchEngine, number: int, call: Coroutine[Any, Any, None]) -> None:
    """Make a call while the engine computes a step from now on, so that it comes between two tokens."""
    begun, called = threading.Event(), threading.Event()
    steps, logits = count(1), engine.model.logits

    def wait_in_step(hidden: Tensor) -> Tensor:
        if next(steps) == number:
            begun.set()
            assert called.wait(20)
        return logits(hidden)

    engine.model.logits = wait_in_step  # type: ignore[method-assign]
    try:
        assert await asyncio.to_thread(begun.wait, 20)
        calling = asyncio.create_task(call)
        await asyncio.sleep(0)
    finally:
        called.set()
    await calling
    engine.model.logits = logits  # type: ignore[method-assign]


def words(directory: Path) -> Tokenizer:
    """Return a byte-level tokenizer that ends its answers with `<|im_end|>`."""
    return Tokenizer.load(save(directory, byte_level(), None, ("<|im_end|>",)))


def prompt_of(length: int, seed: int = 0, vocabulary: int = V) -> Ids:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def logits_of(model: Model, ids: Ids) -> Tensor:
    """Return [T, V] in float32 for one sequence, with attention written out."""

    def attend(
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert sinks is None
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        place = torch.arange(len(q))
        seen = place[:, None] >= place
        if window is not None:
            seen &= place[:, None] - place < window
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))

    with torch.inference_mode():
        hidden = model.hidden(torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids)), attend)
        return model.logits(hidden).float()


def logp_under(model: Model, prompt: Ids, completion: Completion) -> NDArray[np.float32]:
    """Return the log-probs of a completion's tokens under the model."""
    logp = torch.log_softmax(logits_of(model, np.concatenate([prompt, completion.ids])), -1)[len(prompt) - 1 : -1]
    logp_of_tokens: NDArray[np.float32] = logp.gather(1, torch.from_numpy(completion.ids.astype(np.int64))[:, None])[
        :, 0
    ].numpy()
    return logp_of_tokens


def assert_follows(model: Model, prompt: Ids, completion: Completion, sampling: SamplingParams) -> None:
    """Assert that the raw log-probs are the model's, and that a greedy token is as likely as the likeliest allowed
    one."""
    assert completion.raw_logp is not None
    assert np.allclose(completion.raw_logp, logp_under(model, prompt, completion), atol=2e-4)
    if sampling.temperature == 0:
        logits = logits_of(model, np.concatenate([prompt, completion.ids]))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.from_numpy(completion.ids.astype(np.int64))[:, None])[:, 0]
        assert float((logits.amax(-1) - chosen).max()) < 1e-3


def same(one: Completion, two: Completion) -> bool:
    """Return whether two completions are equal, bit for bit: tokens, log-probs, and finish reason."""
    return (
        np.array_equal(one.ids, two.ids)
        and np.array_equal(one.logp, two.logp)
        and np.array_equal(one.raw_logp, two.raw_logp)
        and one.finish_reason == two.finish_reason
        and one.text == two.text
    )
