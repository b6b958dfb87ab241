"""The number of tokens that a rollout may have: at most the context of the model, and the memory of the engine."""

from __future__ import annotations

from functools import partial

from etude.errors import ConfigError
from etude.models import Model
from etude.recipes.run.config import Run
from etude.rollout import TorchEngineConfig
from etude.rollout.kv_cache import block_bytes, cache_bytes, kv_gib


def check_context_length(run: Run, model: Model) -> None:
    """Refuse prompts and answers that do not fit into the model's context or the engine's memory."""
    fits = partial(check_answer_length, model, run.embedded_engine, run.data.max_prompt_length)
    fits("sampling.max_tokens", run.sampling.max_tokens)
    if run.data.val:
        fits("evaluate.sampling.max_tokens", run.evaluate.sampling.fill_from(run.sampling).max_tokens)


def check_answer_length(model: Model, engine: TorchEngineConfig | None, prompt: int, name: str, answer: int) -> None:
    """Refuse answers of this length to prompts of that. name: the option that sets it."""
    total = prompt + answer
    if total > model.context_length:
        shorter = min(answer, max(1, model.context_length // 2))
        raise ConfigError(
            f"`data.max_prompt_length` + `{name}` = {total} tokens ({prompt} and {answer}) do "
            f"not fit into this model's context of {model.context_length}. Lower them, for example "
            f"`data.max_prompt_length={model.context_length - shorter} {name}={shorter}`."
        )
    if engine is not None and total > (capacity := _kv_capacity(model, engine)):
        raise ConfigError(
            f"`data.max_prompt_length` + `{name}` = {total} tokens do not fit into the engine's memory, which holds "
            f"{capacity} tokens with `rollout.kv_gib={kv_gib(model.device, engine):g}`. Raise that, or lower one of "
            "them."
        )


def max_total_tokens(model: Model, engine: TorchEngineConfig | None) -> int:
    """Return the most tokens that model and engine have room for, prompt and answers together.

    engine: the embedded engine. A server makes sure itself that its context fits.
    """
    return model.context_length if engine is None else min(model.context_length, _kv_capacity(model, engine))


def _kv_capacity(model: Model, engine: TorchEngineConfig) -> int:
    """Return the number of tokens that the engine has memory for."""
    size = engine.block_size
    return cache_bytes(model, engine) // block_bytes(model, size) * size
