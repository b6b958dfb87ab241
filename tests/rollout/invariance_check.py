"""Report if the engine claims, and gives, the same bits to a request alone and in a batch, with several kernels.

python -m tests.rollout.invariance_check AVX2 COMPATIBLE

It runs in a separate process: MKL reads `MKL_CBWR` at its first product, so each value has a fork of a process that has
made none. It prints a line of JSON for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch

from etude.models import LoraAdapterConfig, Model, adapt
from etude.records import SamplingParams
from etude.rollout.batch_invariance import USUAL_SHAPES, find_shapes_of_layers
from etude.rollout.torch_engine import TorchEngine
from tests.rollout.engines import engine_of, model_of, prompt_of, same

LENGTHS = (3, 17, 39, 150, 150, 9)


def models_to_check() -> list[Model]:
    """Yield one of Etude's own models, one that runs transformers' code, and one with untrained adapters of an odd
    rank."""
    made = [model_of("qwen3"), model_of("gpt2")]
    if find_spec("peft"):
        made.append(adapt(model_of("qwen3"), LoraAdapterConfig(rank=3), seed=0))
    return made


def batches_match(engine: TorchEngine, lengths: Sequence[int] = LENGTHS) -> bool:
    """Return True if each request gets the answer that it gets alone. Two of them share a long prefix."""
    prompts = [prompt_of(length) if length == 150 else prompt_of(length, seed=length) for length in lengths]
    prompts[4] = np.concatenate([prompts[4], prompts[0]])
    samplings = [SamplingParams(max_tokens=6, seed=row) for row in range(len(prompts))]
    together = engine.generate_all(prompts, samplings)
    for prompt, sampling, one in zip(prompts, samplings, together, strict=True):
        asyncio.run(engine.update_weights((), 0))  # clears the prefix cache
        if not same(one, engine.generate_all([prompt], [sampling])[0]):
            return False
    return True


def main(kernels: str) -> None:
    reports: list[dict[str, bool]] = []
    for model in models_to_check():
        with engine_of(model) as engine:
            reports.append({"same": batches_match(engine), "exact": engine.exact})
            if model.has_adapters:
                with torch.no_grad():
                    for _, weight in model.trained_weights():
                        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)), alpha=0.05)
                asyncio.run(engine.update_weights((), 1))
                reports.append({"same": batches_match(engine), "exact": engine.exact})
    plain = find_shapes_of_layers([(512, 256), (9, 64)], [16, 128])
    summary = {"kernels": kernels, "engines": reports, "plain": plain.batch_invariant, "usual": plain == USUAL_SHAPES}
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kernels in sys.argv[1:]:
        if (child := os.fork()) == 0:
            os.environ["MKL_CBWR"] = kernels
            main(kernels)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(1)
