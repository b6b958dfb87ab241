"""One checkpoint directory: how it is written, and how one is told to be whole.

    step-00000012.7/
        .metadata, __0_0.distcp …   tensors, as torch's distributed checkpoint writes them: any number of ranks may read
        facts.json                  everything that is not a tensor, and the size and SHA-256 of every other file

The manifest is written last, and the directory gets its name last of all, so that a directory with that name was once
whole. What happened to it since (a disk that lost a block, a copy that was cut short) is what the manifest tells.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from etude.errors import CheckpointError

__all__ = ["Checkpoint", "Tree", "examine", "fill", "flat", "manifest", "read_facts", "sync_directory", "write_tensors"]

Tree: TypeAlias = "Mapping[str, Tensor | Tree]"
"""Tensors under names, nested."""

MANIFEST = "facts.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    step: int
    path: Path
    facts: Mapping[str, Any]
    """The JSON tree that was saved with it."""


def flat(tree: Tree, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a tree under dotted names."""
    found: dict[str, Tensor] = {}
    for name, value in tree.items():
        found |= {prefix + name: value} if isinstance(value, Tensor) else flat(value, f"{prefix}{name}.")
    return found


def write_tensors(directory: Path, tensors: Tree) -> None:
    """Write the tensors, each rank its own shards, and wait until they are on the disk."""
    with _quiet(), _told(f"The checkpoint {directory} could not be written"):
        save(dict(flat(tensors)), storage_writer=FileSystemWriter(directory, sync_files=True), no_dist=not _many())


def manifest(directory: Path, step: int, facts: Mapping[str, Any]) -> None:
    """Say what there is: the facts, and what every file must look like to be whole."""
    files = {path.name: {"size": path.stat().st_size, "sha256": _digest(path)} for path in sorted(directory.iterdir())}
    told = {"format": FORMAT, "step": step, "facts": facts, "files": files}
    try:
        text = json.dumps(told, indent=1, allow_nan=False)
    except ValueError as error:
        raise CheckpointError(
            f"Among the facts that are kept beside the tensors is a number that is not finite ({error}): look at what "
            f"was measured up to this step."
        ) from error
    with (directory / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_facts(path: Path) -> Checkpoint:
    """What the manifest says, if it can be read and every file is there with its size."""
    told = _manifest(path)
    for name, wanted in told["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"The checkpoint {path} is broken: its file {name} is missing.")
        if file.stat().st_size != wanted["size"]:
            raise CheckpointError(
                f"The checkpoint {path} is broken: its file {name} has {file.stat().st_size} bytes and should have "
                f"{wanted['size']}."
            )
    return Checkpoint(told["step"], path, told["facts"])


def examine(path: Path) -> Checkpoint:
    """The checkpoint, if every byte of it is what was written."""
    found = read_facts(path)
    for name, wanted in _manifest(path)["files"].items():
        if _digest(path / name) != wanted["sha256"]:
            raise CheckpointError(
                f"The checkpoint {path} is broken: its file {name} is not what was written (its SHA-256 differs)."
            )
    return found


def fill(checkpoint: Checkpoint, tensors: Tree) -> None:
    """Read into these tensors, in place; names, shapes and dtypes are compared before anything is written to them."""
    wanted = flat(tensors)
    reader = FileSystemReader(checkpoint.path)
    there = reader.read_metadata().state_dict_metadata
    for name, tensor in wanted.items():
        stored = there.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            near = ", ".join(sorted(there)[:3])
            raise CheckpointError(
                f"The checkpoint {checkpoint.path} has no tensor `{name}` (it has {near} … {len(there)} in all). It is "
                f"of another model or another optimizer: resume with the configuration that wrote it."
            )
        if (stored.size, stored.properties.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"The tensor `{name}` is {stored.properties.dtype} {list(stored.size)} in the checkpoint "
                f"{checkpoint.path} and {tensor.dtype} {list(tensor.shape)} in this run. Resume with the "
                f"configuration that wrote it."
            )
    with _quiet(), _told(f"The checkpoint {checkpoint.path} could not be read"):
        load(dict(wanted), storage_reader=reader, no_dist=not _many())


def _manifest(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        written = told["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint {path} is broken: its {MANIFEST} cannot be read ({error}).") from error
    if written != FORMAT:
        raise CheckpointError(
            f"The checkpoint {path} is of format {written}, and this version of Etude reads format {FORMAT}. Resume it "
            f"with the version that wrote it."
        )
    return told


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _many() -> bool:
    """Whether other ranks take part."""
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _quiet() -> Iterator[None]:
    """One process is what one process means; torch warns of it every time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _told(what: str) -> Iterator[None]:
    """torch raises what is no `Exception`, with a list of stack frames for a message."""
    try:
        yield
    except CheckpointException as error:
        reasons = "; ".join(f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values())
        raise CheckpointError(f"{what} ({reasons}).") from error
