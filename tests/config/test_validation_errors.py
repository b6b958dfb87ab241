"""Every kind of validation error, with its sentence."""

from __future__ import annotations

from typing import Annotated, Any, Self

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from etude.config import Choice, Config
from etude.config.validation_errors import to_config_error
from etude.errors import ConfigError, PluginError, UnknownChoiceError, UnknownKeyError
from tests.config.sample_run import LOSSES, PPO, Loss, Optim, Run


class Rules(Config):
    """One field for each rule."""

    above: float = Field(1, gt=0, description="Above.")
    below: float = Field(0, lt=1, description="Below.")
    most: int = Field(1, le=5, description="Most.")
    step: int = Field(4, multiple_of=4, description="Step.")
    finite: float = Field(0.0, allow_inf_nan=False, description="Finite.")
    few: list[int] = Field([1], min_length=1, max_length=2, description="Few.")
    code: str = Field("ab", min_length=2, max_length=3, pattern="^[a-z]*$", description="Code.")
    silent: int = 3
    needed: int = Field(description="Needed.")
    bounded: int | str = Field(1, description="Bounded.")
    rate: Annotated[int, Field(ge=0)] | bool | None = Field(None, description="Rate.")
    optim: Optim | None = Field(None, description="A section.")
    losses: dict[str, Annotated[Loss, Choice(LOSSES)]] = Field({}, description="Losses.")


class Careful(Config):
    """A class whose validators raise their own sentences."""

    low: int = Field(0, description="Low.")
    high: int = Field(1, description="High.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ConfigError("low is above high: lower it.")
        if self.high == 13:
            raise AssertionError("13 is unlucky.")
        return self


class Outer(Config):
    """A class that contains one of those."""

    inner: Careful = Field(Careful(), description="The careful one.")


def message_of(root: type[Config], **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        root.model_validate(fields)
    return str(caught.value).removeprefix(f"{root.__name__}: ")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("above", 0, "above must be greater than 0; 0 was given. Its meaning: Above."),
        ("below", 1, "below must be less than 1; 1 was given. Its meaning: Below."),
        ("most", 6, "most must be at most 5; 6 was given. Its meaning: Most."),
        ("step", 3, "step must be a multiple of 4; 3 was given. Its meaning: Step."),
        ("finite", float("nan"), "finite must be a finite number; nan was given. Its meaning: Finite."),
        ("few", [], "few must be a list of at least 1 entries; [] was given. Its meaning: Few."),
        ("few", [1, 2, 3], "few must be a list of at most 2 entries; [1, 2, 3] was given. Its meaning: Few."),
        ("few", [1, "x"], "few.1 expects a whole number; 'x' was given. Its meaning: Few."),
        ("code", "a", "code must be text of at least 2 characters; 'a' was given. Its meaning: Code."),
        ("code", "abcd", "code must be text of at most 3 characters; 'abcd' was given. Its meaning: Code."),
        ("code", "A1", "code must be text that matches ^[a-z]*$; 'A1' was given. Its meaning: Code."),
        ("silent", "x", "silent expects a whole number; 'x' was given."),
        ("bounded", [1], "bounded expects a whole number or text; [1] was given. Its meaning: Bounded."),
        ("rate", -1, "rate must be at least 0; -1 was given. Its meaning: Rate."),
        (
            "optim",
            3,
            "optim is a section with the options lr, betas, schedule; 3 was given. Set these options one by one, "
            "such as `optim.lr=3`. Its meaning: A section.",
        ),
        ("optim", {"lr": "x"}, "optim.lr expects a number; 'x' was given. Its meaning: Learning rate."),
        ("losses", {"a": {"name": "ppo", "clip_low": "x"}}, "losses.a.clip_low expects a number; 'x' was given."),
        ("losses", {"a": {"name": "pp"}}, "losses.a: there is no 'pp'. Did you mean ppo? The choices are ppo, gspo"),
        ("code", "z" * 200, "code must be text of at most 3 characters; 'zzzz"),
    ],
)
def test_each_broken_rule_has_its_sentence(field: str, value: Any, sentence: str) -> None:
    assert message_of(Rules, needed=1, **{field: value}).startswith(sentence)
    assert len(message_of(Rules, needed=1, **{field: value})) < 200


def test_a_missing_required_value_is_reported() -> None:
    assert message_of(Rules) == "needed needs a value and has none. Set needed to a whole number. Its meaning: Needed."


