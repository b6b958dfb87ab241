"""Loading models from a directory, creating them from a configuration, and saving them. Nothing is downloaded.

`wrap_module` takes a model that a program has already loaded: the weights stay the same tensors.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils import logging
from transformers.utils.quantization_config import Mxfp4Config

from etude.errors import ConfigError, describe_out_of_memory
from etude.models import shapes
from etude.models.config import Head
from etude.models.float32_weights import find_float32_weights, read_in_float32
from etude.models.model import Model, cast, copy_stored_buffers
from etude.models.transformers_backbone import refuse_unsupported, register_attention
from etude.models.vision import attention_names, takes_images
from etude.models.vision_types import USED_FOR_TEXT

_logging: Any = logging

SCORE_HEAD = "score.weight"
"""The name in transformers of the head of a model that gives a number."""

_REFUSED_HEADS: dict[Head, str] = {
    "value": "This run's algorithm trains a critic, and a critic of a vision-language model is not supported. Choose "
    "one without, such as `grpo`.",
    "score": "A reward model that is a vision-language model is not supported. Give one that takes text alone.",
}


def load(
    directory: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keep_float32: bool = False,
    head: Head = "language",
) -> Model:
    """Load the model of a Hugging Face directory. Every weight must be there, in the shape of its config.

    With `keep_float32`, the model also holds the float32 values of weights that half precision rounds, until a learner
    takes them. With a `head` other than `language`, the same files are read as transformers' sequence classification
    with one label.
    """
    where = Path(directory)
    config, auto = _read_supported(where, head)
    try:
        model_class: Any = _get_model_class(config, auto._model_mapping)  # type: ignore[no-untyped-call]
        with _silence_transformers(), read_in_float32(model_class):
            module, report = auto.from_pretrained(
                where,
                config=config,
                dtype=torch.promote_types(dtype, torch.float32) if keep_float32 else dtype,
                attn_implementation=attention_names(config, head),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **_dequantize(config),
            )
    except Exception as error:  # transformers raises errors of any class about a config or a file
        raise ConfigError(f"The model in {where} cannot be loaded: {describe_out_of_memory(error) or error}") from error
    missing = set(report["missing_keys"])
    if SCORE_HEAD in missing and allows_new_head(where, head):
        missing.remove(SCORE_HEAD)
        nn.init.zeros_(module.score.weight)
    refuse_missing_weights(where, sorted(missing), sorted(report["mismatched_keys"]))
    _refuse_large_tokenizer(where, len(module.get_input_embeddings().weight))
    module.to(device)
    finer = _find_rounded_weights(module, dtype) if keep_float32 else {}
    cast(module, dtype, torch.device(device))
    return Model(module, finer)


def read_context_length(directory: Path | str) -> int:
    """Return the longest sequence that a model's positions support, from its config alone."""
    return shapes.read_context_length(shapes.read_text_config(_read_config(Path(directory))))


