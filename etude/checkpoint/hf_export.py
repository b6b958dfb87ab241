"""The export of a model as a directory in the Hugging Face layout.

config.json, generation_config.json        the model's configuration and its sampling defaults
model.safetensors                          the weights, each once; large models are in shards with an index
tokenizer.json, tokenizer_config.json …    unchanged copies

Or the export of a LoRA adapter alone, in peft's layout:

adapter_config.json                        the adapter's configuration
adapter_model.safetensors                  the adapter's weights
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from etude.errors import CheckpointError

__all__ = ["export", "export_adapter"]

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
MAX_SHARD_BYTES = 5 * 10**9
_storage: Any = StorageWeakRef  # torch gives it no types


def export(
    weights: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    directory: Path,
    *,
    tokenizer: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a directory that `from_pretrained` and the serving engines load, and return it.

    `config` and `generation` are the contents of `config.json` and `generation_config.json`. `tokenizer` is a directory
    whose tokenizer files are copied. `weights` may compute each tensor on demand. A tensor with two names (tied
    weights) is written under the first name, and a loader ties it as `config` says. `dtype` casts the weights; None
    keeps their dtypes.
    """
    tokenizer_files = (
        [] if tokenizer is None else [tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()]
    )
    if tokenizer is not None and not tokenizer_files:
        raise CheckpointError(
            f"{tokenizer} has no tokenizer files (such as {', '.join(TOKENIZER_FILES[:4])} …). Name the directory "
            f"of the model's tokenizer."
        )
    with _write_atomically(directory) as staging:
        weights_dtype = _write_weights(staging, weights, dtype, max_shard_bytes)
        model_config = dict(config) | {"dtype": str(weights_dtype).removeprefix("torch.")}
        _write_json(staging / "config.json", model_config)
        if generation is not None:
            _write_json(staging / "generation_config.json", generation)
        for file in tokenizer_files:
            shutil.copyfile(file, staging / file.name)
    return directory


def export_adapter(weights: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> Path:
    """Write a directory that peft's `from_pretrained` loads, and return it."""
    with _write_atomically(directory) as staging:
        named_weights = {f"base_model.model.{name}": weight.detach().contiguous() for name, weight in weights.items()}
        save_file(named_weights, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_json(staging / "adapter_config.json", config)
    return directory


@contextmanager
def _write_atomically(directory: Path) -> Iterator[Path]:
    """Yield a staging directory, and rename it to `directory` at the end. A failure leaves nothing behind."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not empty, and an export never overwrites files. Name another directory."
        )
    staging = directory.with_name(f".{directory.name}.writing")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        if directory.exists():
            directory.rmdir()
        staging.rename(directory)
    except OSError as error:
        raise CheckpointError(
            f"The model could not be exported to {directory} ({error}). Nothing was left there."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_weights(
    directory: Path, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, max_shard_bytes: int
) -> torch.dtype:
    """Write the weights and return their dtype. Memory holds at most one shard of them."""
    seen: set[tuple[Any, ...]] = set()  # weak references, so that weights computed on demand are freed
    shard_of_weight: dict[str, int] = {}
    pending: dict[str, Tensor] = {}
    total, count, size = 0, 0, 0
    weights_dtype: torch.dtype | None = None
    for name, tensor in weights:
        storage_key = (_storage(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape)
        if storage_key in seen:
            continue
        seen.add(storage_key)
        copy = torch.empty(tensor.shape, dtype=dtype or tensor.dtype).copy_(tensor.detach())
        weights_dtype = weights_dtype or copy.dtype
        if pending and size + copy.nbytes > max_shard_bytes:
            _write_shard(directory, count, pending)
            pending, size, count = {}, 0, count + 1
        pending[name] = copy
        shard_of_weight[name] = count
        size += copy.nbytes
        total += copy.nbytes
    assert weights_dtype is not None, "a model without weights"
    _write_shard(directory, count, pending)
    if count == 0:
        _shard(directory, 0).rename(directory / "model.safetensors")
        return weights_dtype
    names = [f"model-{index + 1:05d}-of-{count + 1:05d}.safetensors" for index in range(count + 1)]
    for index, name in enumerate(names):
        _shard(directory, index).rename(directory / name)
    weight_map = {name: names[index] for name, index in shard_of_weight.items()}
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    return weights_dtype


def _write_shard(directory: Path, index: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, _shard(directory, index), metadata={"format": "pt"})


def _shard(directory: Path, index: int) -> Path:
    """Return the temporary path of a shard, used until the number of shards is known."""
    return directory / f"shard-{index}"


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n")
