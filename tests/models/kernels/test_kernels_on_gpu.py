"""The kernels on a GPU: every way to score in every type, and the bits of rows alone and in company."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from etude.models.kernels.probe import ProbedModel, probe_kernels
from etude.models.kernels.shapes import KernelShape
from etude.models.kernels.step import KERNELS

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
def test_scratch_rows(dtype: torch.dtype) -> None:
    from tests.models.kernels.attention_cases import check_scratch_rows

    check_scratch_rows("cuda", dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", ["check_add_norm", "check_norm_rotate_write", "check_gated_silu"])
def test_small_kernels(name: str, dtype: torch.dtype) -> None:
    from tests.models.kernels import decode_cases

    check: Callable[[str, torch.dtype], None] = getattr(decode_cases, name)
    check("cuda", dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [KernelShape(16, 8, 128, 16), KernelShape(7, 1, 64, 16), KernelShape(32, 1, 256, 8)])
def test_the_trial_finds_that_kernels_hold(shape: KernelShape, dtype: torch.dtype) -> None:
    model = ProbedModel(torch.device("cuda", 0), dtype, shape, 1000, 1000, True, frozenset({None, 100}))
    choice = probe_kernels(model)
    assert choice.held == set(KERNELS), choice.describe()


def test_a_machine_without_a_compiler_has_no_kernels(tmp_path: Path) -> None:
    program = (
        "import torch\n"
        "from etude.models.kernels.probe import ProbedModel, probe_kernels\n"
        "from etude.models.kernels.shapes import KernelShape\n"
        "shape = KernelShape(4, 2, 64, 16)\n"
        "model = ProbedModel(torch.device('cuda'), torch.float16, shape, 9, 9, True, frozenset({None}))\n"
        "print(probe_kernels(model).describe())"
    )
    env = os.environ | {"CC": str(tmp_path / "no-compiler"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.startswith("Decode steps use torch's operations in place of Triton kernels: attention: ")
