"""The kernels on a GPU: every way to score in every type, and the bits of rows alone and in company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu  # the cases import Triton, so they are imported in the tests

TYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = {
    "64": {"width": 64, "query_heads": 4, "key_heads": 4},
    "128, groups of 2": {"width": 128},
    "128, groups of 5": {"width": 128, "query_heads": 10},
    "256, groups of 8": {"width": 256, "query_heads": 8, "key_heads": 1},
    "blocks of 8": {"width": 64, "block_size": 8},
}
SCORINGS = {
    "plain": {},
    "window": {"window": 100},
    "long window": {"window": 300},
    "softcap": {"softcap": 5.0},
    "sinks": {"has_sinks": True},
    "sinks in a window": {"has_sinks": True, "window": 128},
    "nothing shared": {"shared": 128},
    "chunk": {"chunk": True},
    "chunk in a window": {"chunk": True, "window": 37, "has_sinks": True},
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("size", SIZES)
def test_attention(size: str, scoring: str, dtype: torch.dtype) -> None:
    from tests.models.kernels.attention_cases import AttentionCase, check_attention

    case = AttentionCase(**SIZES[size], **SCORINGS[scoring])
    check_attention(case, "cuda", dtype, alone=range(17 if case.chunk else 6))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["check_add_norm", "check_norm_rotate_write", "check_gated_silu"])
def test_small_kernels(name: str, dtype: torch.dtype) -> None:
    from tests.models.kernels import decode_cases

    check: Callable[[str, torch.dtype], None] = getattr(decode_cases, name)
    check("cuda", dtype)
