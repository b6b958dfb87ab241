"""The search over rollouts: its words, its bounds, and a damaged journal."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from etude.chat import Tokenizer
from etude.errors import ConfigError
from etude.records import Outcome
from etude.store import (
    AttemptEnded,
    AttemptRewarded,
    AttemptStarted,
    RolloutQueued,
    RolloutsAdmitted,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    open_store,
)
from etude.view.catalog import RunCatalog
from etude.view.queries import search
from etude.view.queries.search import TOOL_NAME, SearchPage, search_rollouts
from etude.view.queries.search_syntax import parse_search
from etude.view.queries.step import step_rollouts
from etude.view.run_reader import RunReader
from tests.view.made import Viewer, rollout_events, turn, write_run
from tests.worlds import make_tokenizer

CALL = 'I look.\n<tool_call>\n{"name": "find", "arguments": {"item": "Lamp"}}\n</tool_call>'
SHOWN = 8, 14
"""The ids that rollout 20 was shown between its answers."""
SCORED = 2**60 + 2**40 + 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps of ten rollouts; the third step has a retried rollout, a call of a tool and a failure."""
    directory = write_run(tmp_path_factory.mktemp("runs") / "run", steps=2)
    make_tokenizer(directory / "model")
    with closing(open_store(directory / "journal.sqlite")) as store:
        store.append([TaskIssued(10, 30, "lamps", {"prompt": "Where is the lamp?"})])
        store.append([RolloutQueued(rollout, 10, rollout - 20) for rollout in (20, 21, 22)])
        store.append([AttemptStarted(20, 0), AttemptEnded(20, 0, Outcome.INFRA_ERROR, "the ENGINE died", retry=True)])
        store.append([AttemptStarted(20, 1), TurnRecorded(20, 1, replace(turn(3, 2, CALL), tags=("planner",)))])
        shown = np.arange(*SHOWN, dtype=np.int32)
        store.append([TurnRecorded(20, 1, replace(turn(4, 2, "On shelf 3"), index=1, prompt=shown))])
        store.append([AttemptRewarded(20, 1, 0.25, {"found": 1.0}, truncated=True)])
        store.append([AttemptEnded(20, 1, Outcome.SUCCEEDED)])
        store.append(
            [*rollout_events(21, None, turn(2, 2, "[find(item='lamp')]")), *rollout_events(22, 1.0, turn(9, 2))]
        )
        store.append([RolloutsAdmitted(3, (20, 22), 11, 2)])
        store.append(
            [TaskIssued(SCORED, 0, "lamps", {"prompt": "Scored"}, "val"), RolloutQueued(SCORED, SCORED, 0, "val")]
        )
        store.append([*rollout_events(SCORED, 1.0, turn(2, 2)), TaskDropped(SCORED, 3, "it was asked to score")])
    return directory


@pytest.fixture
def reader(run: Path) -> Iterator[RunReader]:
    with closing(RunCatalog(run)) as catalog, catalog.reader("run") as reader:
        yield reader


def searched(reader: RunReader, query: str, start: str = "", most: int = 1000) -> SearchPage:
    """Search without a bound of time, which a slow machine would meet."""
    return search_rollouts(reader, query, start, most=most, seconds=60.0)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", [*range(22, -1, -1)]),
        ("reward<0.5 reward>0", [20]),
        ("reward/found=1", [20]),
        ("-reward>=0", [21]),
        ("tokens>4", [22, 20]),
        ("turns:2", [20]),
        ("attempts>1", [20]),
        ("step=2 batch:no", [19, 18]),
        ("step<=1 reward=1", [9, 8, 7, 5, 3, 1]),
        ("step>2 -step=4", [22, 21, 20]),
        ("row=30", [22, 21, 20, 7, 6]),
        ("rollout<2", [1, 0]),
        ("task=3", [7, 6]),
        ("outcome:Failed", [21]),
        ("error:engine", [20]),
        ('error:"tool broke"', [21]),
        ("tool:find", [21, 20]),
        ("tool:find -error:tool", [20]),
        ("tag:plan", [20]),
        ("source:lamps", [22, 21, 20]),
        ("truncated:yes", [20]),
        ('"the LAMP"', [22, 21, 20]),
        ("prompt:lamp answer:shelf", [20]),
        ('"answer 1"', [19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 1]),
        ("use:evaluation", [SCORED]),
        ("-use:training step=3", [SCORED]),
        (f"rollout={SCORED}", [SCORED]),
        (f"rollout={10**400}", []),
        ("<tool_call>", [20]),
        ('unknown: or "reward<"', []),
        ("nothing", []),
    ],
)
def test_all_words_of_a_search_hold_for_what_it_finds(query: str, found: list[int], reader: RunReader) -> None:
    page = searched(reader, query)
    assert page.rollouts.columns["rollout"] == found and (page.damaged, page.next) == (0, "")


def test_the_newest_rollout_is_that_of_the_evaluations_if_these_are_searched(reader: RunReader) -> None:
    newest = [searched(reader, query).newest for query in ("nothing", "use:evaluation", f"rollout={SCORED}")]
    assert newest == [22, SCORED, SCORED]


def test_a_row_shows_the_text_where_it_was_found(reader: RunReader) -> None:
    def texts(query: str) -> Any:
        return searched(reader, query).rollouts.columns["text"]

    assert texts("lamp arguments") == ["Where is the lamp?"] and texts("answer:arguments") == [CALL]
    assert texts("error:engine") == ["the ENGINE died"] and texts("outcome:failed") == ["the tool broke"]
    row = searched(reader, "rollout=20").rollouts.columns
    assert {name: values[0] for name, values in row.items() if name not in ("text", "why")} == {
        "rollout": 20,
        "task": 10,
        "step": 3,
        "status": "succeeded",
        "reward": 0.25,
        "turns": 2,
        "tokens": 7,
        "attempts": 2,
    }


