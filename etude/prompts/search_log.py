"""The results of a search, in a file: a search that starts again takes them from there, up to where it was stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from etude.errors import RunError
from etude.integrity import sync_file

FILE = "search.jsonl"
"""Its first line has the settings of the search. Each other line has the name of a result, and the result."""
Result = dict[str, Any]


class SearchLog:
    """Results by their names. A search draws everything from its seed, so with equal results it goes the same way."""

    def __init__(self, directory: Path | None, settings: Mapping[str, Any]) -> None:
        """Open the log of a directory, or begin one. directory: None stores nothing."""
        self._results: dict[str, Result] = {}
        self._file = None
        if directory is None:
            return
        path = directory / FILE
        kept = self._read(path, dict(settings)) if path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._file.truncate(kept)  # without the line that a kill cut
        if not kept:
            self._write({"settings": dict(settings)})

    def __len__(self) -> int:
        return len(self._results)

    @property
    def rollouts(self) -> int:
        """The number of rollouts of all results."""
        return sum(result.get("rollouts", 0) for result in self._results.values())

    def find(self, name: str) -> Result | None:
        """Return a result of this search, or of the one that was stopped; None if there is none."""
        return self._results.get(name)

    def add(self, name: str, result: Result) -> None:
        """Store a result, and wait until it is on the disk."""
        self._results[name] = result
        self._write({"name": name, "result": result})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        whole = os.fstat(self._file.fileno()).st_size
        rest = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            sync_file(self._file)
        except OSError:
            self._file.truncate(whole)  # the next line would follow a part of this one
            raise

    def _read(self, path: Path, settings: dict[str, Any]) -> int:
        """Read the results, and return the number of bytes of whole lines."""
        content = path.read_bytes()
        kept = content.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in content[:kept].split(b"\n") if line]
            before = lines[0]["settings"] if lines else settings
            self._results = {line["name"]: line["result"] for line in lines[1:]}
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(f"{path} is not the log of a search: {error}. Search in a new directory.") from error
        given = json.loads(json.dumps(settings))
        changed = [name for name in given if before.get(name) != given[name]]
        if changed:
            raise RunError(
                f"{path} belongs to a search with another {' and '.join(changed)}: {before.get(changed[0])!r} there, "
                f"{given[changed[0]]!r} here. Search in a new directory, or give what it had."
            )
        return kept
