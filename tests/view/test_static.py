"""The files of the pages: small, of our own make or unchanged copies, and free of what makes text into markup."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import etude.view

STATIC = Path(etude.view.__file__).parent / "static"
OWN = sorted(path for path in STATIC.glob("*") if path.suffix in (".js", ".css"))
VENDORED = {
    "preact-htm.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
}
"""SHA-256 of the files as the packages have them; `LICENSES.txt` names the packages."""
MOST_LINES = 2905
FORBIDDEN = re.compile(
    r"https?://|innerHTML|outerHTML|insertAdjacent|dangerouslySet|\beval\(|new Function|document\.write"
)


def test_the_pages_are_small_and_their_lines_short() -> None:
    lines = [(path.name, line) for path in OWN for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) <= MOST_LINES
    assert not [f"{name}: {line}" for name, line in lines if len(line) > 120 or line != line.rstrip()]


def test_no_page_makes_markup_of_text_or_names_another_server() -> None:
    found = [f"{path.name}: {word}" for path in OWN for word in FORBIDDEN.findall(path.read_text(encoding="utf-8"))]
    assert not found
    assert "http" not in (STATIC / "index.html").read_text(encoding="utf-8")


def test_every_import_names_a_file_and_what_it_exports() -> None:
    for path in OWN:
        for names, file in re.findall(r"import \{([^}]*)\} from \"([^\"]+)\"", path.read_text(encoding="utf-8")):
            text = (path.parent / file).read_text(encoding="utf-8")
            exported = set(re.findall(r"export (?:async )?(?:function|const) (\w+)|\bas (\w+)", text)) | set(
                re.findall(r"(\w+)(?=[,\s}])", " ".join(re.findall(r"export \{([^}]*)\}", text)))
            )
            known = {name for found in exported for name in (found if isinstance(found, tuple) else (found,))}
            missing = {name.strip() for name in names.split(",") if name.strip()} - known
            assert not missing, f"{path.name} imports {missing} from {file}"


def test_vendored_files_are_unchanged_and_their_licences_are_kept() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()}
    licences = found.pop("LICENSES.txt")
    assert licences and found == VENDORED
    text = (STATIC / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")
    assert text.count("Permission is hereby granted") == 2 and "Apache License" in text
    assert all(name in text for name in VENDORED)
