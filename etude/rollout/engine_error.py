"""The error of a step of the embedded engine, as a sentence."""

from __future__ import annotations

import torch

from etude.errors import EngineError
from etude.rollout.config import TorchEngineConfig


def to_engine_error(error: Exception, config: TorchEngineConfig) -> EngineError:
    """Return the error as a sentence. If memory ran out, it names the options to lower."""
    if isinstance(error, EngineError):
        return error
    engine_error: EngineError
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "memory" in str(error):
        engine_error = EngineError(
            f"The engine ran out of memory. Lower kv_gib (now {config.kv_gib:g}), max_num_batched_tokens (now "
            f"{config.max_num_batched_tokens}) or max_num_seqs (now {config.max_num_seqs}). ({error})"
        )
    else:
        engine_error = EngineError(f"A step of the engine failed, and all requests under way with it: {error!r}")
    engine_error.__cause__ = error
    return engine_error
