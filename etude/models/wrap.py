"""Wrapping models that a program has already loaded: the weights stay the same tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from etude.errors import ConfigError
from etude.models.model import Model
from etude.models.transformers_backbone import ATTENTION_NAME, refuse_unsupported, register_attention

_causal_auto_class: Any = AutoModelForCausalLM
_score_auto_class: Any = AutoModelForSequenceClassification


def wrap_module(module: PreTrainedModel) -> Model:
    """Return a model that shares the parameters of a loaded module.

    Training changes the module's weights too. The module itself works as before, with its own attention.
    """
    refuse_unsupported(module.config)
    register_attention()
    twin = _build_module(_causal_auto_class, copy.deepcopy(module.config), module.dtype, module.device)
    _share_parameters(module, twin)
    return Model(twin)


def copy_with_score_head(model: Model, dtype: torch.dtype) -> Model:
    """Copy a language model with a head that gives one number, 0 at first: a critic that starts from the policy."""
    config = copy.deepcopy(model.module.config)
    config.num_labels = 1
    made = _build_module(_score_auto_class, config, dtype, model.device)
    weights = dict(model.module.base_model.named_parameters())
    with torch.no_grad():
        for name, weight in made.base_model.named_parameters():
            weight.copy_(weights[name])
        nn.init.zeros_(made.score.weight)
    return Model(made)


def _build_module(auto: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    with torch.random.fork_rng(devices=[]):
        return auto.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME).to(device)


def _share_parameters(module: PreTrainedModel, twin: Any) -> None:
    """Replace the twin's parameters by the module's own tensors."""
    originals = dict(module.named_parameters(remove_duplicate=False))
    for name, placeholder in list(twin.named_parameters(remove_duplicate=False)):
        parent, _, leaf = name.rpartition(".")
        original = originals.get(name)
        if original is None or original.shape != placeholder.shape:
            raise ConfigError(
                f"The {type(module).__name__} does not have the weights of a causal language model of transformers: "
                f"`{name}` differs. Load it with `AutoModelForCausalLM.from_pretrained`."
            )
        setattr(twin.get_submodule(parent), leaf, original)