def test_a_number_where_text_is_expected_says_how_to_quote_it() -> None:
    assert message_of(Run, title=3) == (
        "title expects text; 3 was given. To give it as text, quote it twice: 'title=\"3\"'. "
        "Its meaning: What the run is called."
    )


@pytest.mark.parametrize("root", [Careful, Outer])
def test_a_sentence_of_the_author_is_reported_as_written(root: type[Config]) -> None:
    for fields, sentence in (({"low": 2}, "low is above high: lower it."), ({"high": 13}, "13 is unlucky.")):
        assert message_of(root, **(fields if root is Careful else {"inner": fields})) == sentence


def test_a_value_validators_sentence_gets_its_path() -> None:
    assert message_of(Run, max_tokens=3) == "max_tokens: must be even."


def test_several_problems_are_reported_together() -> None:
    sentences = message_of(Run, seed="x", loss={"name": "gspo", "clip_low": -1}, optm=3).splitlines()
    assert sentences == [
        "There are 3 problems.",
        "- seed expects a whole number; 'x' was given. Its meaning: What every random number derives from.",
        "- loss.clip_low must be at least 0; -1 was given. Its meaning: How far below 1 the ratio may fall.",
        "- optm is not an option. Did you mean optim?",
    ]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"lss": 1, "sed": 1}, UnknownKeyError),
        ({"loss": "x", "kl": "y"}, UnknownChoiceError),
        ({"loss": "no.such:X"}, PluginError),
        ({"lss": 1, "seed": "x"}, ConfigError),
    ],
)
def test_problems_of_one_kind_keep_their_kind(fields: dict[str, Any], kind: type[ConfigError]) -> None:
    with pytest.raises(ConfigError) as caught:
        Run.model_validate(fields)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"clip_low": 1}, "clip_low is not an option. Did you mean loss.clip_low?"),
        ({"optim": {"lrr": 1}}, "optim.lrr is not an option. Did you mean optim.lr?"),
        (
            {"loss": {"name": "gspo", "dual_clip": 1}},
            "loss.dual_clip is not an option of loss=gspo. It belongs to loss=ppo.",
        ),
        (
            {"loss": {"name": "gspo", "x": 1}},
            "loss.x is not an option of loss=gspo. The options there are loss.clip_low, ",
        ),
        (
            {"loss": {"name": "tests.config.sample_run:MyLoss", "my_knb": 1}},
            "loss.my_knb is not an option of loss=MyLoss. Did",
        ),
        ({"rewards": {"a": {"weigth": 1}}}, "rewards.a.weigth is not an option. Did you mean rewards.a.weight?"),
    ],
)
def test_an_unknown_key_names_the_nearest(fields: dict[str, Any], sentence: str) -> None:
    tree = Run(loss=PPO()).model_dump() | {"loss": {"name": "ppo", "clip_low": 0.2}, "extra_losses": [], **fields}
    assert message_of(Run, **tree).startswith(sentence)


def test_secrets_are_masked_in_every_sentence() -> None:
    for fields in ({"api_key": ["hunter2"]}, {"seed": "sk-abcdefgh"}, {"title": ["Bearer abcdefgh12"]}):
        sentence = message_of(Run, **fields)
        assert "***" in sentence and not any(secret in sentence for secret in ("hunter2", "abcdefgh"))


def test_an_instance_within_a_field_is_validated() -> None:
    class Plain(BaseModel):
        optim: Optim = Optim()
        seed: int = 1

    with pytest.raises(ValidationError) as caught:
        Plain.model_validate({"optim": Optim(), "sed": 1, "optim_lr": 3, "seed": "x"})
    assert "seed expects a whole number" in str(to_config_error(Plain, caught.value, {"optim": Optim(), "seed": "x"}))


def test_instances_and_unknown_choices_beside_an_unknown_key() -> None:
    with pytest.raises(UnknownKeyError, match=r"Run: lrr is not an option\. Did you mean optim\.lr\?"):
        Run(optim=Optim(), loss=PPO(), lrr=1)  # type: ignore[call-arg]
    sentences = message_of(Run, loss={"name": "gsppo"}, optim={}, lrr=1)
    assert "- loss: there is no 'gsppo'." in sentences and "- lrr is not an option. Did you mean optim.lr?" in sentences


def test_an_error_names_the_file_that_set_the_value() -> None:
    with pytest.raises(ValidationError) as caught:
        Run.__pydantic_validator__.validate_python({"seed": "x"})
    error = to_config_error(Run, caught.value, {"seed": "x"}, origins={"seed": "mine.yaml"})
    assert str(error).endswith("It is set in mine.yaml.")