def test_what_stands_between_answers_is_decoded(run: Path, reader: RunReader, tmp_path: Path) -> None:
    words = Tokenizer.load(run / "model").decode([*range(*SHOWN)])
    assert words.strip() and searched(reader, f'observation:"{words.strip()}"').rollouts.columns["rollout"] == [20]
    assert searched(reader, f'"{words.strip()}"').rollouts.columns["rollout"] == []
    reply = Viewer(write_run(tmp_path / "other", steps=1)).ask("api/search?run=other&q=observation:x")
    assert reply.status_code == 422 and "no longer at its path" in reply.json()["error"]


@pytest.mark.parametrize("query", ["reward>=0", "step<=3 reward>=0"])
def test_a_search_stops_at_its_bounds_and_goes_on_from_there(query: str, reader: RunReader) -> None:
    whole = searched(reader, query).rollouts.columns["rollout"]
    found: list[int] = []
    start, looked = "", 0
    for _ in range(8):
        page = searched(reader, query, start, most=3)
        found, start, looked = [*found, *page.rollouts.columns["rollout"]], page.next, looked + page.looked
        if not start:
            break
    assert found == whole and looked == 23 and len(found) == 22
    page = search_rollouts(reader, query, seconds=0.0)
    assert (page.looked, page.reached, page.next.rpartition(":")[2]) == (1, 22, "22")
    assert page.partial.startswith("The search reached `seconds=0` at rollout 22.")


def test_reading_a_large_step_takes_none_of_the_time_of_its_search(
    reader: RunReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    read = step_rollouts

    def read_slowly(*arguments: Any) -> Any:
        now[0] += 0.3
        return read(*arguments)

    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(search, "step_rollouts", read_slowly)
    assert search_rollouts(reader, "step:1", seconds=0.25).looked > 1


def test_a_search_reads_few_answers_that_its_time_does_not_suffice_for(
    reader: RunReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    read = reader.journal.turn_bodies

    def read_slowly(rollouts: Any) -> Any:
        now[0] += 0.02 * len(rollouts)
        return read(rollouts)

    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(reader.journal, "turn_bodies", read_slowly)
    page = search_rollouts(reader, "answer:nowhere", seconds=0.3)
    assert page.looked >= 12, "15 fit into the time"


def test_an_open_tag_of_a_tool_does_not_reach_over_the_next() -> None:
    assert TOOL_NAME.findall("<function=<function=find>")[0][1] == "find", "a long row of tags would take minutes"


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ('error:"timed out', "Close each"),
        ('"a"b', "leave a space"),
        ("length<3", "knows no `length`"),
        ("reward<much", "`much` is no number"),
        ("outcome:lost", "takes one of queued"),
        ("error<3", "knows no `error`"),
        ("reward<", "nothing after it"),
        ("lamp -tool:", "nothing after it"),
        ("-", "nothing after it"),
        ("a " * 21, "has 21 words"),
    ],
)
def test_a_word_that_is_not_known_is_refused(query: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_search(query)


def test_what_is_damaged_is_counted_and_the_rest_is_searched(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=20)
    with closing(sqlite3.connect(tmp_path / "run" / "journal.sqlite")) as database:
        database.execute("UPDATE events SET digest = digest + 1 WHERE kind = 'turn_recorded' AND rollout = 151")
        database.execute("UPDATE states SET digest = digest + 1 WHERE kind = 'rollout' AND id IN (199, 90)")
        database.execute("UPDATE events SET body = '{\"attempt\":0}' WHERE kind = 'turn_recorded' AND rollout = 7")
        database.commit()
    with closing(RunCatalog(tmp_path)) as catalog, catalog.reader("run") as reader:
        page = searched(reader, "answer reward=1")
        assert (page.looked, page.damaged, page.next, page.newest) == (198, 3, "", 197)
        assert len(page.rollouts.columns["rollout"]) == 6 * 20 - 4
        page = searched(reader, "step>=10 reward=1")
        assert page.damaged == 2 and len(page.rollouts.columns["rollout"]) == 4 + 6 * 9 + 4 - 1


def test_a_search_is_a_table_for_programs_and_its_errors_are_sentences(run: Path) -> None:
    viewer = Viewer(run)
    reply = viewer.ask("api/search?run=run&q=tool:find&as=csv")
    assert reply.text.startswith("rollout,task,step") and "from=" not in reply.text
    reply = viewer.ask("api/search?run=run&q=tool:find&as=csv&most=1")
    assert reply.text.splitlines()[-1] == ",,,,,,,,The search reached `most=1` at rollout 21. Continue with `from=21`.,"
    assert viewer.get("search", run="run", q="tool:find", most=1)["rollouts"]["rollout"] == [21]
    (scored,) = viewer.get("search", run="run", q="use:evaluation")["rollouts"]["rollout"]
    assert scored == str(SCORED), "JavaScript would round the number"
    assert viewer.get("rollout", run="run", rollout=scored)["use"] == "val"
    for given, sentence in (
        ("search?q=x:y", "knows no `x`"),
        ("search?from=x", "is no place of a search"),
        (f"search?from={10**30}", "is no place of a search"),
        (f"rollout?rollout={10**25}", "should be less than 9223372036854775808"),
    ):
        reply = viewer.ask(f"api/{given}&run=run")
        assert reply.status_code == 422 and sentence in reply.json()["error"]
