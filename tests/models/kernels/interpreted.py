"""Run the kernels by Triton's interpreter on this processor, and print the outcome of each case as a line of JSON.

Usage: TRITON_INTERPRET=1 python -m tests.models.kernels.interpreted

The interpreter computes products in numpy, and in bfloat16 it multiplies bits: these cases are in float32 and float16.
numpy's products give a row other last bits by its place among the rows, which those of a GPU do not. Here products are
therefore sums in order.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.runtime.interpreter as interpreter

from tests.models.kernels.attention_cases import AttentionCase, check_attention
from tests.models.kernels.decode_cases import check_add_norm, check_gated_silu, check_norm_rotate_write

FLOAT = torch.float32
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
    "norms": partial(check_add_norm, "cpu", FLOAT),
    "norms, half": partial(check_add_norm, "cpu", torch.float16),
    "rotary positions": partial(check_norm_rotate_write, "cpu", FLOAT),
    "rotary positions, half": partial(check_norm_rotate_write, "cpu", torch.float16),
    "activation": partial(check_gated_silu, "cpu", FLOAT),
    "activation, half": partial(check_gated_silu, "cpu", torch.float16),
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
