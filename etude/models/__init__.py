"""Language models for trainer and engine: the same weights and layers, with two implementations of attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import MissingPackageError
from etude.lazy import lazy_getattr

if TYPE_CHECKING:
    from etude.models.attention import PackedAttention
    from etude.models.backbone import AttentionFn
    from etude.models.config import ActivationCheckpointing, Head, LoraAdapterConfig, VisionConfig
    from etude.models.engine_model import EngineModel
    from etude.models.loading import create, create_empty, load, read_context_length, save
    from etude.models.logprob_head import logp_and_entropy, map_logit_chunks, token_logp
    from etude.models.model import Model
    from etude.models.prepack import PrepackedWeights
    from etude.models.shapes import AttentionShape
    from etude.models.step_ops import MakeStepOps, StepMemory, StepOps, StepRows, TorchStepOps
    from etude.models.tiny import tiny_config, tiny_vision_config
    from etude.models.token_sets import HeadRows, TokenSets

__all__ = [
    "ActivationCheckpointing",
    "AttentionFn",
    "AttentionShape",
    "EngineModel",
    "Head",
    "HeadRows",
    "LoraAdapterConfig",
    "MakeStepOps",
    "Model",
    "PackedAttention",
    "PrepackedWeights",
    "StepMemory",
    "StepOps",
    "StepRows",
    "TokenSets",
    "TorchStepOps",
    "VisionConfig",
    "adapt",
    "adapter_config",
    "create",
    "create_empty",
    "load",
    "logp_and_entropy",
    "map_logit_chunks",
    "read_context_length",
    "save",
    "tiny_config",
    "tiny_vision_config",
    "token_logp",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "attention": ("PackedAttention",),
        "backbone": ("AttentionFn",),
        "config": ("ActivationCheckpointing", "Head", "LoraAdapterConfig", "VisionConfig"),
        "loading": ("read_context_length", "create", "load", "create_empty", "save"),
        "logprob_head": ("logp_and_entropy", "map_logit_chunks", "token_logp"),
        "step_ops": ("MakeStepOps", "StepMemory", "StepOps", "StepRows", "TorchStepOps"),
        "token_sets": ("HeadRows", "TokenSets"),
        "prepack": ("PrepackedWeights",),
        "shapes": ("AttentionShape",),
        "model": ("Model",),
        "engine_model": ("EngineModel",),
        "tiny": ("tiny_config", "tiny_vision_config"),
    },
)


def adapt(model: Model, lora: LoraAdapterConfig, *, seed: int) -> Model:
    """Return the model with adapters, new ones or those of `lora.path`. Do not use the given model afterwards.

    From now on only the adapters are trained, and the head of a model that scores.
    """
    try:
        from etude.models.lora import adapt
    except ImportError as error:
        raise _missing(error) from error
    return adapt(model, lora, seed=seed)


def adapter_config(model: Model, base: Path) -> dict[str, Any]:
    """Return the content of an adapter's `adapter_config.json`; `base` is the directory of its base model."""
    try:
        from etude.models.lora import adapter_config
    except ImportError as error:
        raise _missing(error) from error
    return adapter_config(model, base)


def _missing(error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        f"`lora` needs the package peft, which cannot be imported here ({error}). Install it with: pip install "
        f"'etude[lora]'"
    )
