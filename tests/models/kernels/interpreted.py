"""Run the kernels by Triton's interpreter on this processor, and print the outcome of each case as a line of JSON.

Usage: TRITON_INTERPRET=1 python -m tests.models.kernels.interpreted

The interpreter computes products in numpy, and in bfloat16 it multiplies bits. So the cases are in float32
and float16, and the trial of kernels must refuse attention in bfloat16.
numpy's products give a row other last bits by its place among the rows, which those of a GPU do not. Here products are
therefore sums in order.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.runtime.interpreter as interpreter

from etude.models.kernels.probe import ProbedModel, probe_kernels
from etude.models.kernels.shapes import KernelShape
from etude.models.kernels.step import ATTENTION, KERNELS, ROTARY, KernelStepOps
from etude.records import SamplingParams
from etude.rollout.static_step import StaticStep, StepKey
from tests.models.kernels.attention_cases import AttentionCase, check_attention, check_scratch_rows
from tests.models.kernels.decode_cases import check_add_norm, check_gated_silu, check_norm_rotate_write
from tests.rollout.dispatched import Counting
from tests.rollout.engines import engine_of, model_of, prompt_of

FLOAT = torch.float32


def check_choice(
    dtype: torch.dtype, refused: dict[str, str], *, width: int = 32, blocks: int = 100, parts: int = 100
) -> None:
    """The trial finds each kernel to hold, except for those that are named with the reason."""
    shape = KernelShape(4, 2, width, 16)
    choice = probe_kernels(ProbedModel(torch.device("cpu"), dtype, shape, blocks, parts, True, frozenset({None, 100})))
    assert choice.held == set(KERNELS) - refused.keys(), choice.describe()
    assert len(choice.refused) == len(refused)
    for line, (name, reason) in zip(choice.refused, refused.items(), strict=True):
        assert line.startswith(f"{name}: {reason}"), line
        assert line in choice.describe()


def check_engine() -> None:
    """An engine with kernels gives the answers of one without static steps.

    Two answers share the first split of their prompt. The third one enters its second split on the way.
    """
    model = model_of("mistral", sliding_window=100, layers=2)
    shared = prompt_of(258, seed=1)
    asked = [shared, shared, prompt_of(254, seed=2), prompt_of(9, seed=3)]
    samplings = [
        SamplingParams(max_tokens=3, seed=0),
        SamplingParams(max_tokens=4, seed=1, temperature=0.7),
        SamplingParams(max_tokens=4, seed=2, top_k=20),
        SamplingParams(max_tokens=2, seed=3, repetition_penalty=1.3),
    ]
    answers = []
    steps = []
    attend = patch.object(KernelStepOps, "attend", autospec=True, side_effect=KernelStepOps.attend)
    for static in (False, True):
        with attend as attended, engine_of(model, static_steps=static, deterministic=False, max_num_seqs=4) as engine:
            answers.append(engine.generate_all(asked, samplings))
            steps.append(engine.stats().reduce()["engine/static_steps"])
    assert steps == [0, 3] and attended.call_count >= 3 * model.num_layers
    for without, with_kernels in zip(*answers, strict=True):
        assert without.ids.tolist() == with_kernels.ids.tolist()
        np.testing.assert_allclose(without.logp, with_kernels.logp, atol=2e-5)


def check_operations() -> None:
    """A GPU runs at most 12 operations a layer: products of torch, and kernels."""
    few = count_operations(2)
    more = count_operations(4)
    assert (more - few) / 2 <= 12, f"{more} operations in 4 layers, {few} in 2"


def count_operations(layers: int) -> int:
    """Return the operations of a static step."""
    counts: list[int] = []
    compute = StaticStep.compute
    launch = interpreter.GridExecutor.__call__

    def compute_counting(step: StaticStep, key: StepKey) -> None:
        with Counting() as counted:

            def launch_counting(*arguments: Any, **options: Any) -> None:
                before = [*counted.names]
                launch(*arguments, **options)
                counted.names[:] = [*before, "kernel"]  # without what the interpreter does for it

            with patch.object(interpreter.GridExecutor, "__call__", launch_counting):
                compute(step, key)
        counts.append(len(counted.names))

    with (
        patch.object(StaticStep, "compute", compute_counting),
        engine_of(model_of("qwen3", layers=layers), static_steps=True, deterministic=False, max_num_seqs=4) as engine,
    ):
        engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=3, seed=0)])
    return counts[-1]


CASES: dict[str, Callable[[], None]] = {
    "answers": partial(check_attention, AttentionCase(), "cpu", FLOAT, alone=(0, 2, 3, 4)),
    "window and sinks": partial(
        check_attention, AttentionCase(window=100, has_sinks=True, query_heads=6, shared=128), "cpu", FLOAT
    ),
    "window, softcap, half": partial(
        check_attention, AttentionCase(window=300, softcap=5.0, block_size=8), "cpu", torch.float16
    ),
    "chunks": partial(check_attention, AttentionCase(chunk=True), "cpu", FLOAT, alone=(0, 5, 6, 11, 16)),
    "chunks in a window": partial(
        check_attention,
        AttentionCase(chunk=True, window=37, has_sinks=True, width=16, query_heads=8, key_heads=1),
        "cpu",
        FLOAT,
    ),
    "scratch rows": partial(check_scratch_rows, "cpu", FLOAT),
    "norms": partial(check_add_norm, "cpu", FLOAT),
    "norms, half": partial(check_add_norm, "cpu", torch.float16),
    "rotary positions": partial(check_norm_rotate_write, "cpu", FLOAT),
    "rotary positions, half": partial(check_norm_rotate_write, "cpu", torch.float16),
    "activation": partial(check_gated_silu, "cpu", FLOAT),
    "activation, half": partial(check_gated_silu, "cpu", torch.float16),
    "an engine": check_engine,
    "operations of a layer": check_operations,
    "a trial that all pass": partial(check_choice, FLOAT, {}),
    "a trial with wrong products": partial(check_choice, torch.bfloat16, {ATTENTION: "its result is off by "}),
    "a trial that cannot be compiled": partial(
        check_choice,
        FLOAT,
        {ATTENTION: "heads have 24 numbers", ROTARY: "InterpreterError: "},
        width=24,
    ),
    "a trial with a large cache": partial(
        check_choice, FLOAT, {ATTENTION: "the cache has 5000000 blocks"}, blocks=5_000_000
    ),
    "a trial with long contexts": partial(
        check_choice, FLOAT, {ATTENTION: "partial results of all rows would take 4.8 GiB"}, parts=10_000_000
    ),
}


def sum_in_order(a: Any, b: Any, dtype: Any = np.float32) -> Any:
    """Return a matrix product, in which a row does not depend on the other rows."""
    return np.einsum("mk,kn->mn", np.asarray(a, np.float32), np.asarray(b, np.float32)).astype(dtype)


class _Numpy:
    """numpy with another matrix product."""

    matmul = staticmethod(sum_in_order)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def main() -> None:
    """Run all cases."""
    interpreter.np = _Numpy()
    for name, check in CASES.items():
        error = None
        try:
            check()
        except Exception:
            error = traceback.format_exc(limit=-3)
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main()
