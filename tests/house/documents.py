"""Read the project's documents: their links, the code they name, the examples and the commands they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^[ ]*```(\w*)[^\n]*\n(.*?)^[ ]*```[ ]*$", flags=re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", flags=re.MULTILINE)
SHELLS = ("bash", "console", "sh", "shell")


def documents(root: Path = ROOT) -> list[Path]:
    """The pages that people read."""
    return [path for path in (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))) if path.is_file()]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks in these languages."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings make: lower case, no punctuation, hyphens for spaces, a number if repeated."""
    found: set[str] = set()
    for heading in HEADING.findall(prose(text)):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeats = sum(other == slug or re.fullmatch(re.escape(slug) + r"-\d+", other) is not None for other in found)
        found.add(f"{slug}-{repeats}" if repeats else slug)
    return found


def broken_links(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Each link to a file or a heading that is not there. What lies on the web is not looked up."""
    for target in LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = unquote(target).partition("#")
        path = (page.parent / place).resolve() if place else page
        if not path.exists() or not path.is_relative_to(root):
            yield f"{page.name} links to {target}, which does not exist."
        elif anchor and anchor not in anchors(path.read_text()):
            yield f"{page.name} links to {target}, but {path.name} has no such heading."


METERED = "agents/"
"""What metrics begin with that are called as a room is."""


def broken_names(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Each `inline code` that looks like a path or a module of the repository, and is neither."""
    bases = (root, root / "etude", page.parent)
    for code in INLINE.findall(prose(page.read_text())):
        if re.fullmatch(r"etude(\.\w+)+(:\w+)?", code):
            if not _is_name(code):
                yield f"{page.name} names {code}, which cannot be imported."
        elif code.startswith(METERED) and "." not in code:
            continue  # tests/recipes/collect/test_agent_rollouts.py compares them with what a run measures
        elif _looks_like_path(code, root) and not any((base / code).exists() for base in bases):
            yield f"{page.name} names {code}, which does not exist."


def commands(page: Path) -> list[list[str]]:
    """Every `etude …` and `make …` command that a page shows, as words, up to any `[optional]` or `<placeholder>`."""
    text = page.read_text()
    lines = [line for block in blocks(text, *SHELLS) for line in block.replace("\\\n", " ").splitlines()]
    lines += INLINE.findall(prose(text))
    found = []
    for line in lines:
        if command := re.match(r"(?:\$ )?(?:\.venv/bin/)?((?:etude|make) +\S.*)", line.strip()):
            plain = re.split(r"\s(?:\[|<|…|\.\.\.)|\s#|\s[|&;>]", command[1])[0]
            found.append(shlex.split(plain))
    return found


@cache
def _folders(root: Path) -> frozenset[str]:
    """Those of the repository, and none that runs or builds leave behind."""
    left = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    folders = (path.name for base in (root, root / "etude") for path in base.iterdir() if path.is_dir())
    return frozenset(folders) - left


def _looks_like_path(code: str, root: Path) -> bool:
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)*/?", code):
        return False
    known_folder = "/" in code and code.split("/")[0] in _folders(root)
    return known_folder or re.search(r"\w\.(py|md|toml|txt)$", code) is not None


def _is_name(code: str) -> bool:
    """Whether `package.module:Name` or `package.module.Name` can be imported."""
    parts = re.split(r"[.:]", code)
    for count in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False
