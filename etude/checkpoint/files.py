"""One checkpoint directory: its writing, and the verification that it is whole.

    step-00000012.7/
        rank-0.tensors …    tensors, written by torch's distributed checkpoint (`storage`): any number of ranks may read
        tensors.json        the location of each tensor in those files
        facts.json          everything that is not a tensor, the size and SHA-256 of every other file, and its own

The manifest `facts.json` is written last, and then the directory gets its name. So a directory with that name was once
whole. The manifest reveals later damage, such as a lost disk block or an incomplete copy. No file is ever unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from etude.checkpoint.storage import CheckpointReader, CheckpointWriter, read_tensor_index
from etude.errors import CheckpointError, DamagedFileError
from etude.integrity import file_sha256, read_json, write_json

TensorTree: TypeAlias = "Mapping[str, Tensor | TensorTree]"
"""Nested mappings of names to tensors."""

MANIFEST = "facts.json"
FORMAT = 3


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    step: int
    path: Path
    facts: Mapping[str, Any]
    """The JSON tree that was saved with the tensors."""


def flat(tree: TensorTree, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a tree by dotted names."""
    tensors: dict[str, Tensor] = {}
    for name, value in tree.items():
        tensors |= {prefix + name: value} if isinstance(value, Tensor) else flat(value, f"{prefix}{name}.")
    return tensors


def plan_write(directory: Path, tensors: TensorTree, *, copy: bool) -> CheckpointWriter:
    """Return a writer of this rank's shards. All ranks call it together.

    copy: copy the shards to CPU memory, so that the tensors may change before they are written.
    """
    writer = CheckpointWriter(directory, copy=copy)
    with _ignore_torch_warning(), _translate_torch_errors(f"The checkpoint {directory} could not be written"):
        save(dict(flat(tensors)), storage_writer=writer, no_dist=not is_distributed())
    return writer


def write_manifest(directory: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Write the manifest: the facts, and the size and checksum of every file."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(directory.iterdir())
    }
    try:
        write_json(directory / MANIFEST, {"format": FORMAT, "step": step, "facts": facts, "files": files})
    except ValueError as error:
        raise CheckpointError(
            f"The facts beside the tensors have a number that is not finite ({error}). Check the metrics up to this "
            f"step."
        ) from error


def read_checkpoint(path: Path, *, checksums: bool = False) -> Checkpoint:
    """Read a checkpoint's manifest. Raises `CheckpointError` if a file is missing or has another size.

    checksums: compare the checksums of all files too.
    """
    try:
        manifest = read_json(path / MANIFEST)
    except DamagedFileError as error:
        raise CheckpointError(f"The checkpoint {path} is broken: {error}") from error
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"The checkpoint {path} is of format {manifest['format']}, and this version of Etude reads format "
            f"{FORMAT}. Resume it with the version that wrote it. Or export its model with that version, and begin a "
            f"new run with the model."
        )
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"The checkpoint {path} is broken: its file {name} is missing.")
        if file.stat().st_size != expected["size"]:
            raise CheckpointError(
                f"The checkpoint {path} is broken: its file {name} has {file.stat().st_size} bytes and should have "
                f"{expected['size']}."
            )
    for name, expected in manifest["files"].items() if checksums else ():
        try:
            matches = file_sha256(path / name) == expected["sha256"]
        except OSError as error:
            raise CheckpointError(f"The checkpoint {path} cannot be read: {error}.") from error
        if not matches:
            raise CheckpointError(
                f"The checkpoint {path} is broken: its file {name} was changed since it was written (SHA-256 differs)."
            )
    return Checkpoint(manifest["step"], path, manifest["facts"])


def load_tensors(checkpoint: Checkpoint, tensors: TensorTree) -> None:
    """Load into these tensors in place. Names, shapes and dtypes are compared before any tensor changes."""
    targets = flat(tensors)
    with _translate_torch_errors(f"The checkpoint {checkpoint.path} could not be read"):
        table = read_tensor_index(checkpoint.path)
    stored_tensors = table.state_dict_metadata
    for name, tensor in targets.items():
        stored = stored_tensors.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            first_names = ", ".join(sorted(stored_tensors)[:3])
            raise CheckpointError(
                f"The checkpoint {checkpoint.path} has no tensor `{name}` (it has {first_names} … "
                f"{len(stored_tensors)} in all). It is of another model or another optimizer: resume with the "
                f"configuration that wrote it."
            )
        if (stored.size, stored.properties.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"The tensor `{name}` is {stored.properties.dtype} {list(stored.size)} in the checkpoint "
                f"{checkpoint.path} and {tensor.dtype} {list(tensor.shape)} in this run. Resume with the "
                f"configuration that wrote it."
            )
    with _ignore_torch_warning(), _translate_torch_errors(f"The checkpoint {checkpoint.path} could not be read"):
        load(dict(targets), storage_reader=CheckpointReader(checkpoint.path, table), no_dist=not is_distributed())


def is_distributed() -> bool:
    """Return True if torch.distributed is in use."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _ignore_torch_warning() -> Iterator[None]:
    """Suppress torch's warning that a save or load without other ranks runs in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _translate_torch_errors(failure: str) -> Iterator[None]:
    """Convert torch's `CheckpointException`, which is not an `Exception` and whose message is stack frames."""
    try:
        yield
    except DamagedFileError as error:
        raise CheckpointError(f"{failure}: {error}") from error
    except CheckpointException as error:
        if any(isinstance(reason, KeyboardInterrupt) for reason, _ in error.failures.values()):
            raise KeyboardInterrupt from error  # torch caught the interrupt as if it were a disk failure
        reasons = "; ".join(f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values())
        raise CheckpointError(f"{failure} ({reasons}).") from error
