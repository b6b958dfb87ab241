"""A configuration is frozen, has only its own fields, and reports errors in sentences, however it is created."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from etude.errors import ConfigError, UnknownKeyError
from tests.config.sample_run import GSPO, PPO, Run


def test_a_config_is_frozen_hashable_and_compared_by_value() -> None:
    loss = PPO()
    with pytest.raises(ValidationError, match="frozen"):
        loss.clip_low = 0.3
    assert hash(PPO(clip_low=0.2)) == hash(loss) and PPO() == loss != PPO(clip_low=0.1) and PPO() != GSPO()  # type: ignore[comparison-overlap]


def test_construction_by_hand_fails_in_sentences() -> None:
    with pytest.raises(
        ConfigError, match=r"^PPO: clip_low must be at least 0; -1 was given\. Its meaning: How far below 1"
    ):
        PPO(clip_low=-1)
    with pytest.raises(UnknownKeyError, match=r"^PPO: clip_hihg is not an option\. Did you mean clip_high"):
        PPO(clip_hihg=0.2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"^Run: seed expects a whole number; 'x' was given"):
        Run.model_validate({"seed": "x"})


def test_the_cause_does_not_repeat_the_value() -> None:
    with pytest.raises(ConfigError) as caught:
        Run(api_key=["hunter2"])  # type: ignore[arg-type]
    assert "hunter2" not in f"{caught.value} {caught.value.__cause__}"


def test_defaults_are_validated_too() -> None:
    class Wrong(PPO):
        clip_low: float = -1.0
        margin: float = Field(-1.0, ge=0)

    with pytest.raises(ConfigError, match=r"^Wrong: margin must be at least 0; -1\.0 was given"):
        Wrong()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"seed": True}, r"^Run: seed expects a whole number; True was given\. Its meaning"),
        ({"loss": {"name": "ppo", "clip_low": True}}, r"^Run: loss\.clip_low expects a number; True was given"),
        (
            {"loss": {"name": "ppo", "dual_clip": True}},
            r"^Run: loss\.dual_clip expects a number or null; True was given",
        ),
        ({"steps": True}, r"^Run: steps expects a whole number or one of 'auto'; True was given"),
        ({"optim": {"betas": [True, 0.9]}}, r"^Run: optim\.betas expects a list of 2"),
        ({"limits": {"a": False}}, r"^Run: limits expects a mapping"),
    ],
)
def test_true_is_no_number(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Run.model_validate(fields)


def test_a_number_may_come_as_text_and_truth_where_it_is_asked_for() -> None:
    assert Run.model_validate({"seed": "3", "loss": {"name": "ppo", "clip_low": "0.2"}, "shuffle": False}) == Run(
        seed=3, shuffle=False
    )
