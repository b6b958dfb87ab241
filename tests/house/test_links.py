"""The documents name only existing things: links, headings, paths and modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.documents import LINK, ROOT, anchors, blocks, broken_links, broken_names, documents
from tests.sweeps import sweep

PAGES = documents()


@sweep("page", PAGES)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert not list(broken_links(page))


@sweep("page", PAGES)
def test_every_named_path_and_module_exists(page: Path) -> None:
    assert not list(broken_names(page))


def test_the_required_pages_exist() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    pages = {"docs/internals/architecture.md", "docs/internals/tour.md"}
    assert names >= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", *pages}


def test_the_tour_counts_its_stops_and_each_leads_to_a_file() -> None:
    text = (ROOT / "docs/internals/tour.md").read_text()
    stops = re.findall(r"^(?:#+ )?(\d+)\. (.*(?:\n(?!(?:#+ )?\d+\. ).*)*)", text, flags=re.MULTILINE)
    assert [int(number) for number, _ in stops] == list(range(1, len(stops) + 1))
    assert len(stops) > 3
    seen: list[str] = []
    for number, body in stops:
        files = [target for target in LINK.findall(body) if target.startswith("../../")]
        assert files, f"stop {number} of the tour leads to no file"
        assert files[0] not in seen, f"stop {number} of the tour leads to {files[0]} a second time"
        seen.append(files[0])


def test_every_guide_begins_with_a_command_or_a_program() -> None:
    for page in (ROOT / "docs/guides").glob("*.md"):
        first = blocks(page.read_text(encoding="utf-8").partition("\n## ")[0], "sh", "py", "python")
        assert first, page.name
        assert all(
            (ROOT / name).exists() for block in first for name in re.findall(r"^python (\S+)", block, re.MULTILINE)
        )


def test_an_entry_of_the_changelog_is_one_line() -> None:
    entries = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].splitlines()[1:]
    assert not [line for line in entries if line and (len(line) > 120 or not line.startswith(("- ", "## ", "### ")))]


def test_every_fault_has_its_test() -> None:
    lines = (ROOT / "docs/internals/faults.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.endswith("| its test |")]
    assert len(rows) > 40
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row.split(" | ")[-1])
        assert tests, row
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)


PAGE = """\
# A *first* page: `code`!

See [there](docs/b.md#two-words), [here](#a-first-page-code), [web](https://example.org/no#where) and `etude/real.py`.
Also `etude.errors`, `etude.errors:ConfigError`, `real.py`, `a/b`, `key=value` and `module:Name`.

```sh
[not a link](nowhere.md) `etude/nowhere.py`
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "etude").mkdir()
    (tmp_path / "etude/real.py").touch()
    (tmp_path / "docs/b.md").write_text("# One\n## Two words\n## Two words\n")
    path = tmp_path / "a.md"
    path.write_text(PAGE)
    return path


def test_a_sound_page_passes(page: Path) -> None:
    assert list(broken_links(page, page.parent)) == []
    assert list(broken_names(page, page.parent)) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[x](docs/c.md)", "links to docs/c.md, which does not exist"),
        ("![x](plot.png)", "links to plot.png"),
        ("[x](docs/b.md#three)", "b.md has no such heading"),
        ("[x](#nowhere)", "a.md has no such heading"),
        ("[x](../../../outside.md)", "does not exist"),
        ("`etude/unreal.py`", "names etude/unreal.py"),
        ("`unreal.py`", "names unreal.py"),
        ("`docs/none/`", "names docs/none/"),
        ("`etude.no_such_module`", "cannot be imported"),
        ("`etude.errors:NoSuchError`", "cannot be imported"),
        ("`etude.errors.NoSuchError`", "cannot be imported"),
    ],
)
def test_broken_links_and_names_are_reported(page: Path, text: str, says: str) -> None:
    page.write_text(PAGE + text + "\n")
    (broken,) = [*broken_links(page, page.parent), *broken_names(page, page.parent)]
    assert says in broken


def test_repeated_headings_have_numbered_anchors() -> None:
    assert anchors("# One\n## Two words\n## Two words\n") == {"one", "two-words", "two-words-1"}
