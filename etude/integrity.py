"""Files with a checksum inside, so that a flipped bit or a truncated file is an error when the file is read.

A JSON object has the checksum of its other fields:

    {"step": 4, "score": 0.5, "sha256": "9f2c…"}

A text has the checksum of the lines above the last one:

    steps: 4
    # sha256: 9f2c… (of the lines above)

A file is written under a temporary name, synced to the disk, and renamed. A reader sees the whole file or none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from etude.errors import DamagedFileError

FIELD = "sha256"
MARK = f"# {FIELD}: "
REMARK = " (of the lines above: a file that was changed is refused)"


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum. Raise `ValueError` for a number that is not finite."""
    values = json.loads(json.dumps(document, allow_nan=False))
    _write_atomically(path, json.dumps(values | {FIELD: _digest_of(values)}, indent=1, allow_nan=False) + "\n")


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote. A `DamagedFileError` ends with `remedy`."""
    try:
        document = json.loads(read_bytes(path, remedy))
        checksum = document.pop(FIELD, None)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise _damaged(path, "is damaged: it is not the JSON object that was written", remedy) from error
    if not isinstance(document, dict) or checksum != _digest_of(document):
        raise _damaged(path, "is damaged: it does not match its checksum", remedy)
    return document


def write_text(path: Path, text: str) -> None:
    """Write a text with its checksum in the last line. The text's format must allow comments after `#`."""
    text = text if text.endswith("\n") else f"{text}\n"
    _write_atomically(path, f"{text}{MARK}{_sha256(text.encode())}{REMARK}\n")


def read_text(path: Path, remedy: str = "") -> str:
    """Read a text that `write_text` wrote, without its last line. A `DamagedFileError` ends with `remedy`."""
    body, mark, rest = read_bytes(path, remedy).rpartition(MARK.encode())
    if not mark or rest[64:] != f"{REMARK}\n".encode():
        raise _damaged(path, "is damaged: its last line, which has its checksum, is missing or changed", remedy)
    if rest[:64] != _sha256(body).encode():
        raise _damaged(path, "was changed or damaged: it does not match its checksum", remedy)
    return body.decode()


def read_bytes(path: Path, remedy: str = "") -> bytes:
    """Read the bytes of a file. Raise a `DamagedFileError` that names the file if the system cannot read it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror or error}", remedy) from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file. Raise an `OSError` that names the file if the system cannot read it."""
    with add_path_to_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, FIELD).hexdigest()


@contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add the file's path to an `OSError`. The system names the file when it opens it, not when it reads or writes."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(directory: Path) -> None:
    """Sync a directory: wait until the names in it are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(file: IO[Any]) -> None:
    """Flush and sync an open file: wait until its bytes are on the disk."""
    file.flush()
    os.fsync(file.fileno())


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    with add_path_to_errors(path):
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            sync_file(file)
        draft.replace(path)
        sync_directory(path.parent)


def _damaged(path: Path, problem: str, remedy: str) -> DamagedFileError:
    return DamagedFileError(f"{path} {problem}. {remedy}".rstrip())


def _digest_of(document: Any) -> str:
    return _sha256(json.dumps(document, separators=(",", ":")).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
