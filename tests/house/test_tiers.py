"""The tiers of the tests: their markers, their recorded durations, and the lines that are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.durations import MARKERS, SLOW_FIXTURE_S, SLOW_S, Record, Watch, allowed, fixture_key, key_of
from tests.tiers import INTEGRATION_PATHS, SMOKE_PATHS, TEST_PATHS, fixtures_of, is_left_out, names_of

TESTS = Path(__file__).parents[1]
BY_HAND = re.compile(r"pytest\.mark\.integration\b|in_test\(|\bon\(|\b(?:a_ray|vllm_server|sglang_server)\b")
MOST_S = 900
MARKED = re.compile(r"pytest\.mark\.smoke\b")


def test_every_test_that_is_recorded_over_a_quarter_of_a_second_is_marked(request: pytest.FixtureRequest) -> None:
    record = Record.read()
    assert record.tests, "tests/durations.json is empty: run `make durations`."
    unmarked = [
        item.nodeid
        for item in request.session.items
        if record.is_slow(key_of(item.nodeid), fixtures_of(item), allowed(item)) and MARKERS.isdisjoint(names_of(item))
    ]
    assert not unmarked


def test_what_make_test_runs_was_recorded_with_few_seconds(request: pytest.FixtureRequest) -> None:
    """All tests take two cores nine minutes; the short tests and the start take half of that."""
    record = Record.read()
    left_out = {"integration", "soak", "gpu"}
    items = [item for item in request.session.items if left_out.isdisjoint(names_of(item))]
    tests = sum(record.tests.get(key_of(item.nodeid), 0.0) for item in items)
    fixtures = {name for item in items for name in fixtures_of(item)}
    assert tests + sum(record.fixtures.get(name, 0.0) for name in fixtures) < MOST_S


@pytest.mark.parametrize(
    ("nodeid", "key"),
    [
        ("tests/store/journal/test_sql.py::test_a", "store/journal/test_sql.py::test_a"),
        ("tests/store/journal/test_sql.py::test_a[x@y]", "store/journal/test_sql.py::test_a[x@y]"),
        ("tests/store/journal/test_sql.py::test_a[x@y]@ray", "store/journal/test_sql.py::test_a[x@y]"),
    ],
)
def test_a_test_has_one_name_in_every_process(nodeid: str, key: str) -> None:
    assert key_of(nodeid) == key


def test_a_fixture_is_known_by_its_place() -> None:
    assert fixture_key("tests", "a_ray") == "::a_ray"
    assert fixture_key("tests/store/journal/test_sql.py", "store") == "store/journal/test_sql.py::store"


def test_a_test_is_slow_by_itself_or_by_what_it_needs() -> None:
    fixtures = {"::server": SLOW_FIXTURE_S + 0.1, "::file": SLOW_FIXTURE_S}
    record = Record({"test_a.py::long": SLOW_S + 0.1, "test_a.py::short": SLOW_S}, fixtures)
    assert record.is_slow("test_a.py::long") and not record.is_slow("test_a.py::short")
    assert record.is_slow("test_a.py::new", ["::file", "::server"]) and not record.is_slow("test_a.py::new", ["::file"])


def test_a_record_is_written_and_read_and_forgets_what_is_gone(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): ...\n\ndef test_two(): ...\n")
    before = Record({"test_a.py::test_one[3]": 4.0, "test_a.py::gone": 3.0, "test_b.py::test_one": 3.0})
    after = before.updated({"test_a.py::test_two": 0.54321, "test_a.py::test_quick": 0.1}, {}, tmp_path)
    assert after.tests == {"test_a.py::test_one[3]": 4.0, "test_a.py::test_two": 0.54}
    after.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == after
    assert Record.read(tmp_path / "none.json") == Record()


TESTS_OF_A_FILE = """
import pytest, time

@pytest.fixture(scope="module")
def shared():
    time.sleep(0.6)

def test_first(shared): time.sleep(0.3)
def test_second(shared): pass
@pytest.mark.slow
def test_marked(): pass
"""


def test_the_time_of_a_shared_fixture_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_shared.py").write_text(TESTS_OF_A_FILE)
    watch = Watch(Record())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    plain = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", f"--rootdir={tmp_path}"]
    assert pytest.main([*plain, str(tmp_path)], plugins=[Options(), watch]) == 0
    assert 0.25 < watch.tests["test_shared.py::test_first"] < 0.55
    assert watch.tests["test_shared.py::test_second"] < 0.25
    assert watch.fixtures["test_shared.py::shared"] > 0.55
    assert watch.unmarked == set()


def test_unmarked_slow_tests_and_doubled_times_are_printed() -> None:
    watch = Watch(Record({"test_a.py::grown": 1.0, "test_a.py::steady": 3.0}))
    watch.tests = {"test_a.py::grown": 2.1, "test_a.py::steady": 5.9, "test_a.py::new": 2.5}
    watch.unmarked = {"test_a.py::new"}
    assert watch.lines() == [
        "2.5 s, and no marker: test_a.py::new. Make it quicker, or mark it `slow`.",
        "2.1 s, and 1.0 s when it was recorded: test_a.py::grown.",
    ]


def test_files_of_integration_are_not_imported_for_other_tiers() -> None:
    without = "not slow and not integration and not soak and not gpu"
    assert is_left_out(TESTS / "chaos", without) and is_left_out(TESTS / "chaos" / "test_kills.py", without)
    assert not is_left_out(TESTS / "store", without)
    assert not is_left_out(TESTS / "chaos", "integration and not soak") and not is_left_out(TESTS / "chaos", "")
    assert is_left_out(TESTS / TEST_PATHS[0], without) and not is_left_out(TESTS / TEST_PATHS[0], "not integration")


def test_smoke_imports_the_files_that_have_tests_of_it_and_no_others() -> None:
    marked = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if MARKED.search(path.read_text())}
    assert marked == set(SMOKE_PATHS)
    chosen = "smoke and not soak and not gpu"
    assert is_left_out(TESTS / "store" / "test_sql.py", chosen) and not is_left_out(TESTS / "store", chosen)
    assert not any(is_left_out(TESTS / name, chosen) for name in SMOKE_PATHS)


def test_contributing_says_when_each_integration_test_is_run() -> None:
    named = re.findall(r"`tests/([\w./]+)`", (TESTS.parent / "CONTRIBUTING.md").read_text())
    files = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    listed = {file for file in files if file.startswith(INTEGRATION_PATHS)}
    marked = {file for file in files if BY_HAND.search((TESTS / file).read_text())}
    assert not [file for file in listed | marked if not file.startswith(tuple(named))]


def test_every_test_of_smoke_is_integration(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        assert names_of(item) >= {"smoke", "integration"} or "smoke" not in names_of(item), item.nodeid


def test_every_test_of_a_server_is_integration(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        place = item.nodeid
        if "[vllm" in place or "[postgres]" in place or place.startswith(("tests/chaos/", "tests/learn/")):
            assert "integration" in names_of(item), place


class Options:
    """The option that the tests' conftest adds."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--record-durations", action="store_true")
