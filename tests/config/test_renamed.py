"""Former names of options, choices and metrics are answered with the new ones, which exist."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

import etude
from etude.agents.proxy.external import ExternalModel
from etude.config import renamed
from etude.config.compose import compose
from etude.config.renamed import RENAMED_METRICS, RENAMED_OPTIONS, RENAMED_VALUES
from etude.config.tree import iter_possible_fields
from etude.data.prepare.countdown import CountdownPreparation
from etude.demo.tabular.run import DemoRun
from etude.errors import ConfigError, UnknownKeyError
from etude.recipes.registry import SUPERVISED
from etude.recipes.run.config import Run
from etude.rewards import REWARDS
from tests.option_lists import list_option_paths

ROOTS: list[type[BaseModel]] = [Run, *SUPERVISED.values(), DemoRun, CountdownPreparation]
SOURCES = "\n".join(
    file.read_text(encoding="utf-8")
    for file in Path(etude.__file__).parent.rglob("*.py")
    if file != Path(renamed.__file__)
)


def test_every_new_name_of_an_option_exists_and_no_former_one() -> None:
    options = [list_option_paths(root) | {path for path, _ in iter_possible_fields(root)} for root in ROOTS]
    for old, new in RENAMED_OPTIONS.items():
        if "=" in new:
            (_, former), (field, choice) = old.split("="), new.split("=")
            assert field == "reward" and choice in REWARDS and former not in REWARDS
            continue
        holders = [paths for paths in options if new in paths]
        assert holders, f"{new} is no option"
        assert not any(old in paths for paths in holders), f"{old} is an option beside {new}"


@pytest.mark.parametrize("option", RENAMED_VALUES)
def test_former_values_are_answered_with_the_new_ones(option: str) -> None:
    for old, new in RENAMED_VALUES[option].items():
        with pytest.raises(ConfigError, match=rf"train.{option} expects one of .* was given\. It is {new} now\."):
            compose(Run, [f"train.{option}={old}"])
        assert getattr(compose(Run, [f"train.{option}={new}"]).train, option) == new


@pytest.mark.parametrize(("old", "new"), RENAMED_METRICS.items())
def test_every_new_name_of_a_metric_exists_and_no_former_one(old: str, new: str) -> None:
    assert f'"{new}"' in SOURCES and f'"{old}"' not in SOURCES


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.clip=1"], "train.clip is train.max_grad_norm now."),
        (["critic.train.warmup=3"], "critic.train.warmup is critic.train.warmup_steps now."),
        (["updates=4"], "updates is mini_batches now."),
        (["epochs=2"], "epochs is ppo_epochs now: passes over the rollouts of a step. For passes over the data, set"),
        (["rollout=vllm", "rollout.memory=0.5"], "rollout.memory is rollout.gpu_memory_utilization now."),
        (
            ["rollout.memory=0.5"],
            "rollout.memory is rollout.gpu_memory_utilization now. It belongs to rollout=vllm or rollout=sglang.",
        ),
        (["reward=exact"], "reward: there is no 'exact'. It is exact_match now."),
        (
            ["reward=combined", "reward.parts.style=judge", "reward.parts.style.at_once=2"],
            "reward.parts.style.at_once is reward.parts.style.max_concurrency now.",
        ),
        (["reward=combined", "reward.parts.right=program"], "reward.parts.right: there is no 'program'. It is code"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_former_name_is_answered_with_the_new_one(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(Run, overrides)
    assert sentence in str(caught.value)


def test_a_file_is_answered_as_well(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {clip: 1.0, learning_rate: 1.0e-6}\n", encoding="utf-8")
    with pytest.raises(UnknownKeyError, match=r"train\.clip is train\.max_grad_norm now\."):
        compose(Run, file=file)
    with pytest.raises(UnknownKeyError, match="key_from is api_key_env now"):
        ExternalModel.model_validate({"url": "http://h/v1", "key_from": "KEY"})


def test_runs_of_demonstrations_keep_their_names() -> None:
    """Those runs have `epochs`, and no `mini_batches`."""
    sft = SUPERVISED["sft"]
    assert compose(sft, ["model.path=m", "epochs=2"]).epochs == 2  # type: ignore[attr-defined]
    with pytest.raises(UnknownKeyError, match="updates is not an option"):
        compose(sft, ["updates=4"])
