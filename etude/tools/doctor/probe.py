"""The facts about this machine that only torch knows, written as JSON: `python -m etude.tools.doctor.probe FILE`.

It is a separate process, so that a torch that does not load, or a driver that hangs, costs the doctor only a few
seconds.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from etude.models.kernels.probe import ProbedModel, probe_kernels
from etude.models.kernels.shapes import KernelShape
from etude.rollout.batch_invariance import USUAL_SHAPES, find_shapes_of_layers
from etude.train import measure_bf16_speedup

LAYERS, WIDTHS = ((512, 512), (300, 192), (9, 64), (64, 3)), (64, 128)
"""Sizes of linear layers and heads, also of adapters, for the test of batch invariance."""


def probe_torch() -> dict[str, Any]:
    """Return torch's build, its threads, its devices, and its speed in bf16."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reaches = torch.cuda.is_available()
    shapes = find_shapes_of_layers(LAYERS, WIDTHS)
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "kernels_for": torch.cuda.get_arch_list() if reaches else [],
        "said": " ".join(str(warning.message).splitlines()[0] for warning in caught),
        "gpus": [_gpu(number) for number in range(torch.cuda.device_count())] if reaches else [],
        "kernels": _kernels(torch.device("cuda", 0)) if reaches else None,
        "mps": torch.backends.mps.is_available(),
        "threads": torch.get_num_threads(),
        "bf16_speedup": measure_bf16_speedup(),
        "company": "matters"
        if not shapes.batch_invariant
        else "usual form"
        if shapes == USUAL_SHAPES
        else "other form",
    }


def _kernels(device: torch.device) -> dict[str, Any]:
    """Return the kernels that hold for a usual model in bf16."""
    usual = ProbedModel(device, torch.bfloat16, KernelShape(16, 8, 128, 16), 1000, 1000, True, frozenset({None}))
    choice = probe_kernels(usual)
    return {"line": choice.describe(), "complete": not choice.refused}


def _gpu(number: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return {"name": properties.name, "capability": [properties.major, properties.minor], "free": free, "total": total}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(probe_torch()), encoding="utf-8")
