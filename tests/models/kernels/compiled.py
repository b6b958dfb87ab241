"""Compile the kernels for GPUs that this machine need not have, and print what each takes as a line of JSON.

Usage: python -m tests.models.kernels.compiled 80 90 100

Triton's wheel has the assembler. A line is [kernel, sm, bytes of memory of a thread, registers]: memory means that
registers were spilled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from etude.models.kernels.decode_ops import SILU_BLOCK, _add_norm, _gated_silu, _norm_rotate_write
from etude.models.kernels.paged_attention import BLOCK_KEYS, STAGES, WARPS, _attend_to_splits, _merge_splits
from etude.models.kernels.shapes import MIN_LANES, SPLIT, KernelShape

INTEGERS = {"positions", "slots", "table"}
FLOATS = {"partial", "partial_lse", "sinks"}
WORK = {"entries", "count"}
NUMBERS = {"eps": "fp32", "scale": "fp32", "softcap": "fp32", "head_stride": "i64"}
"""The types of arguments. The other pointers are to numbers of the model's type, and the other numbers are int32."""
POINTERS = INTEGERS | FLOATS | WORK
MODEL_POINTERS = {"q", "keys", "values", "out", "x", "residual", "weight", "qkv", "q_norm", "k_norm", "cos", "sin"}
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def sources() -> Iterator[tuple[str, Any, str, dict[str, Any], int]]:
    """Yield the name of each kernel, its function, the model's type, the constants, and the number of warps."""
    cases = {
        "attention, 16 and 8 heads of 128": ("bf16", KernelShape(16, 8, 128, 16), False, False),
        "attention, 8 and 1 heads of 256, window and cap": ("bf16", KernelShape(8, 1, 256, 16), True, True),
        "attention in float32": ("fp32", KernelShape(16, 8, 128, 16), False, False),
    }
    for name, (kind, shape, window, cap) in cases.items():
        group = shape.query_heads // shape.key_heads
        sizes = {"GROUP": group, "ROWS": shape.rows_per_entry, "M": MIN_LANES, "D": shape.width}
        keys = {"SIZE": shape.block_size, "BLOCK": BLOCK_KEYS, "SPLIT": SPLIT, "WINDOW": window, "CAP": cap}
        yield name, _attend_to_splits, kind, sizes | keys, WARPS
    yield "merge", _merge_splits, "bf16", {"HEADS": 16, "D": 128, "SPLIT": SPLIT, "WINDOW": True, "SINK": True}, 4
    heads = {"HQ": 16, "HK": 8, "D": 128, "SIZE": 16, "NORM": True}
    yield "rotary positions", _norm_rotate_write, "bf16", heads, 1
    yield "norm", _add_norm, "bf16", {"H": 1024, "BLOCK": 1024, "ADD": True}, 4
    yield "activation", _gated_silu, "bf16", {"BLOCK": SILU_BLOCK}, 4


def source_of(function: Any, kind: str, constants: dict[str, Any]) -> ASTSource:
    """Return a kernel with its types, and pointers aligned as those of tensors are."""
    types: dict[str, str] = {}
    for name in (parameter.name for parameter in function.params):
        if name in constants:
            types[name] = "constexpr"
        elif name in MODEL_POINTERS:
            types[name] = f"*{kind}"
        elif name in POINTERS:
            types[name] = "*i64" if name in INTEGERS else "*i32" if name in WORK else "*fp32"
        else:
            types[name] = NUMBERS.get(name, "i32")
    aligned = [(i,) for i, (name, type_) in enumerate(types.items()) if type_[0] == "*" or name == "head_stride"]
    attributes: Any = {place: [["tt.divisibility", 16]] for place in aligned}
    return ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)


def spills(binary: bytes) -> tuple[int, int]:
    """Return the bytes of stack and local memory of a thread, and the number of its registers."""
    with TemporaryDirectory() as scratch:
        file = Path(scratch, "kernel.cubin")
        file.write_bytes(binary)
        usage = subprocess.run([TOOL, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    return int(found[2]) + int(found[3]), int(found[1])


def main() -> None:
    """Compile all kernels for the named architectures."""
    for architecture in map(int, sys.argv[1:]):
        for name, function, kind, constants, warps in sources():
            options = {"num_warps": warps, "num_stages": STAGES, "enable_fp_fusion": True}
            target = GPUTarget("cuda", architecture, 32)
            kernel = triton.compile(source_of(function, kind, constants), target=target, options=options)
            print(json.dumps([name, architecture, *spills(kernel.asm["cubin"])]), flush=True)


if __name__ == "__main__":
    main()