def create(
    config: PreTrainedConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    head: Literal["language", "seeing", "score"] = "language",
) -> Model:
    """Create a model with random weights. The same seed gives the same weights, rounded to `dtype`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _from_config(config, head, torch.float32)
    cast(module, dtype, torch.device(device))
    return Model(module)


def create_empty(
    directory: Path | str | PreTrainedConfig, *, dtype: torch.dtype, head: Head = "language", layers: int | None = None
) -> Model:
    """Create a model of a config's sizes, with arbitrary weights, to measure the memory that it would take.

    It is on torch's default device, in the dtype that it computes in. layers: build only so many of its layers.
    """
    config = copy.deepcopy(directory) if isinstance(directory, PreTrainedConfig) else _read_config(Path(directory))
    _keep_layers(config, layers)
    return Model(_from_config(config, head, dtype))


def create_on_meta(
    directory: Path | str, *, dtype: torch.dtype, head: Head = "language", layers: int | None = None
) -> Model:
    """Create the model of a directory without memory for its weights, computed by transformers' own layers.

    `WeightFiles` reads the weights, and `restore_buffers` makes the rest, once there is memory for them.
    layers: build only so many of its layers, to measure their memory.
    """
    where = Path(directory)
    config, auto = _read_supported(where, head)
    _keep_layers(config, layers)
    with torch.device("meta"):
        module = _build(auto, config, head, dtype)
    _refuse_large_tokenizer(where, len(module.get_input_embeddings().weight))
    return Model(module, fused=False, verify=False)


def wrap_module(module: PreTrainedModel) -> Model:
    """Return a model that shares the parameters of a loaded module.

    Training changes the module's weights too. The module itself works as before, with its own attention.
    """
    with torch.random.fork_rng(devices=[]):
        twin = _from_config(copy.deepcopy(module.config), "seeing", module.dtype).to(module.device)
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
    copy_stored_buffers(module, twin)
    return Model(twin)


def copy_with_score_head(model: Model, dtype: torch.dtype) -> Model:
    """Copy a language model with a head that gives one number, 0 at first: a critic that starts from the policy."""
    if model.has_vision and not model.reads_text_too:
        raise ConfigError(_REFUSED_HEADS["value"])
    with torch.random.fork_rng(devices=[]):
        made = _from_config(copy.deepcopy(model.module.config), "score", dtype).to(model.device)
    weights = dict(model.module.base_model.named_parameters())
    with torch.no_grad():
        for name, weight in made.base_model.named_parameters():
            weight.copy_(weights[name])
        copy_stored_buffers(model.module.base_model, made.base_model)
        nn.init.zeros_(made.score.weight)
    return Model(made)


def restore_buffers(module: nn.Module) -> None:
    """Tie the weights and compute the buffers of a model that was given memory after its creation on meta."""
    initialised: Any = module
    initialised.tie_weights()
    for tensor in initialised.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    with torch.no_grad():
        initialised.initialize_weights()


def save(model: Model, directory: Path | str) -> None:
    """Write a directory that `load` and transformers' `from_pretrained` can read."""
    with _silence_transformers():
        if model.has_adapters:
            model.module.save_pretrained(directory, state_dict=dict(model.with_buffers(model.merged_weights())))
        else:
            model.module.save_pretrained(directory)


def allows_new_head(where: Path, head: Head) -> bool:
    """Return True if a head that the files lack begins as zeros: a critic's. Refuse files without a scoring head."""
    if head == "score":
        raise ConfigError(
            f"The model in {where} has no score head (`{SCORE_HEAD}`), so it gives no scores. Give the directory "
            f"of a reward model; `etude reward-model` trains one from preferences."
        )
    return head == "value"


def _read_supported(where: Path, head: Head) -> tuple[PreTrainedConfig, Any]:
    """Return the config of a directory and transformers' class for this head. Refuse what cannot be run."""
    _refuse_unreadable(where)
    config = _read_config(where)
    if head in ("language", "seeing") and any(
        name.endswith("ForSequenceClassification") for name in config.architectures or ()
    ):
        raise ConfigError(
            f"The model in {where} gives scores and no tokens: it is a reward model, as `reward=reward_model "
            f"reward.path=…` takes it. Give a language model."
        )
    return config, _auto_class(config, head)


