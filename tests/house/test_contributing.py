"""CONTRIBUTING.md names functions, classes and options that exist, in the files where it says that they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house.documents import INLINE, ROOT, prose

CODE = ("etude/**/*.py", "plugins/**/*.py", "tests/**/*.py", ".github/**/*.yml")
IDENTIFIER = re.compile(r"([A-Za-z_]\w*)(?:\(.*\))?")
PLACED = re.compile(r"`([A-Za-z_]\w*)`\s+(?:of|in|\()\s*`([\w/]+\.py)`")
"""A name and its file: `name` of `path`, `name` in `path`, or `name` (`path`)."""
DEFINED = r"^\s*(?:(?:async )?def|class|type) {0}\b|^\s*{0}(?:: | = )"


def absent_names(text: str, root: Path = ROOT) -> Iterator[str]:
    """Yield each name in backticks that no code has, and each that its file does not define."""
    text = prose(text)
    placed = PLACED.findall(text)
    for name, place in placed:
        if not re.search(DEFINED.format(name), (root / place).read_text(encoding="utf-8"), flags=re.MULTILINE):
            yield f"`{name}` is not in {place}."
    others = {found[1] for code in INLINE.findall(text) if (found := IDENTIFIER.fullmatch(code))}
    for name in sorted(others - {name for name, _ in placed}):
        # The whole word; a pattern that begins with letters is found ten times as fast as one that begins with \b.
        if not re.search(rf"{name}(?<!\w{name})\b", code_of(root)):
            yield f"`{name}` is nowhere in the code."


@cache
def code_of(root: Path) -> str:
    """Return the text of all code, without this file and its made-up names."""
    paths = (path for pattern in CODE for path in root.glob(pattern) if path != Path(__file__))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_every_name_in_contributing_exists() -> None:
    assert not list(absent_names((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("`PolicyLoss` (`etude/algorithms/base.py`), `LOSSES`, `main([...])`, `key=value`", None),
        ("`PolicyLoss` of `etude/algorithms/kl.py`", "`PolicyLoss` is not in etude/algorithms/kl.py."),
        ("`_no_such_name` of\n`etude/algorithms/base.py`", "`_no_such_name` is not in etude/algorithms/base.py."),
        ("see `_no_such_name`", "`_no_such_name` is nowhere in the code."),
        ("see `no_such_name(1)`", "`no_such_name` is nowhere in the code."),
    ],
)
def test_a_name_that_does_not_exist_is_reported(text: str, says: str | None) -> None:
    assert list(absent_names(text)) == ([] if says is None else [says])
