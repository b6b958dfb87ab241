"""The hubs of environments, as the command line shows and plays them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.agents.hubs import HUBS
from etude.cli import main
from etude.recipes.collect.hub_python import find_hub_environment
from tests.components import require_hub
from tests.recipes.runs import refused

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the packages of one hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = find_hub_environment("gymnasium")
    assert made is not None
    made.python.parent.mkdir(parents=True)
    (made.directory / "whole.json").write_text("{}")
    return made.python


def test_hubs_are_listed_with_what_is_installed(cache: Path, capsys: Captured) -> None:
    assert main(["env", "list", "--json"]) == 0
    listed = {hub["name"]: hub for hub in map(json.loads, capsys.readouterr().out.splitlines())}
    assert listed.keys() == set(HUBS) and listed["gymnasium"]["python"] == str(cache)
    assert listed["verifiers"]["python"] is None and listed["trl"]["packages"] == 0
    assert main(["env", "list"]) == 0
    table = capsys.readouterr().out
    assert "textarena:GuessTheNumber-v0" in table and f"\ngymnasium: {cache}\n" in table


def test_an_installed_hub_is_not_installed_again(cache: Path, capsys: Captured) -> None:
    assert main(["env", "install", "gymnasium"]) == 0
    assert capsys.readouterr().out.strip() == str(cache)


def test_what_cannot_be_installed_or_tried_is_refused(capsys: Captured) -> None:
    assert "with packages to install; there are gymnasium, openenv" in refused(capsys, "env", "install", "trl")
    assert "Name an environment of a hub to try" in refused(capsys, "env", "try")
    assert "Name an environment of a hub to show" in refused(capsys, "env", "show")


@pytest.mark.integration
def test_an_environment_is_played_by_hand(capsys: Captured) -> None:
    python = require_hub("gymnasium")
    given = ["env.hub=gymnasium:Blackjack-v1", f"env.python={python}", "env.kwargs.actions=[stick,hit]"]
    assert main(["env", "show", *given, "--task", "3"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["seed"] for row in rows] == list(range(3, 13))
    assert main(["env", "try", *given, "--task", "3", "--answer", "hmm", "--answer", "I stick", "--answer", "hit"]) == 0
    printed = capsys.readouterr().out
    assert '"seed": 3' in printed and "Answer with one of these actions: stick, hit." in printed
    assert "> hmm\nNo action was named." in printed
    assert "reward -1.0, done" in printed or "reward 1.0, done" in printed or "reward 0.0, done" in printed
    assert "> hit" not in printed, "it was over"
