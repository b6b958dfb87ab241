"""A choice accepts an instance, a name, a mapping with a name, a plug-in, and `none` if it is optional."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from etude.config import Choice, Config
from etude.config.choice import options_of
from etude.errors import ConfigError, PluginError, UnknownChoiceError, UnknownKeyError
from tests.config.sample_run import GSPO, K1, KL, KLS, LOSSES, PPO, Adaptive, Loss, MyLoss, NotAConfig, Run


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PPO(clip_low=0.1), PPO(clip_low=0.1)),
        ("gspo", GSPO()),
        ({"name": "gspo", "clip_high": 0.5}, GSPO(clip_high=0.5)),
        ("tests.config.sample_run:MyLoss", MyLoss()),
        ({"name": "tests.config.sample_run:MyLoss", "my_knob": 3}, MyLoss(my_knob=3)),
        (MyLoss(my_knob=2), MyLoss(my_knob=2)),
    ],
)
def test_a_choice_accepts_every_form(given: Any, expected: Loss) -> None:
    assert Run.model_validate({"loss": given}).loss == expected


def test_an_optional_choice_may_be_none() -> None:
    for nothing in (None, "none", {"name": "none"}):
        assert Run.model_validate({"kl": nothing}).kl is None
    assert Run.model_validate({"kl": {"name": "k1", "controller": "adaptive"}}).kl == K1(controller=Adaptive())


def test_a_choice_may_name_its_base_and_stand_in_a_list() -> None:
    class Holder(Config):
        one: Annotated[Loss, Choice(LOSSES, Loss)] = Field(PPO(), description="One.")
        many: list[Annotated[Loss, Choice(LOSSES)]] = Field([], description="Many.")

    assert Holder.model_validate({"many": ["ppo", {"name": "gspo"}]}).many == [PPO(), GSPO()]


def test_an_unknown_name_lists_the_valid_and_the_nearest() -> None:
    with pytest.raises(
        UnknownChoiceError,
        match=r"loss: there is no 'gsppo'\. Did you mean gspo\? The choices are ppo, gspo, or a plug-in written",
    ):
        Run.model_validate({"loss": "gsppo"})
    with pytest.raises(UnknownChoiceError, match=r"there is no 'zzz'\. The choices are k3, k1, none, or a plug-in"):
        Run.model_validate({"kl": "zzz"})


@pytest.mark.parametrize("given", [3, {"clip_low": 0.1}, None, ["ppo"], NotAConfig()])
def test_a_value_without_a_name_is_refused(given: Any) -> None:
    with pytest.raises(
        UnknownChoiceError, match=r"loss: a name is needed, and .* was given\. The choices are ppo, gspo"
    ):
        Run.model_validate({"loss": given})


def test_none_has_no_options() -> None:
    with pytest.raises(UnknownKeyError, match=r"kl: none has no options, so clamp cannot be set\. Choose k1 as well"):
        Run.model_validate({"kl": {"name": "none", "clamp": 3}})


def test_the_fields_of_a_choice_are_validated_in_place() -> None:
    with pytest.raises(ConfigError, match=r"loss\.clip_low must be at least 0; -1 was given"):
        Run.model_validate({"loss": {"name": "gspo", "clip_low": -1}})


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("NotAConfig", r"must be a subclass of tests\.config\.sample_run\.Loss"),
        ("Named", r"has a field `name`, which is the key of the choice itself\. Rename that field\."),
        ("Nothing", r"tests\.config\.sample_run has no Nothing"),
    ],
)
def test_an_unsuitable_plug_in_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(PluginError, match=sentence):
        Run.model_validate({"loss": f"tests.config.sample_run:{name}"})


def test_a_plug_in_must_be_a_config() -> None:
    class Holder(Config):
        thing: Annotated[Any, Choice({}, NotAConfig)] = Field(NotAConfig(), description="A thing.")

    with pytest.raises(PluginError, match=r"thing: .* must be a Config, so that its options can be set"):
        Holder.model_validate({"thing": "tests.config.sample_run:NotAConfig"})


def test_names_come_from_the_table_or_say_where_the_class_is() -> None:
    options = options_of(Annotated[KL | None, Choice(KLS)])
    assert options is not None
    assert [options.name_of(value) for value in (K1(), None, PPO())] == ["k1", "none", "tests.config.sample_run:PPO"]
    assert options.names == ["k3", "k1", "none"]


def test_a_table_may_not_use_the_words_of_the_grammar() -> None:
    class Named(Config):
        name: str = "x"

    with pytest.raises(AssertionError, match="has a field called name"):
        Choice({"named": Named})
    with pytest.raises(AssertionError, match="'none' cannot name a choice"):
        Choice({"none": PPO})
    with pytest.raises(AssertionError, match="give Choice"):
        Choice(LOSSES).options(int | str)


def test_a_file_in_place_of_a_module_is_told_where_it_belongs() -> None:
    class Judged(Config):
        reward: Annotated[Loss, Choice({"function": PPO})] = PPO()

    with pytest.raises(PluginError, match=r"the choice `function` with `path=my_reward\.py:score`"):
        Judged.model_validate({"reward": "my_reward.py:score"})
    with pytest.raises(PluginError, match=r"Write `my_loss:…`, with the folder of the file on PYTHONPATH"):
        Run.model_validate({"loss": "lib/my_loss.py:Loss"})
