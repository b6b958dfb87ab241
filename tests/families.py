"""Tiny random models of many families of transformers, each with every kind of its layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from etude.models import Model, create, save
from tests.worlds import make_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "sliding_window": 5,
    "num_kv_shared_layers": 0,
}
ATTENDING: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**EXPERTS, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {**EXPERTS, **LATENT},
    "glm4_moe_lite": {**EXPERTS, **LATENT, "v_head_dim": 24},
    "gemma4_text": GEMMA4,
    "gemma4_text with shared keys": {
        **GEMMA4,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
    },
}
"""Families whose every layer attends; the first word of a name is the model type."""
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        **EXPERTS,
        **LATENT,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "nemotron_h": {
        **EXPERTS,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **EXPERTS,
        **MAMBA,
        "mamba_n_groups": 1,
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 32,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
"""Families with layers that hand a state from token to token."""
FAMILIES: dict[str, dict[str, Any]] = {**ATTENDING, **HYBRID}
ROUTED: dict[str, dict[str, Any]] = {"mixtral": EXPERTS, "phimoe": EXPERTS}
"""Families that differ from others in their routers alone."""


def config_of(name: str, **more: Any) -> PreTrainedConfig:
    """Return the config of a family's tiny model."""
    config: PreTrainedConfig = AutoConfig.for_model(name.split()[0], **{**SIZES, **(FAMILIES | ROUTED)[name], **more})
    return config


def family_model(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> Model:
    """Return a tiny model of a family, whose weights are large enough that each of them matters."""
    model = create(config_of(name, **more), seed=0, dtype=dtype)
    shake(model.module)
    return model


def make_family(directory: Path, name: str, **more: Any) -> Path:
    """Write a tiny model of a family with a tokenizer of characters."""
    save(family_model(name, vocab_size=make_tokenizer(directory), **more), directory)
    return directory


def shake(module: PreTrainedModel) -> None:
    """Make every weight of a new model matter; decays stay in their range."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "A_log" in name or "dt_bias" in name or name.endswith(".D"):
                weight.copy_(torch.rand(weight.shape, generator=generator))
            else:
                weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype), alpha=0.1)


def by_transformers(model: Model) -> PreTrainedModel:
    """Return the same weights, computed by transformers alone."""
    config = copy.deepcopy(model.module.config)
    created: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    created.set_experts_implementation("eager")
    module: PreTrainedModel = created.to(model.dtype)  # buffers too
    module.load_state_dict(model.module.state_dict())
    return module.eval()
