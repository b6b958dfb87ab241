"""Files with a checksum: written content is read back, and any other content is reported with the file's name."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import DamagedFileError
from etude.integrity import add_path_to_errors, file_sha256, read_json, read_text, write_json, write_text

DOCUMENT = {"step": 21, "rate": 0.1, "none": None, "names": ["a", "é"], "deep": {"yes": True}}
TEXT = "recipe: train\nsteps: 4\n# sha256: a line of the text's own\n"


def flipped(data: bytes, place: int) -> bytes:
    """Return the same bytes with one bit changed."""
    return data[: place // 8] + bytes([data[place // 8] ^ 1 << place % 8]) + data[place // 8 + 1 :]


@pytest.mark.parametrize(
    ("write", "read", "content"),
    [(write_json, read_json, DOCUMENT), (write_text, read_text, TEXT)],
    ids=["json", "text"],
)
def test_every_flipped_bit_is_reported_or_changes_nothing(
    write: Callable[..., None], read: Callable[..., Any], content: Any, tmp_path: Path
) -> None:
    file = tmp_path / "data"
    write(file, content)
    assert read(file) == content and [path.name for path in tmp_path.iterdir()] == ["data"]
    whole = file.read_bytes()
    for place in range(0, 8 * len(whole), 5):
        file.write_bytes(flipped(whole, place))
        try:
            assert read(file) == content and read is read_json
        except DamagedFileError as error:
            assert str(file) in str(error)
    for length in range(0, len(whole) - 1, 5):
        file.write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match="damaged"):
            read(file)


@pytest.mark.parametrize("read", [read_json, read_text], ids=["json", "text"])
@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, random.Random(0).randbytes(999)],
    ids=["empty", "null", "list", "cut", "binary", "deep", "random"],
)
def test_garbage_is_reported_with_a_remedy(read: Callable[..., Any], content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"data is damaged: .*\. Bring it back\."):
        read(file, "Bring it back.")


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    """Reading the memory of a process at offset 0 is an input/output error, as from a failing disk."""
    failing = tmp_path / "failing"
    failing.symlink_to("/proc/self/mem")
    for read in (read_json, read_text):
        with pytest.raises(DamagedFileError, match=r"failing cannot be read: Input/output error"):
            read(failing)
    with pytest.raises(OSError, match=r"failing") as raised:
        file_sha256(failing)
    assert raised.value.errno == errno.EIO and os.strerror(errno.EIO) in str(raised.value)
    full = Path("/dev/full")
    with (
        pytest.raises(OSError, match=r"No space left on device: '/dev/full'"),
        add_path_to_errors(full),
        full.open("w") as file,
    ):
        file.write("text")
    with pytest.raises(OSError, match=r"no/data"):
        write_json(tmp_path / "no" / "data", {})
