"""The options of observing a run."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from etude.observe.config import MlflowConfig, ObserveConfig, WandbConfig


def leaves(model: type[BaseModel]) -> int:
    kinds = [field.annotation for field in model.model_fields.values()]
    return sum(leaves(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else 1 for kind in kinds)


def test_the_options_stay_few() -> None:
    assert leaves(ObserveConfig) <= 14


@pytest.mark.parametrize("model", [ObserveConfig, WandbConfig, MlflowConfig])
def test_every_option_says_what_it_means(model: type[BaseModel]) -> None:
    assert all(field.description for field in model.model_fields.values())


def test_the_config_is_frozen_and_refuses_unknown_keys() -> None:
    observe = ObserveConfig()
    with pytest.raises(ValidationError, match="frozen"):
        observe.every = 2
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        ObserveConfig.model_validate({"tensorbord": True})


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"console": "loud"}, {"level": "trace"}, {"wandb": {"mode": "on"}}, {"wandb": {"project": ""}}],
)
def test_impossible_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ObserveConfig.model_validate(wrong)
