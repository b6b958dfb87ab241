"""A run whose rollouts are kept by a store elsewhere: three processes, one journal of the run that holds everything."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest

from etude.cli import main
from etude.records import Outcome
from etude.store import Admitted, Journal, RolloutState, open_store
from tests.joined import LOOKER, made, started


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return made(tmp_path_factory.mktemp("world"))


def seen(journal: Journal) -> dict[int, tuple[str, float | None, int]]:
    """What the journal says of each rollout: its status, what it earned, how many tokens its turns have."""
    ids = [state.id for state in journal.listed(RolloutState, None)]
    found = {}
    for id in ids:
        state, turns = journal.rollout(id), journal.turns(id)
        last = state.last
        tokens = sum(len(turn.prompt) + len(turn.completion.ids) for turn in turns)
        found[id] = state.status.value, None if last is None else last.total, tokens
    return found


def test_a_run_joins_a_store_and_its_journal_holds_what_the_store_has(options: list[str], tmp_path: Path) -> None:
    kept, run = tmp_path / "store", tmp_path / "run"
    with started(["store", str(kept), "--listen", "127.0.0.1:0"], tmp_path / "store.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        admin, key = (kept / "admin.key").read_text(), (kept / "runner.key").read_text()
        assert store.said.count(admin) == 1 and key not in store.said, "shown once; the other lies in a file"
        words = ["train", *options, f"directory={run}", f"agent.store={url}", "agent.runners=0"]
        joins = ["runner", LOOKER, "--url", url]
        with (
            started(joins, tmp_path / "runner.log", ETUDE_STORE_KEY=key) as runner,
            started(words, tmp_path / "train.log", ETUDE_STORE_KEY=admin) as train,
        ):
            assert train.ends() == 0, train.said
            runner.told(signal.SIGTERM)
            assert runner.ends() == 0, runner.said
        another = ["train", *options, f"directory={tmp_path / 'other'}", f"agent.store={url}"]
        with started(another, tmp_path / "other.log", ETUDE_STORE_KEY=admin) as other:
            assert other.ends() == 2 and "keeps the rollouts of another run" in other.said, other.said
        store.told(signal.SIGTERM)
        assert store.ends() == 0 and "Stopped." in store.said and "Traceback" not in store.said
    with closing(open_store(run / "journal.sqlite")) as mine, closing(open_store(kept / "journal.sqlite")) as theirs:
        there = seen(theirs)
        assert seen(mine) == there and len(there) == 2 * 2 * 2 + 2 * 3
        assert {status for status, _, _ in there.values()} == {Outcome.SUCCEEDED.value}
        assert sum(1 for _ in mine.read(kinds=(Admitted,))) == 2


@pytest.mark.soak
def test_a_trainer_that_is_killed_goes_on_with_what_the_store_has(options: list[str], tmp_path: Path) -> None:
    kept, run = tmp_path / "store", tmp_path / "run"
    with started(["store", str(kept), "--listen", "127.0.0.1:0"], tmp_path / "store.log") as store:
        url = store.says(r"is served at (http://\S+?)\. ")[1]
        store.says("A trainer:")
        admin = (kept / "admin.key").read_text()
        words = ["train", *options, "steps=4", f"directory={run}", f"agent.store={url}", "agent.runners=1"]
        with started(words, tmp_path / "train.log", ETUDE_STORE_KEY=admin) as train:
            train.says("step 2/4")
            train.told(signal.SIGKILL)
            train.ends()
        with started(["train", "--resume", str(run)], tmp_path / "again.log", ETUDE_STORE_KEY=admin) as again:
            assert again.ends() == 0, again.said
    with closing(open_store(run / "journal.sqlite")) as mine:
        admitted = [event.rollouts for _, event in mine.read(kinds=(Admitted,)) if isinstance(event, Admitted)]
        assert [id for ids in admitted for id in ids] == list(range(4 * 2 * 2)), "each once, and in order"


def test_a_store_is_joined_by_its_key_and_only_while_it_is_there(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ETUDE_STORE_KEY", raising=False)
    words = ["train", *options, f"directory={tmp_path / 'run'}", "agent.store=http://127.0.0.1:9"]
    assert main(words) == 2
    assert "ETUDE_STORE_KEY does not tell it" in capsys.readouterr().err
