"""A resumed run finds the files it began with, also after they moved, or names those that differ."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from etude.errors import DamagedFileError, RunError
from etude.recipes.run.config import Run
from etude.recipes.run.directory import INPUTS, with_absolute_paths
from etude.recipes.run.resume.inputs import PART, RunInputs
from tests.recipes.runs import run_of
from tests.worlds import make_model, make_tasks


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of the world, to be changed."""
    make_model(tmp_path / "model")
    make_tasks(tmp_path / "tasks.jsonl", 20)
    return tmp_path


def moved(place: Path, to: str) -> Run:
    """Return the run of a world that was moved."""
    shutil.copytree(place, place.parent / to)
    return run_of(place.parent / to)


def test_the_same_files_elsewhere_are_the_same_inputs(place: Path) -> None:
    RunInputs(place, run_of(place)).record()
    RunInputs(place, moved(place, "elsewhere")).check()


def test_runs_in_the_directory_of_a_model_are_no_part_of_it(place: Path) -> None:
    run = run_of(place)
    RunInputs(place, run).record()
    (place / "model" / "runs").mkdir()
    (place / "model" / "runs" / "metrics.jsonl").write_text("{}")
    RunInputs(place, run).check()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("tasks.jsonl", "data.train\\[0\\]: tasks.jsonl"),
        ("model/model.safetensors", "model/model.safetensors"),
        ("model/tokenizer.json", "model/tokenizer.json"),
    ],
)
def test_a_file_that_changed_by_a_byte_is_named(place: Path, file: str, name: str) -> None:
    run = run_of(place)
    RunInputs(place, run).record()
    content = bytearray((place / file).read_bytes())
    content[len(content) // 2] ^= 1
    assert len(content) < 2 * PART
    (place / file).write_bytes(content)
    with pytest.raises(RunError, match=f"{name} changed"):
        RunInputs(place, run).check()


def test_a_missing_file_is_named_and_the_record_does_not_change(place: Path) -> None:
    run = run_of(place)
    RunInputs(place, run).record()
    before = (place / INPUTS).read_bytes()
    (place / "model" / "tokenizer_config.json").unlink()
    RunInputs(place, run).record()
    assert (place / INPUTS).read_bytes() == before
    with pytest.raises(RunError, match=r"model/tokenizer_config\.json"):
        RunInputs(place, run).check()


@pytest.mark.parametrize(
    ("before", "said"), [("trainer 1, engine 2", False), ("trainer 2, engine 1", True), ("", False)]
)
def test_other_threads_are_reported_and_not_refused(
    before: str, said: bool, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that began on a GPU, and recorded none, goes on too."""
    RunInputs(place, run_of(place)).record(before)
    RunInputs(place, run_of(place)).check("trainer 1, engine 2")
    assert (f"started with these threads: {before}. It continues with: trainer 1, engine 2." in caplog.text) == said


@pytest.mark.parametrize(("file", "name"), [("plays.py", "agent"), ("others.yaml", "external models")])
def test_an_agent_may_change_and_that_is_reported(
    file: str, name: str, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(place)
    caplog.set_level("INFO", "etude")
    (place / "plays.py").write_text("def solve(task): return 1.0\n")
    (place / "others.yaml").write_text("{}\n")
    run = with_absolute_paths(run_of(place, agent__path="plays.py:solve", agent__external="others.yaml"))
    assert run.agent.path == f"{place / 'plays.py'}:solve" and run.agent.external == place / "others.yaml"
    RunInputs(place, run).record()
    RunInputs(place, run).check()
    assert "changed" not in caplog.text
    with (place / file).open("a") as mended:
        mended.write("\n")
    RunInputs(place, run).check()
    assert f"The file of the {name} changed since the run was started" in caplog.text


def test_the_code_of_each_data_source_is_recorded_at_its_absolute_path(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for name in ("game", "tools", "hub", "own", "plays"):
        (place / f"{name}.py").write_text(f"# {name}\n")
    sources = {"game.path": "game.py:Game", "search.tools": "[tools.py:search]", "cards.hub": "trl:hub.py:Cards"}
    changes = {f"env.sources.{name}": value for name, value in sources.items()}
    played = with_absolute_paths(
        run_of(place, **changes, **{"env.sources.cards.python": "python", "env.path": "own.py:A"})
    )
    assert played.env.sources["cards"].hub == f"trl:{place}/hub.py:Cards"
    assert played.env.sources["cards"].python == place / "python"
    assert played.env.sources["search"].tools == (f"{place}/tools.py:search",)
    recorded = RunInputs(place, played).hash_code()
    assert len(recorded["environment"].split("; ")) == 3 and len(recorded["tools"].split("; ")) == 1
    agents = with_absolute_paths(run_of(place, **{"agent.sources": "{shop: plays.py:solve, game: game.py:Game}"}))
    assert agents.agent.sources["shop"] == f"{place}/plays.py:solve"
    assert len(RunInputs(place, agents).hash_code()["agent"].split("; ")) == 2


def test_a_new_run_has_nothing_to_compare_with(place: Path) -> None:
    RunInputs(place, run_of(place)).check()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model/config.json": 1}'])
def test_an_invalid_record_of_inputs_is_reported(content: str, place: Path) -> None:
    RunInputs(place, run_of(place)).record()
    (place / INPUTS).write_text(content)
    with pytest.raises(DamagedFileError, match=r"inputs\.json is damaged.*bring it back from a copy. Or.* remove it"):
        RunInputs(place, run_of(place)).check()


def test_training_data_is_compared_completely(place: Path) -> None:
    """The whole file is compared, of any size; of a model's weights, only the ends are."""
    file = place / "tasks.jsonl"
    file.write_text(file.read_text() * (3 * PART // file.stat().st_size + 1))
    RunInputs(place, run_of(place)).record()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"data\.train\[0\]: tasks\.jsonl changed"):
        RunInputs(place, run_of(place)).check()
