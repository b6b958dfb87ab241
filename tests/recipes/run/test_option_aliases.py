"""Names that people bring from other trainers are answered with the option that does the work here."""

from __future__ import annotations

import pytest

from etude.config.compose import compose
from etude.errors import UnknownKeyError
from etude.recipes.run.config import Run
from etude.recipes.run.option_aliases import OPTION_ALIASES


def test_every_answer_is_an_option() -> None:
    for name in dict.fromkeys(OPTION_ALIASES.values()):
        inner: object = Run()
        for part in name.split("."):
            assert hasattr(inner, part), name
            inner = getattr(inner, part)


def test_no_option_is_shadowed() -> None:
    assert not OPTION_ALIASES.keys() & Run.model_fields.keys()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr=1e-6", "lr is not an option; here it is train.learning_rate"),
        ("train.lr=1e-6", "train.lr is not an option; here it is train.learning_rate"),
        ("batch_size=8", "here it is collect.tasks"),
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n is not an option; here it is collect.group_size",
        ),
        ("num_generations=8", "here it is collect.group_size"),
        ("trainer.total_epochs=3", "`steps`: a step asks `collect.tasks` rows"),
    ],
)
def test_a_name_from_elsewhere_is_answered(given: str, meant: str) -> None:
    with pytest.raises(UnknownKeyError, match=meant):
        compose(Run, [given])


@pytest.mark.parametrize(
    "given",
    ["observe.mlflow.run_name=x", "train.epsilon=1e-8", "evaluate.sampling.max_new_tokens=8", "evaluate.dataset=x"],
)
def test_beside_options_of_ours_a_name_means_one_of_those(given: str) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        compose(Run, [given])
    assert "here it is" not in str(caught.value)


def test_several_are_answered_together() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        compose(Run, ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=1"])
    assert "collect.group_size" in str(caught.value) and "train.learning_rate" in str(caught.value)


def test_an_unknown_name_gets_the_usual_error() -> None:
    with pytest.raises(UnknownKeyError, match="Did you mean steps"):
        compose(Run, ["stepz=3"])
