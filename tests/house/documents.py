"""Read the project's documents: their links, the code that they name, their examples and commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
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
    """Return the pages that users read."""
    below = {"docs": "*.md", "etude": "README.md", "skills": "*.md"}
    folders = [path for folder, name in below.items() for path in sorted((root / folder).rglob(name))]
    return [path for path in (*sorted(root.glob("*.md")), *folders) if path.is_file()]


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", text)


def blocks(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks in these languages."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings: lower case, no punctuation, hyphens for spaces, a number if repeated."""
    names: set[str] = set()
    for heading in HEADING.findall(prose(text)):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeats = sum(other == slug or re.fullmatch(re.escape(slug) + r"-\d+", other) is not None for other in names)
        names.add(f"{slug}-{repeats}" if repeats else slug)
    return names


def unexplained_metrics(metrics: Path, heading: str = "## Reinforcement learning") -> set[str]:
    """Return the metrics of a run that no row below this heading names."""
    page = (ROOT / "docs/reference/metrics.md").read_text().partition(heading)[2].partition("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.+?) \|", page, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
    measured = {name for line in metrics.read_text().splitlines() for name in json.loads(line)}
    return {name for name in measured if not any(fnmatchcase(name, known) for known in names)}


def broken_links(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield each link to a missing file or heading. Links to the web are not checked."""
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
"""A prefix of metrics that is also the name of a package."""


def broken_names(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield each `inline code` that looks like a path or a module of the repository, and is neither."""
    bases = (root, root / "etude", page.parent)
    for code in INLINE.findall(prose(page.read_text())):
        if re.fullmatch(r"etude(\.\w+)+(:\w+)?", code):
            if not _is_name(code):
                yield f"{page.name} names {code}, which cannot be imported."
        elif code.startswith(METERED) and "." not in code:
            continue  # tests/recipes/collect/test_agent_rollouts.py compares them with the metrics of a run
        elif _looks_like_path(code, root) and not any((base / code).exists() for base in bases):
            yield f"{page.name} names {code}, which does not exist."


def commands(page: Path) -> list[list[str]]:
    """Yield every `etude …` and `make …` command of a page, as words, up to any `[optional]` or `<placeholder>`."""
    text = page.read_text()
    lines = [line for block in blocks(text, *SHELLS) for line in block.replace("\\\n", " ").splitlines()]
    lines += INLINE.findall(prose(text))
    result = []
    for line in lines:
        if command := re.match(r"(?:\$ )?(?:\.venv/bin/)?((?:etude|make) +\S.*)", line.strip()):
            plain = re.split(r"\s(?:\[|<|…|\.\.\.)|\s#|\s[|&;>]", command[1])[0]
            result.append(shlex.split(plain))
    return result


@cache
def _folders(root: Path) -> frozenset[str]:
    """Return the folders of the repository, without those that runs and builds create."""
    left = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    folders = (path.name for base in (root, root / "etude") for path in base.iterdir() if path.is_dir())
    return frozenset(folders) - left


def _looks_like_path(code: str, root: Path) -> bool:
    if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)*/?", code):
        return False
    known_folder = "/" in code and code.split("/")[0] in _folders(root)
    return known_folder or re.search(r"\w\.(py|md|toml|txt)$", code) is not None


def _is_name(code: str) -> bool:
    """Return whether `package.module:Name` or `package.module.Name` can be imported.

    True too if it needs a package that is absent: the tools for the documents do without optional ones.
    """
    parts = re.split(r"[.:]", code)
    for count in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not f"{error.name}.".startswith("etude."):
                return True
            continue
        for name in parts[count:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False
