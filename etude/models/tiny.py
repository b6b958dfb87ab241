"""Small random models of every family, for demonstrations, tests and benchmarks: the real classes in small sizes."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from etude.errors import UnknownChoiceError

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 4096, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 512, "query_pre_attn_scalar": 16}),
    "gpt2": ("gpt2", {}),
}
"""The transformers model type of a family, and the settings that its configuration needs beyond sizes."""
STATES: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
NEWER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", STATES),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
}
"""The same of families with states in most layers, and with experts."""


def tiny_config(
    vocab_size: int,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    context: int = 2048,
    family: str = "qwen3",
    tied: bool = True,
    **more: Any,
) -> PreTrainedConfig:
    """Return the configuration of a model of these sizes. `more` is passed to the family's own configuration."""
    families = {**FAMILIES, **NEWER_FAMILIES}
    if family not in families:
        raise UnknownChoiceError(f"There is no tiny model of the family '{family}'; there are {', '.join(families)}.")
    kind, own = families[family]
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "gpt2":
        sizes["n_inner"] = intermediate or 4 * hidden
    else:
        sizes["num_key_value_heads"] = kv_heads
        sizes["head_dim"] = head_dim or hidden // heads
        sizes["intermediate_size"] = intermediate or 3 * hidden
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**sizes, **own, **more})
    return config


def tiny_vision_config(
    vocab_size: int,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    context: int = 2048,
    patch: int = 4,
    initializer_range: float = 0.02,
    **token_ids: int,
) -> PreTrainedConfig:
    """Return the configuration of a Qwen3-VL whose text part and vision tower have these sizes.

    patch: the side of a patch in pixels. token_ids: the ids of its words for images, by transformers' names.
    """
    plane = head_dim // 8  # of rows and of columns; time has the rest of a head's pairs
    text = {
        "vocab_size": vocab_size,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head_dim // 2 - 2 * plane, plane, plane],
            "mrope_interleaved": True,
        },
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    tower = {
        "depth": layers,
        "hidden_size": hidden,
        "out_hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 1,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 64,
        "initializer_range": initializer_range,
    }
    config: PreTrainedConfig = AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=tower, tie_word_embeddings=True, **token_ids
    )
    return config
