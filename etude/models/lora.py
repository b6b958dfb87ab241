"""Adapters by peft: injected around a model's linear layers, read from a directory, and described in peft's format.

peft creates the layers and defines their files. `lora_layers` computes them for the families of `fused_layers`; for
other families peft's own `forward` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from etude.errors import ConfigError
from etude.models.config import LoraAdapterConfig
from etude.models.lora_layers import ADAPTER, external_name
from etude.models.model import Model
from etude.models.part_patterns import matches_part, refuse_unmatched
from etude.models.transformers_backbone import text_part

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft's prefix of a weight's name in a file."""
SUPPORTED_KEYS = frozenset(
    ["r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"]
) | {"layers_to_transform", "layers_pattern", "fan_in_fan_out"}
"""The keys of an adapter's config that say which layers it adapts, and with which scale."""
IGNORED_KEYS = frozenset(
    ["peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"]
) | {"inference_mode", "lora_dropout", "megatron_core", "runtime_config", "loftq_config"}
"""The keys that do not change the result here. Dropout never acts: the trained policy is the sampled one."""
MAMBA_TYPES = frozenset({"falcon_h1", "nemotron_h"})
MAMBA_REFUSED = frozenset({"out_proj"})
"""The layers of these types of models that peft refuses to adapt."""
EXPERT_PROJECTIONS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""The names that peft takes for the fused experts of a mixture, also where they are linear layers."""
SUPPORTED_INITS = (True, False, "gaussian")
"""The initializations of an adapter that do not change the model's own weights."""


def adapt(model: Model, lora: LoraAdapterConfig, *, seed: int) -> Model:
    """Return the model with adapters, new ones or those of `lora.path`.

    From now on only the adapters are trained, and the head of a model that scores.
    """
    linear = _linear_layers(model)
    if lora.path is not None:
        return _inject(model, _read_config(lora.path), linear, _read_weights(lora.path), lora.path)
    refuse_unmatched("lora.targets", lora.targets, linear)
    chosen = _choose_targets(model, lora.targets, linear) if lora.targets else _default_targets(model, linear)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        target_modules=_shorten_names(chosen, model.module),
        fan_in_fan_out=all(isinstance(linear[name], Conv1D) for name in chosen),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _inject(model, config, linear)


def adapter_config(model: Model, base: Path) -> dict[str, Any]:
    """Return the content of an adapter's `adapter_config.json`; `base` is the directory of its base model."""
    config: dict[str, Any] = model.module.peft_config[ADAPTER].to_dict()
    config |= {"base_model_name_or_path": str(base), "inference_mode": True}
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}


def _linear_layers(model: Model) -> dict[str, nn.Module]:
    """Return the layers that can have an adapter, by name. The head cannot: log-probs use its weight directly."""
    linear = ((name, part) for name, part in model.module.named_modules() if isinstance(part, nn.Linear | Conv1D))
    return {name: part for name, part in linear if part.weight is not model.head_weight}


def _default_targets(model: Model, linear: Mapping[str, nn.Module]) -> list[str]:
    """Return the linear layers of the text part, without those that peft does not adapt here."""
    left_out = _not_adapted_by_peft(model)
    text = _text_layers(model, linear)
    return [name for name in linear if name in text and name.rpartition(".")[2] not in left_out]


def _choose_targets(model: Model, targets: Sequence[str], linear: Mapping[str, nn.Module]) -> list[str]:
    """Return the layers that targets name.

    A target with layers in the text part means those alone: `q_proj` does not adapt the vision tower, `visual` does.
    """
    text = _text_layers(model, linear)
    chosen: set[str] = set()
    for part in targets:
        named = {name for name in linear if matches_part(part, name)}
        chosen |= named & text or named
    return [name for name in linear if name in chosen]


def _text_layers(model: Model, linear: Mapping[str, nn.Module]) -> set[str]:
    inside = {id(part) for part in text_part(model.module).modules()}
    return {name for name, part in linear.items() if id(part) in inside}


def _not_adapted_by_peft(model: Model) -> frozenset[str]:
    """Return the last parts of names that peft refuses in this model, or takes for those of its fused experts."""
    refused = MAMBA_REFUSED if model.module.config.model_type in MAMBA_TYPES else frozenset()
    return refused | (EXPERT_PROJECTIONS if model.has_experts else frozenset())


def _shorten_names(chosen: list[str], module: nn.Module) -> list[str]:
    """Return the last parts of the layers' names, as users write them, if these match exactly the same layers."""
    last = {name.rpartition(".")[2] for name in chosen}
    matching = [name for name, _ in module.named_modules() if name.rpartition(".")[2] in last]
    return sorted(last) if set(matching) == set(chosen) else chosen


