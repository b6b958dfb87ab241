"""The runs below a directory, by name.

A name is looked up among the runs that were found, and is never made into a path.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from etude.config.secrets import MASK
from etude.errors import ConfigError, NotFoundError, StoreError
from etude.observe.jsonl import METRICS_FILE
from etude.recipes.run.directory import JOURNAL, OPTIONS
from etude.store import open_store
from etude.view.run_reader import RunReader

RUN_FILES = frozenset({OPTIONS, METRICS_FILE, JOURNAL})
"""A directory with one of these files is a run."""
NOWHERE = Path(os.devnull)
"""The directory of a queue in a database: it has no files."""
DEPTH = 3
"""Levels of directories below the root that are searched: a sweep has its runs on the second."""
MOST_DIRECTORIES = 20_000
"""Directories that are searched at most, so that a root such as a home directory ends."""
RESCAN_S = 2.0
"""Seconds for which the found runs count as current."""
MOST_OPEN = 8
"""Runs whose journal and index stay open; the one that was used longest ago is closed first."""


class RunCatalog:
    """The runs below a root, or the root itself if it is a run; or the rollout queue in a database."""

    def __init__(self, root: Path | str) -> None:
        """root: a directory, or the address of a database."""
        self._database = root if isinstance(root, str) else ""
        self.root = NOWHERE if self._database else Path(root)
        if not self._database and not self.root.is_dir():
            named = MASK if "@" in str(root) else root  # the address of a database, mistyped, has a password
            raise ConfigError(
                f"There is no directory {named} (seen from {Path.cwd()}). Name a run's directory, or one that has runs "
                "below it: `etude view runs`."
            )
        self._lock = threading.RLock()
        self._found: dict[str, Path] = {}
        self._scanned_at = -RESCAN_S
        self._readers: dict[str, RunReader] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        """The runs that were read, the one read last at the end."""
        if self._database:
            with closing(open_store(self._database, read_only=True)) as journal:
                self._found = {journal.name: NOWHERE}
                self._scanned_at = math.inf

    def directories(self, *, within_s: float = RESCAN_S) -> dict[str, Path]:
        """Return the directory of each run, by name, as of at most `within_s` seconds ago."""
        with self._lock:
            if time.monotonic() - self._scanned_at >= within_s:
                self._found = dict(_find_runs(self.root))
                self._scanned_at = time.monotonic()
            return self._found

    @contextmanager
    def reader(self, name: str, *, briefly: bool = False) -> Iterator[RunReader]:
        """Yield the reader of a run, for one thread at a time.

        briefly: only small files are read. So the run does not take the place of another, and no query is waited for.
        """
        idle: list[RunReader] = []
        with self._lock:
            directory = self._found.get(name) or self.directories(within_s=0.0).get(name)
            if directory is None:
                raise NotFoundError(f"There is no run '{name}' here. The page of all runs lists them.")
            if name not in self._readers:
                self._readers[name] = RunReader(name, directory, self._database)
            reader = self._readers[name]
            if not briefly:
                self._recent[name] = None
                self._recent.move_to_end(name)
                while len(self._recent) > MOST_OPEN:
                    idle.append(self._readers[self._recent.popitem(last=False)[0]])
        for other in idle:
            with other.lock:
                other.close()
        with nullcontext() if briefly else reader.lock:
            try:
                yield reader
            except StoreError:
                if self._database and not briefly:  # the connection may be lost
                    reader.close()
                raise

    def close(self) -> None:
        """Close all readers."""
        with self._lock:
            readers = list(self._readers.values())
            self._readers.clear()
            self._recent.clear()
        for reader in readers:
            with reader.lock:
                reader.close()


def _find_runs(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the runs with their names, in the order of names."""
    if _names(root) & RUN_FILES:
        yield root.resolve().name, root
        return
    found: list[tuple[str, Path]] = []
    waiting, seen = [(root, 0)], 0
    while waiting and seen < MOST_DIRECTORIES:
        directory, depth = waiting.pop()
        seen += 1
        if depth and _names(directory) & RUN_FILES:
            found.append((directory.relative_to(root).as_posix(), directory))
        elif depth < DEPTH:
            waiting += [(path, depth + 1) for path in _subdirectories(directory)]
    yield from sorted(found)


def _names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))  # noqa: PTH208  # names without a path each
    except OSError:  # not readable: no run of this user
        return set()


def _subdirectories(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.name[0] != "." and entry.is_dir()]
    except OSError:
        return []
