"""The export of a model as a directory in the Hugging Face layout.

config.json, generation_config.json        the model's configuration and its sampling defaults
model.safetensors                          the weights, each once; large models are in shards with an index
tokenizer.json, tokenizer_config.json …    unchanged copies
preprocessor_config.json …                 of a model that takes images: see `processor_files`

Or the export of a LoRA adapter alone, in peft's layout:

adapter_config.json                        the adapter's configuration
adapter_model.safetensors                  the adapter's weights
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from etude.checkpoint.processor_files import ProcessorFiles
from etude.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
MAX_SHARD_BYTES = 5 * 10**9
HEADER_BYTES = 2**18
"""The room for a file's header. A file with more tensors is followed by another."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors' header."""
_storage: Any = StorageWeakRef  # torch gives it no types


def export(
    weights: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    directory: Path,
    *,
    tokenizer: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    processor: ProcessorFiles | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a directory that `from_pretrained` and the serving engines load, and return it.

    `config` and `generation` are the contents of `config.json` and `generation_config.json`. `tokenizer` is a directory
    whose tokenizer files are copied; `processor` has the files of a model that takes images. `weights` may compute each
    tensor on demand. A tensor with two names (tied weights) is written under the first name, and a loader ties it as
    `config` says.
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
        weights_dtype = _write_weights(staging, weights, max_shard_bytes)
        model_config = dict(config) | {"dtype": str(weights_dtype).removeprefix("torch.")}
        _write_json(staging / "config.json", model_config)
        if generation is not None:
            _write_json(staging / "generation_config.json", generation)
        for file in tokenizer_files:
            shutil.copyfile(file, staging / file.name)
        if processor is not None:
            processor.write(staging)
    return directory


def export_adapter(weights: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> Path:
    """Write a directory that peft's `from_pretrained` loads, and return it."""
    with _write_atomically(directory) as staging:
        named_weights = {f"base_model.model.{name}": weight.detach().contiguous() for name, weight in weights.items()}
        save_file(named_weights, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        _write_json(staging / "adapter_config.json", config)
    return directory


def check_export_directory(directory: Path) -> None:
    """Refuse a directory that has files, before anything is loaded for an export."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not empty, and an export never overwrites files. Name another directory."
        )


@contextmanager
def _write_atomically(directory: Path) -> Iterator[Path]:
    """Yield a staging directory, and rename it to `directory` at the end. A failure leaves nothing behind."""
    check_export_directory(directory)
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


def _write_weights(directory: Path, weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> torch.dtype:
    """Write the weights and return the dtype of the first. Memory holds one of them at a time."""
    seen: set[tuple[Any, ...]] = set()  # weak references, so that weights computed on demand are freed
    files: list[_WeightFile] = []
    weights_dtype: torch.dtype | None = None
    with ExitStack() as stack:
        for name, tensor in weights:
            storage_key = (_storage(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape)
            if storage_key in seen:
                continue
            seen.add(storage_key)
            copy = tensor.detach().cpu().contiguous()
            weights_dtype = weights_dtype or copy.dtype
            if not files or not files[-1].has_room(name, copy, max_shard_bytes):
                files.append(stack.enter_context(closing(_WeightFile(directory / f"shard-{len(files)}"))))
            files[-1].write(name, copy)
        assert weights_dtype is not None, "a model without weights"
        for file in files:
            file.write_header()
    if len(files) == 1:
        files[0].path.rename(directory / "model.safetensors")
        return weights_dtype
    weight_map: dict[str, str] = {}
    for index, file in enumerate(files):
        final_name = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        file.path.rename(directory / final_name)
        weight_map |= dict.fromkeys(file.names, final_name)
    total = sum(file.size for file in files)
    _write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    return weights_dtype


class _WeightFile:
    """A safetensors file that is written tensor by tensor, because safetensors' own writer needs all tensors in memory.

    The header comes first and is known last. So space is reserved for it at the front, filled up with spaces.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        """The bytes of the tensors."""
        self.names: list[str] = []
        self._header = b'{"__metadata__":{"format":"pt"}'
        self._file = path.open("wb")
        self._file.seek(HEADER_BYTES)

    def has_room(self, name: str, tensor: Tensor, max_bytes: int) -> bool:
        """Return True if a tensor fits, its line in the header too, and readers find it aligned."""
        header_fits = len(self._header) + len(self._line(name, tensor)) < HEADER_BYTES - 8
        return header_fits and self.size + tensor.nbytes <= max_bytes and self.size % tensor.itemsize == 0

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a contiguous tensor of the CPU."""
        self._header += self._line(name, tensor)
        data: Any = tensor.view(-1).view(torch.uint8).numpy()
        self._file.write(memoryview(data))
        self.names.append(name)
        self.size += tensor.nbytes

    def write_header(self) -> None:
        """Write the header, after the last tensor."""
        room = HEADER_BYTES - 8
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + (self._header + b"}").ljust(room))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, name: str, tensor: Tensor) -> bytes:
        """Return the line of the header for the next tensor."""
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"`{name}` is {tensor.dtype}, which weight files here do not hold.")
        offsets = [self.size, self.size + tensor.nbytes]
        place = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        return f",{json.dumps(name)}:{json.dumps(place)}".encode()


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, sort_keys=True) + "\n")
