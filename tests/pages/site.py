"""Turn the repository's pages into a site with mkdocs.

The pages are written to be read in the repository, and link to each other and to files of code by their paths. On the
site README.md is the first page, CONTRIBUTING.md and CHANGELOG.md are pages too. A file of code that some page links to
gets a page that shows it. mkdocs calls `on_files` before it reads the pages, and `on_page_markdown` with each.

The search finds each option of a run by its name and by the words of its name, before the pages that mention them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from posixpath import relpath
from typing import Any
from urllib.parse import unquote

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BROUGHT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages outside docs/, and their names on the site."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}
SHIM = "https://unpkg.com/iframe-worker/shim"
LINK = re.compile(r"(\]\()([^()\s#]+)((?:#[^()\s]*)?\))")
OPTION_PAGES = re.compile(r"reference/(algorithms|configuration)/(?!other|supervised)")
"""The pages with the options of a run. Those of other commands are mostly the same."""
OPTION_TABLE = re.compile(r"<table>\s*<thead>\s*<tr>\s*<th>option</th>.*?</table>", flags=re.DOTALL)
OPTION_ROW = re.compile(r"<tr>\s*<td><code>([\w.]+)</code></td>")
OPTION_ENTRY = re.compile(r'<tr id="([\w.]+)">(.*?)</tr>', flags=re.DOTALL)
OPTION_BOOST, GUIDE_BOOST = 1.7, 1.2
"""The ranks of an option and of a guide among sections that have the same words in their titles."""
UNSEARCHED = ("reference/claims.md", "reference/mutations.md")
"""Pages that list tests, whose words are those of every other page."""
FENCE = re.compile(r"^ *```.*?^ *``` *$", flags=re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/, and the files that any page links to."""
    for name, uri in BROUGHT.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted(_linked()):
        files.append(File.generated(config, _uri(path), content=_shown(path)))
    files.append(File.generated(config, "llms.txt", content=_for_programs()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page for the site, and say how the search treats it."""
    if page.file.src_uri in UNSEARCHED:
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("guides/"):
        page.meta["search"] = {"boost": GUIDE_BOOST}
    return rewritten(markdown, page.file.src_uri)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Give each option of a page a place that a link can lead to."""
    if not OPTION_PAGES.match(page.file.src_uri):
        return html
    met = set[str]()

    def placed(row: re.Match[str]) -> str:
        if row[1] in met:  # several choices have it
            return row[0]
        met.add(row[1])
        return row[0].replace("<tr>", f'<tr id="{row[1]}">', 1)

    return OPTION_TABLE.sub(lambda table: OPTION_ROW.sub(placed, table[0]), html)


# After the search has written its index, and before the index is copied for pages without a server.
@event_priority(-50)
def on_post_build(config: Any) -> None:
    """Add each option of a run to the search."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["docs"] += _option_entries(Path(config.site_dir))
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def _option_entries(site: Path) -> list[dict[str, Any]]:
    """Return an entry of the search for each option, at its first place.

    `critic.train.learning_rate` has none, since it would stand beside `train.learning_rate` with the same words.
    """
    entries = dict[str, dict[str, Any]]()
    for page in sorted((site / "reference").rglob("*.html")):
        for name, cells in OPTION_ENTRY.findall(page.read_text(encoding="utf-8")):
            text = unescape(re.sub(r"<[^>]+>", "", cells.rpartition("<td>")[2])).strip()
            location = f"{page.relative_to(site).as_posix()}#{name}"
            entries.setdefault(name, {"location": location, "title": name, "text": text, "boost": OPTION_BOOST})
    return [entry for name, entry in entries.items() if name.partition(".")[2] not in entries]


def rewritten(markdown: str, uri: str) -> str:
    """Return a page's text with each link to a file of the repository leading to that file's page."""
    place = _place(uri)
    if place is None:
        return markdown

    def turned(link: re.Match[str]) -> str:
        target = _target(link[2], place)
        return link[0] if target is None else f"{link[1]}{relpath(_uri(target), Path(uri).parent.as_posix())}{link[3]}"

    fences = FENCE.findall(markdown)
    parts = [LINK.sub(turned, part) for part in FENCE.split(markdown)]
    return "".join(part + fence for part, fence in zip(parts, [*fences, ""], strict=True))


def _for_programs() -> str:
    """Return llms.txt with links to the pages of the site."""
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    return LINK.sub(lambda link: f"{link[1]}{_uri(ROOT / link[2]).removesuffix('.md')}.html{link[3]}", text)


def _place(uri: str) -> Path | None:
    """Return the path of a page in the repository; None for one that shows a file of code."""
    if uri.startswith("source/"):
        return None
    names = {brought: name for name, brought in BROUGHT.items()}
    return ROOT / names[uri] if uri in names else DOCS / uri


def _target(link: str, place: Path) -> Path | None:
    """Return the file that a link of a page leads to; None if it leads to no file of the repository."""
    if re.match(r"[a-z]+:", link):
        return None
    path = (place.parent / unquote(link)).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _uri(path: Path) -> str:
    """Return the name on the site of a file of the repository."""
    inner = path.relative_to(ROOT).as_posix()
    if inner in BROUGHT:
        return BROUGHT[inner]
    return path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else f"source/{inner}.md"


def _linked() -> Iterator[Path]:
    """Return every file and folder outside docs/ that a page links to."""
    files = set()
    for page in (*(ROOT / name for name in BROUGHT), *DOCS.rglob("*.md")):
        for link in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
            target = _target(link[2], page)
            if target is not None and not target.is_relative_to(DOCS) and target.name not in BROUGHT:
                files.add(target)
    yield from files


def _shown(path: Path) -> str:
    """Return a page that shows a file, or the content of a folder."""
    name = path.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n# {name}\n\n"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if entry.name[0] not in "._")
        return head + "".join(f"- `{name}`\n" for name in names)
    return f"{head}~~~~{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n~~~~\n"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the search index for pages that are opened as files from beside them, so that nothing is fetched."""
    return output.replace(SHIM, relpath("iframe-worker.js", str(Path(page.file.dest_uri).parent)))


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Do the same for the page of a missing page."""
    return output_content.replace(SHIM, "iframe-worker.js")
