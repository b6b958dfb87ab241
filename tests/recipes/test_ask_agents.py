"""A model that was trained for an agent is scored through the agent, as during training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.cli import main
from tests.joined import LOOKER, made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A finished run of an agent, and its options."""
    place = tmp_path_factory.mktemp("world")
    options = made(place)
    assert main(["train", *options, f"directory={place / 'run'}"]) == 0
    return place, options


def scored(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    capsys.readouterr()
    assert main(["eval", "--json", *words]) == 0
    result: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_a_run_of_an_agent_is_scored_as_at_its_end(
    world: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = world[0] / "run"
    before = (run / "journal.sqlite").read_bytes()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    result = scored(capsys, str(run))
    assert (result["tasks"], result["step"], result["eval/failed"]) == (3, 2, 0)
    assert {name: result[name] for name in ("eval/mean@1", "eval/length")} == {
        name: last[name] for name in ("eval/mean@1", "eval/length")
    }
    first, again = (
        [(line["text"], line["conversation"]) for line in map(json.loads, Path(place).read_text().splitlines())]
        for place in (run / "evaluations" / "step-00000002.jsonl", str(result["answers"]))
    )
    assert first == again, "the same numbers are drawn"
    assert (run / "journal.sqlite").read_bytes() == before, "the journal of the run is not written"


def test_a_model_is_scored_by_an_agent_without_a_run(
    world: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    place, options = world
    words = [word for word in options if word.partition("=")[0] in ("model.path", "data.val", "train.precision")]
    words = [*words, "data.max_prompt_length=16", "sampling.max_tokens=8", f"agent.path={LOOKER}", "evaluate.samples=2"]
    result = scored(capsys, *words, "agent.strategy=cs", "observe.console=plain")
    assert result["tasks"] == 3 and result["samples"] == 2 and "eval/mean@2" in result and result["eval/failed"] == 0
    assert not (place / "journal.sqlite").exists()
    for option in ("agent.store=http://127.0.0.1:9", "agent.listen=127.0.0.1:9"):
        assert main(["eval", *words, option]) == 2
        assert "does not read" in capsys.readouterr().err
