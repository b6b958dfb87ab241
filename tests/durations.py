"""The durations of tests: recorded, checked in, and compared with at the end of every run.

The record (`tests/durations.json`, made by `make durations`) holds each test and each shared fixture of 0.2 seconds or
more. A test over a quarter of a second, or one that needs a fixture over two, is `slow`: `tests/tiers.py` marks it. A
test that takes four times that and has no marker is printed, and so is one that takes twice its recorded time. Neither
fails the run, because a busy machine proves nothing.

Seconds are wall-clock seconds, without the time that the process waited for a core. A test's seconds are its own: the
time of a shared fixture counts for that fixture.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest
from hypothesis import is_hypothesis_test

from tests.sweeps import inner

RECORD = Path(__file__).with_name("durations.json")
LEAST_S = 0.2
"""Seconds below which a test is not recorded."""
SLOW_S = 0.25
"""Seconds beyond which a test is not for `make check`."""
SLOW_FIXTURE_S = 2.0
"""Seconds of a shared fixture above which the tests that use it are not."""
CHECK_SHARE = 12
"""The divisor of a property's number of random examples in `make check`."""
SLOW_PROPERTY_S = 24.0
"""Recorded seconds of a property in `make test` above which it is not for `make check`."""
MARKERS = frozenset({"slow", "kept", "integration", "soak", "gpu"})
"""The markers of tests that may take longer."""
SHOWN = 25
"""The most lines that are printed, the longest durations first."""


def clock() -> float:
    """Return wall-clock seconds, without those that the main thread waited for a core, if the system counts them.

    The clock is the one at import: a test may replace `time.monotonic`.
    """
    try:
        waited = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        waited = 0.0
    return monotonic() - waited


def allowed(item: pytest.Item) -> float:
    """Return the seconds that a test may take without being slow. The record is of more examples than `make check`
    draws."""
    test = inner(item.obj) if isinstance(item, pytest.Function) else None
    return SLOW_PROPERTY_S if test is not None and is_hypothesis_test(test) else SLOW_S


def key_of(nodeid: str) -> str:
    """Return a test's name in the record: its path below `tests/`, without the group that pytest-xdist appends."""
    if nodeid.rfind("@") > nodeid.rfind("]"):
        nodeid = nodeid.rpartition("@")[0]
    return nodeid.removeprefix("tests/")


def fixture_key(place: str, name: str) -> str:
    """Return a fixture's name in the record: the file or folder below `tests/` that it is for, and its own name."""
    return f"{place.removeprefix('tests').lstrip('/')}::{name}"


@dataclass(frozen=True)
class Record:
    """The seconds of tests and of shared fixtures, by their names."""

    tests: Mapping[str, float] = field(default_factory=dict)
    fixtures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = RECORD) -> Record:
        """Read the record of a file; it is empty if there is no file."""
        if not path.exists():
            return cls()
        stored = json.loads(path.read_text())
        return cls(_joined(stored["tests"]), _joined(stored["fixtures"]))

    def write(self, path: Path = RECORD) -> None:
        """Write one test a line, so that a change of one is a line of a diff."""
        path.write_text(json.dumps({"fixtures": _split(self.fixtures), "tests": _split(self.tests)}, indent=1) + "\n")

    def is_slow(self, test: str, fixtures: Iterable[str] = (), allowed: float = SLOW_S) -> bool:
        """Return whether a test takes longer than it may, or uses a fixture of over two seconds."""
        long = any(self.fixtures.get(name, 0.0) > SLOW_FIXTURE_S for name in fixtures)
        return long or self.tests.get(test, 0.0) > allowed

    def updated(self, tests: Mapping[str, float], fixtures: Mapping[str, float], root: Path) -> Record:
        """Return the record after a run: tests that ran are replaced, tests that no longer exist are dropped."""
        return Record(_merged(self.tests, tests, root), _merged(self.fixtures, fixtures, root))


class Watch:
    """The pytest plug-in that measures, compares, and records if `--record-durations` is given."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._own, self._shared = 0.0, 0.0
        self._made: dict[str, float] = {}
        self.tests: dict[str, float] = {}
        self.fixtures: dict[str, float] = {}
        self.unmarked: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        began, before = clock(), self._shared
        try:
            return (yield)
        finally:
            took, inner = clock() - began, self._shared - before
            self._made[fixture_key(fixturedef.baseid, fixturedef.argname)] = took - inner
            self._shared = before + took

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._own, self._shared, self._made = 0.0, 0.0, {}
        return (yield from self._timed())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        return (yield from self._timed())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call":
            marked = any(item.get_closest_marker(name) for name in MARKERS)
            own = max(0.0, self._own - self._shared)
            report.user_properties.append(("seconds", [own, self._made, marked or own <= 4 * allowed(item)]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the measurements of this process, or of another process of pytest-xdist."""
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "seconds":
                own, made, right = cast(tuple[float, dict[str, float], bool], value)
                test = key_of(report.nodeid)
                self.tests[test] = own
                self.fixtures |= {fixture: max(took, self.fixtures.get(fixture, 0.0)) for fixture, took in made.items()}
                self.unmarked |= set() if right else {test}

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if config.getoption("record_durations"):
            self.record.updated(self.tests, self.fixtures, config.rootpath / "tests").write()
            terminalreporter.write_line(f"durations: {len(self.tests)} tests are recorded in {RECORD.name}.")
            return
        if lines := self.lines():
            terminalreporter.section("durations")
            for line in lines:
                terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """Return a line for each test that takes long without a marker, or twice its recorded time."""
        return [*self._unmarked(), *self._doubled()]

    def _unmarked(self) -> list[str]:
        over = {test: self.tests[test] for test in self.unmarked}
        return [
            f"{took:.1f} s, and no marker: {test}. Make it quicker, or mark it `slow`." for test, took in _longest(over)
        ]

    def _doubled(self) -> list[str]:
        known = self.record.tests
        over = {test: took for test, took in self.tests.items() if test in known and took > 2 * known[test]}
        return [f"{took:.1f} s, and {known[test]:.1f} s when it was recorded: {test}." for test, took in _longest(over)]

    def _timed(self) -> Generator[None, object, object]:
        began = clock()
        try:
            return (yield)
        finally:
            self._own += clock() - began


def _longest(tests: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(tests.items(), key=lambda pair: -pair[1])[:SHOWN]


def _merged(before: Mapping[str, float], measured: Mapping[str, float], root: Path) -> dict[str, float]:
    earlier = {name: took for name, took in before.items() if name not in measured and _is_there(name, root)}
    return earlier | {name: round(took, 2) for name, took in measured.items() if took >= LEAST_S}


def _is_there(name: str, root: Path) -> bool:
    """Return whether the file of a test or fixture still defines it. The file of a conftest's fixture is found by its
    folder."""
    place, _, function = name.partition("::")
    path = root / place if place.endswith(".py") else root / place / "conftest.py"
    return path.is_file() and f"def {function.partition('[')[0].rpartition('::')[2]}(" in path.read_text()


def _split(seconds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    files: dict[str, dict[str, float]] = {}
    for name in sorted(seconds):
        place, _, function = name.partition("::")
        files.setdefault(place, {})[function] = seconds[name]
    return files


def _joined(files: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{place}::{function}": took for place, tests in files.items() for function, took in tests.items()}