def _dequantize(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the options that read the MXFP4 experts of gpt-oss as plain weights, which alone can be trained."""
    quantization = getattr(config, "quantization_config", None) or {}
    is_mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    return {"quantization_config": Mxfp4Config(dequantize=True)} if is_mxfp4 else {}


def _auto_class(config: PreTrainedConfig, head: Head) -> Any:
    """Return transformers' class for this head. Refuse a config that cannot be run."""
    refuse_unsupported(config)
    register_attention()
    if head in ("language", "seeing"):
        return AutoModelForImageTextToText if takes_images(config, head) else AutoModelForCausalLM
    if takes_images(config, head) and config.model_type not in USED_FOR_TEXT:
        raise ConfigError(_REFUSED_HEADS[head])
    config.num_labels = 1
    return AutoModelForSequenceClassification


def _from_config(config: PreTrainedConfig, head: Head, dtype: torch.dtype) -> Any:
    """Create transformers' model of a config, with random weights."""
    return _build(_auto_class(config, head), config, head, dtype)


def _build(auto: Any, config: PreTrainedConfig, head: Head, dtype: torch.dtype) -> Any:
    """Create transformers' model of a config by one of its classes. Any error of a config becomes a sentence."""
    try:
        module = auto.from_config(config, dtype=dtype, attn_implementation=attention_names(config, head))
    except Exception as error:
        if isinstance(error, MemoryError) or describe_out_of_memory(error):
            raise
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(
            f"transformers {transformers.__version__} cannot create this {config.model_type} model: {reason[0]}. "
            f"Correct its config.json, or choose another model."
        ) from error
    cast(module, dtype)
    return module


def _keep_layers(config: PreTrainedConfig, layers: int | None) -> None:
    """Shorten a config to its first layers; None keeps all."""
    text: Any = shapes.read_text_config(config)
    count = text.num_hidden_layers
    if layers is None or layers == count:
        return
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


def _find_rounded_weights(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights that another dtype cannot hold exactly, and that a model in it holds in that dtype."""
    kept = find_float32_weights(module, dtype)
    return {
        name: weight.data
        for name, weight in module.named_parameters()
        if name not in kept and not torch.equal(weight.data.to(dtype).to(weight.dtype), weight.data)
    }


@contextmanager
def _silence_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and reports: errors here contain the important parts."""
    level, bars = _logging.get_verbosity(), _logging.is_progress_bar_enabled()
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        _logging.set_verbosity(level)
        if bars:
            _logging.enable_progress_bar()


def _read_config(where: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"The model in {where} brings its own code (`auto_map` in its config.json), and Etude runs no code of "
                "a model. Choose a model of an architecture that transformers has built in. Some models have a "
                "converted version with a name that ends in -hf."
            ) from error
        raise ConfigError(f"The config.json in {where} cannot be used: {error}") from error
    return config


def _refuse_unreadable(where: Path) -> None:
    """Refuse a directory that holds no model, and pickled weights, because loading them runs code."""
    if not where.is_dir():
        raise ConfigError(
            f"There is no model directory {where}. Models are read from disk: download one first, and name its "
            f"directory."
        )
    if not (where / "config.json").is_file():
        names = ", ".join(sorted(entry.name for entry in where.iterdir())[:8]) or "nothing"
        raise ConfigError(f"{where} is not a model directory: it has no config.json. It holds {names}.")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in where.glob(pattern))
    if pickled and not any(where.glob("*.safetensors")):
        raise ConfigError(
            f"The weights in {where} are pickled ({pickled[0]}). Loading such a file runs the code in it, and Etude "
            f"reads only safetensors. Download the model's .safetensors files; or, if you trust the file, convert it "
            f"with transformers: `AutoModelForCausalLM.from_pretrained('{where}').save_pretrained('new')`."
        )


def refuse_missing_weights(where: Path, missing: list[str], mismatched: list[object]) -> None:
    """Refuse weight files that lack weights, or hold them in other shapes."""
    if missing:
        raise ConfigError(
            f"The model in {where} lacks {len(missing)} of its weights, {', '.join(missing[:3])} among them. "
            f"Download its weight files again, or correct its config.json."
        )
    if mismatched:
        raise ConfigError(
            f"{len(mismatched)} weights in {where} have other shapes than its config.json says, such as "
            f"{_describe_mismatch(mismatched[0])}. The config and the weights are of two models."
        )


def _describe_mismatch(mismatch: object) -> str:
    """Describe a mismatch as transformers reports it: (name, shape found, shape expected)."""
    if isinstance(mismatch, tuple) and len(mismatch) == 3:
        name, shape, expected = mismatch
        return f"{name}: {list(shape)} instead of {list(expected)}"
    return str(mismatch)


def _refuse_large_tokenizer(where: Path, rows: int) -> None:
    """Refuse a tokenizer with more ids than the embedding has rows: it would fail in the middle of a run."""
    file = where / "tokenizer.json"
    if not file.is_file():
        return
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
    ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
    if ids and max(ids) >= rows:
        raise ConfigError(
            f"The tokenizer in {where} has the token id {max(ids)}, but the model embeds {rows} tokens (0 to "
            f"{rows - 1}). The tokenizer belongs to another model."
        )
