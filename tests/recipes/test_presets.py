"""Presets are files that compose, and words on the command line."""

from __future__ import annotations

import json
import re

import pytest

from etude.cli import main
from etude.config.compose import compose
from etude.config.tree import to_tree
from etude.errors import ConfigError, UnknownChoiceError
from etude.recipes.presets import PRESETS, split_preset
from etude.recipes.run.config import Run
from tests.recipes.runs import Captured
from tests.sweeps import sweep


@pytest.fixture(scope="module")
def plain() -> dict[str, Run]:
    """Return each preset with nothing changed."""
    return {name: compose(Run, preset=path) for name, path in PRESETS.items()}


@sweep("name", PRESETS)
def test_every_preset_composes_and_names_its_source(name: str, plain: dict[str, Run]) -> None:
    run = plain[name]
    assert run.warnings() == [] or name == "reinforce_pp"
    comment = [line for line in PRESETS[name].read_text().splitlines() if line.startswith("#")]
    assert len(comment) <= 5 and re.search(r"\d{4}\.\d{5}|github\.com/", " ".join(comment)), "the paper"


def test_no_two_presets_are_equal(plain: dict[str, Run]) -> None:
    trees = {name: json.dumps(to_tree(run), default=str) for name, run in plain.items()}
    assert len(set(trees.values())) == len(trees)


def test_dapo_is_its_four_changes_and_can_be_changed() -> None:
    run = to_tree(compose(Run, ["sampling.max_tokens=512", "collect.tasks=7"], preset=PRESETS["dapo"]))
    assert run["collect"]["tasks"] == 7
    assert run["loss"]["clip_high"] > run["loss"]["clip_low"] and run["loss"]["reduction"] == "token-mean"
    assert run["collect"]["refill"] > 0 and run["overlong"]["max_length"] == 512


def test_a_preset_may_stand_among_the_options() -> None:
    assert split_preset(["seed=1", "grpo", "steps=2"]) == (PRESETS["grpo"], ["seed=1", "steps=2"])
    assert split_preset(["seed=1"]) == (None, ["seed=1"])
    with pytest.raises(UnknownChoiceError, match=r"presets are .*dapo, .*grpo"):
        split_preset(["steps=2", "groo"])
    with pytest.raises(ConfigError, match="grpo and dapo"):
        split_preset(["grpo", "dapo"])


def test_a_preset_is_shown_with_its_options(capsys: Captured) -> None:
    assert main(["config", "show", "dapo"]) == 0
    assert "refill: 10" in capsys.readouterr().out