def _inject(
    model: Model,
    config: LoraConfig,
    linear: Mapping[str, nn.Module],
    weights: Mapping[str, Tensor] | None = None,
    where: Path | None = None,
) -> Model:
    """Inject the adapters, with these weights if given. peft freezes everything else."""
    try:
        with _memory_for_adapters(linear.values()):
            inject_adapter_in_model(config, model.module, ADAPTER)
    except ValueError as error:
        adapters = "The new adapters do" if where is None else f"The adapter in {where} does"
        raise ConfigError(f"{adapters} not fit this model: {error}") from error
    made = {external_name(name): weight for name, weight in model.module.named_parameters() if weight.requires_grad}
    unsupported = [name for name in made if name.rpartition(".lora_")[0] not in linear]
    if unsupported and where is None:
        raise ConfigError(
            f"A part in `lora.targets` adapts `{unsupported[0]}`, and Etude runs adapters of linear layers only. Name "
            f"other parts, or leave `lora.targets` out."
        )
    if unsupported:
        raise ConfigError(
            f"The adapter in {where} adapts `{unsupported[0]}`. Etude runs adapters of the linear layers between "
            f"embedding and head. Merge this adapter into its model, and give the merged model."
        )
    float32_weights = {} if weights is None else _copy_weights(made, weights, where)
    if model.has_score_head:
        model.head_weight.requires_grad_(True)
    on_meta = model.device.type == "meta"
    return Model(model.module, float32_weights, fused=not on_meta, verify=not on_meta)


@contextmanager
def _memory_for_adapters(linear: Iterable[nn.Module]) -> Iterator[None]:
    """Make peft create adapters in memory, with values, around layers on meta: it creates them where the layer is."""
    meta = [(layer, weight) for layer in linear if isinstance(weight := layer.weight, nn.Parameter) and weight.is_meta]
    for layer, weight in meta:
        without_memory = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        layer._parameters["weight"] = nn.Parameter(without_memory, requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in meta:
            weight.requires_grad_(False)
            layer._parameters["weight"] = weight


def _copy_weights(made: Mapping[str, Tensor], weights: Mapping[str, Tensor], where: Path | None) -> dict[str, Tensor]:
    """Copy the weights of a file into the adapters; return the float32 values of weights that this rounds."""
    stored = {name.removeprefix(PREFIX): weight for name, weight in weights.items()}
    unshared = sorted(made.keys() ^ stored.keys())
    if unshared:
        has, lacks = ("its weights", "this model") if unshared[0] in stored else ("this model", "its weights")
        raise ConfigError(
            f"The adapter in {where} does not fit this model: {has} have `{unshared[0]}` and {lacks} have not "
            f"({len(unshared)} names differ). Give the adapter of this model."
        )
    float32_weights = {}
    for name, weight in made.items():
        if weight.shape != stored[name].shape:
            raise ConfigError(
                f"The adapter in {where} does not fit this model: `{name}` is {list(stored[name].shape)} there and "
                f"should be {list(weight.shape)}. Give the adapter of this model."
            )
        with torch.no_grad():
            weight.copy_(stored[name])
        wide = torch.promote_types(weight.dtype, torch.float32)
        if not torch.equal(weight.to(wide), stored[name].to(wide)):
            float32_weights[name] = stored[name].to(weight.device, wide)
    return float32_weights


def _read_config(where: Path) -> LoraConfig:
    """Read the config of a plain LoRA adapter; refuse other settings, which would compute something else here."""
    file = where / CONFIG
    if not file.is_file():
        contents = _listed(entry.name for entry in where.iterdir()) if where.is_dir() else "and is no directory"
        raise ConfigError(
            f"`lora.path={where}` holds no adapter: it has no {CONFIG} ({contents}). Give a directory that peft's "
            f"`save_pretrained` or `etude export --adapter` wrote."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} cannot be read as an adapter's config ({error!r}).") from error
    if kind != "LORA":
        raise ConfigError(f"{file} describes an adapter of the kind {kind}; Etude trains LORA. Give a LoRA adapter.")
    plain = {field.name: _default(field) for field in fields(LoraConfig)}
    compared = plain.keys() - SUPPORTED_KEYS - IGNORED_KEYS - {"init_lora_weights"}
    unsupported = [name for name in config if name not in plain and name not in IGNORED_KEYS and config[name]]
    unsupported += [
        name for name, usual in plain.items() if name in compared and name in config and config[name] != usual
    ]
    unsupported += [] if config.get("init_lora_weights", True) in SUPPORTED_INITS else ["init_lora_weights"]
    if unsupported:
        raise ConfigError(
            f"{file} sets `{unsupported[0]}` to {json.dumps(config[unsupported[0]])}, which Etude does not run. Merge "
            f"this adapter into its model, give the merged model as `model.path`, and begin a new adapter."
        )
    return LoraConfig(**{name: config[name] for name in SUPPORTED_KEYS if name in config}, task_type="CAUSAL_LM")


def _read_weights(where: Path) -> dict[str, Tensor]:
    try:
        return load_file(where / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"The adapter's weights {where / WEIGHTS} cannot be read: {error}") from error


def _default(field: Any) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


def _listed(names: Iterable[str]) -> str:
    return "it holds " + (", ".join(sorted(names)[:8]) or "nothing")
