"""Write llms.txt: every page of the documents with one line, for programs that read the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAVIGATION = ROOT / "mkdocs.yml"
BROUGHT = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site whose files are not in docs/."""
ENTRY = re.compile(r"^( +)- (?:(.+?): ?)?(\S+\.md)?$", flags=re.MULTILINE)
NOT_PROSE = ("#", "<!--", "!", "```", "|", "-")
PROMISE = "At the end of this page "
"""The beginning of a guide's first sentence."""
NAMED = re.compile(r"^## (`[^`]+`(?:(?:, | and )`[^`]+`)*|[a-z_]+)$", flags=re.MULTILINE)
"""The headings that are names: of options, commands, losses, recipes."""
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def page() -> str:
    """Return the text of llms.txt: the headings are those of the site's navigation."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    summary = " ".join(next(_paragraphs(readme)).split())
    install = "Install it by `pip install etude`, and see it work by `etude demo`. `etude --help` lists the commands."
    return "\n".join(["# Etude", "", f"> {summary}", "", install, *_entries()]) + "\n"


def _entries() -> Iterator[str]:
    """Yield a heading for each part of the navigation, and a line for each page."""
    parts: list[tuple[int, str]] = []
    shown: list[str] = []
    for indent, title, uri in ENTRY.findall(NAVIGATION.read_text(encoding="utf-8").partition("\nnav:\n")[2]):
        parts = [part for part in parts if part[0] < len(indent)]
        if not uri:
            parts.append((len(indent), title))
            continue
        if (names := [name for _, name in parts]) != shown:
            shown = names
            yield from ("", f"## {': '.join(names)}", "")
        path = BROUGHT.get(uri, f"docs/{uri}")
        yield f"- [{title or names[-1]}]({path}): {_line(ROOT / path)}"


def _line(path: Path) -> str:
    """Return the first sentence of a page, and the names that are its headings."""
    text = path.read_text(encoding="utf-8")
    paragraph = " ".join(LINK.sub(r"\1", next(_paragraphs(text))).split())
    sentence = re.split(r"(?<=[.:])\s", paragraph)[0].rstrip(".:").removeprefix(PROMISE)
    names = ", ".join(NAMED.findall(text))
    return f"{sentence[0].upper()}{sentence[1:]}" + (f": {names}" if names else "")


def _paragraphs(text: str) -> Iterator[str]:
    return (part for part in re.split(r"\n\s*\n", text) if not part.startswith(NOT_PROSE))
