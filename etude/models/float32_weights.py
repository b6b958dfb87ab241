"""The weights that stay in float32 in a model that computes in half precision.

An exponential multiplies the error of what enters it: bfloat16 rounds a decay of 0.999 to 0.996 or 1. So these weights
are kept as they are. They are small, as are those that transformers names in the class of a model.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

EXPONENTS = ("A_log", "dt_bias", "sinks")
"""The names in transformers of the weights that enter an exponential."""
_HALF = (torch.bfloat16, torch.float16)
_class_lock = threading.Lock()


def find_float32_weights(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Return the weights that stay in float32 if the model computes in `dtype`, by name: none outside of half
    precision."""
    if dtype not in _HALF:
        return {}
    named = [*EXPONENTS, *(getattr(module, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype == torch.float16:  # as in transformers
        named += getattr(module, "_keep_in_fp32_modules", None) or ()
    pattern = re.compile("|".join(name.replace("*", ".*") for name in named))
    return {name: weight for name, weight in module.named_parameters() if pattern.search(name)}


@contextmanager
def read_in_float32(model_class: type[PreTrainedModel]) -> Iterator[None]:
    """Let transformers read the weights that enter an exponential in float32 in this context."""
    changed: Any = model_class
    with _class_lock:
        before = changed._keep_in_fp32_modules_strict
        changed._keep_in_fp32_modules_strict = [*(before or ()), *EXPONENTS]
        try:
            yield
        finally:
            changed._keep_in_fp32_modules_strict = before
