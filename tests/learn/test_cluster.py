"""Two ranks over Ray train on the samples of a server, and learn: the recipe of one machine, run on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etude.cli import main
from etude.demo.sorting_model import warm_up
from tests.learn.test_presets import accuracy, beats
from tests.served import AT_START, on, options_of

CLUSTER: dict[str, Any] = {"cluster": "ray", "ranks": 2, "crew.heartbeat_timeout": 120, "crew.timeout": 600}
KINDS = [
    pytest.param("vllm", marks=on("vllm")),
    pytest.param("sglang", marks=[*on("sglang"), pytest.mark.soak]),
]


@pytest.fixture
def beginner(tmp_path: Path) -> Path:
    """A model that imitates the unreliable teacher, with heads of a size that servers support."""
    warm_up(tmp_path / "beginner", 0, lambda: None, head_dim=32)
    return tmp_path / "beginner"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_over_ray_learn_from_what_a_server_samples(
    kind: str, beginner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AT_START.items():
        monkeypatch.setenv(name, value)
    served = {f"rollout.{name}": value for name, value in options_of(kind, tmp_path).items()}
    trained = accuracy(tmp_path / "trained", beginner, "grpo", 3e-4, rollout=kind, **served, **CLUSTER)
    control = accuracy(tmp_path / "control", beginner, "grpo", 0.0, steps=1)
    beats(trained, control, f"grpo over Ray, by {kind}")


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_learns_over_the_same_cluster(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demonstration of agents: a server answers their calls, and ranks over Ray train on them."""
    for name, value in AT_START.items():
        monkeypatch.setenv(name, value)
    served = {f"rollout.{name}": value for name, value in options_of(kind, tmp_path).items()}
    options = {"directory": tmp_path / "run", "rollout": kind, **served, **CLUSTER}
    assert main(["demo", "agent", *(f"{name}={value}" for name, value in options.items()), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["accuracy_before"] < 0.5 and report["accuracy_after"] > 0.75
    assert report["calls_after"] > 2 * report["calls_before"] and report["continued_exactly"] > 0.99
