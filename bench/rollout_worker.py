"""One engine of `bench.rollout`, in its own process: it answers requests, a line of JSON each, until its input ends.

    python -m bench.rollout_worker ENGINE MODEL_DIRECTORY DTYPE

It runs under the engine's own Python, without Etude, so it imports nothing of it. A request is
`{"prompts": [[…], …], "new": 64}`. The answer is `{"seconds": …, "tokens": …}`, the time from the prompts as lists of
ids to all new ids in lists. The first output line has the versions. Output of libraries goes to standard error.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]


def etude(model: str, dtype: str) -> Generate:
    """Etude's engine as in a run, which also returns the log-prob of every token."""
    import numpy as np
    import torch

    from etude.models import load
    from etude.records import SamplingParams
    from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    kv_gib = 24.0 if device == "cuda" else 2.0
    loaded = load(model, dtype=getattr(torch, dtype), device=device)
    engine = TorchEngine(loaded, None, TorchEngineConfig(kv_gib=kv_gib))
    atexit.register(engine.close)

    def generate(prompts: Prompts, new: int) -> Prompts:
        sampling = SamplingParams(max_tokens=new)
        completions = engine.generate_all(
            [np.array(prompt, dtype=np.int32) for prompt in prompts], [sampling] * len(prompts)
        )
        return [completion.ids.tolist() for completion in completions]

    return generate


def vllm(model: str, dtype: str) -> Generate:
    """vLLM with default options, compiled; `VLLM_CPU_OMP_THREADS_BIND=0-1` would choose other cores than it does.

    The requests need neither text nor log-probs, so it has less to do.
    """
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(model=model, dtype=dtype, skip_tokenizer_init=True, max_num_seqs=128)

    def generate(prompts: Prompts, new: int) -> Prompts:
        sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in engine.generate(requests, sampling, use_tqdm=False)]

    return generate


def transformers(model: str, dtype: str) -> Generate:
    """`generate` over one padded batch, sampling from the whole distribution."""
    import torch
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True)
    module = module.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def generate(prompts: Prompts, new: int) -> Prompts:
        ids = torch.tensor(prompts, device=module.device)
        with torch.inference_mode():
            all_ids = module.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new,
            )
        new_ids: Prompts = all_ids[:, ids.shape[1] :].tolist()
        return new_ids

    return generate


ENGINES: dict[str, tuple[Callable[[str, str], Generate], tuple[str, ...]]] = {
    "etude": (etude, ("torch", "transformers")),
    "vllm": (vllm, ("vllm-cpu", "torch", "transformers")),
    "generate": (transformers, ("torch", "transformers")),
}
"""Each engine, and the packages whose versions it prints."""


def main(name: str, model: str, dtype: str) -> None:
    """Start the engine, print the versions, and serve requests."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start, packages = ENGINES[name]
    generate = start(model, dtype)

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    answer({package: version(package) for package in packages})
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        new_ids = generate(request["prompts"], request["new"])
        seconds = time.perf_counter() - began
        answer({"seconds": seconds, "tokens": sum(map(len, new_ids))})


if __name__ == "__main__":
    main(*sys.argv[1:])
