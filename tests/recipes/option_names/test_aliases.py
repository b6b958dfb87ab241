"""Option names of other trainers are answered with Etude's option for the same purpose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from etude.algorithms.base import PolicyLoss
from etude.algorithms.kl import KLS, KLTerm
from etude.algorithms.losses import LOSSES
from etude.config import Config
from etude.config.compose import compose
from etude.errors import UnknownChoiceError, UnknownKeyError
from etude.recipes.option_names.aliases import OPTION_ALIASES
from etude.recipes.run.config import Run


def test_every_answer_names_an_existing_option() -> None:
    for name in {name for names in OPTION_ALIASES.values() for name in names.split(" and ")}:
        inner: object = Run()
        for part in name.split("."):
            assert hasattr(inner, part), name
            inner = getattr(inner, part)


def test_no_alias_has_the_name_of_an_option() -> None:
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
        ("clip_range=0.2", "here it is loss.clip_low and loss.clip_high"),
        ("loss.clip_ratio=0.2", "here it is loss.clip_low and loss.clip_high"),
        ("gpus=2", "gpus is not an option; here it is ranks"),
        ("trainer.n_gpus_per_node=8", "here it is `ranks`: training processes, one for each GPU"),
        ("trainer.nnodes=2", "here it is `cluster=ray ranks=16`"),
        ("use_vllm=true", "here it is `rollout=vllm`"),
        ("evaluate.sample=2", "evaluate.sample is not an option. Did you mean evaluate.samples?"),
        ("launch.gpus=2", "launch is not an option of this command. It describes a job"),
        ("trainer.total_epochs=3", "`steps`: a step asks `collect.tasks` rows"),
    ],
)
def test_a_name_of_another_trainer_is_answered(given: str, meant: str) -> None:
    with pytest.raises(UnknownKeyError, match=meant):
        compose(Run, [given])


@pytest.mark.parametrize(
    "given",
    ["observe.mlflow.run_name=x", "train.epsilon=1e-8", "evaluate.dataset=x"],
)
def test_beside_options_of_etude_a_name_means_one_of_those(given: str) -> None:
    with pytest.raises(UnknownKeyError) as caught:
        compose(Run, [given])
    assert "here it is" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("kl=k3", "kl: there is no 'k3'. It is forward here. The choices are"),
        ("kl=low_var_kl", "It is forward here."),
        ("kl=k2", "It is reverse here."),
        ("loss=grpo", "loss: there is no 'grpo'. It is ppo here."),
    ],
)
def test_a_choice_of_another_trainer_is_answered(given: str, meant: str) -> None:
    with pytest.raises(UnknownChoiceError) as caught:
        compose(Run, [given])
    assert meant in str(caught.value)


@pytest.mark.parametrize("base, table", [(KLTerm, KLS), (PolicyLoss, LOSSES)])
def test_every_answer_names_an_existing_choice(base: type[Config], table: Mapping[str, type]) -> None:
    assert base.choice_aliases and set(base.choice_aliases.values()) <= table.keys()
    assert not base.choice_aliases.keys() & table.keys()


def test_options_of_a_kl_without_one_name_the_choices_that_have_them() -> None:
    with pytest.raises(UnknownKeyError, match=r"kl: none has no options.* Choose one of reverse, .* as well\."):
        compose(Run, ["kl.coefficient=0.1"])


def test_server_options_are_answered_together() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        compose(Run, ["use_vllm=true", "vllm_mode=colocate"])
    assert "use_vllm is not an option; here it is `rollout=vllm`." in str(caught.value)
    assert "vllm_mode is not an option; here it is `rollout=vllm`, which starts servers" in str(caught.value)


def test_several_names_are_answered_together() -> None:
    with pytest.raises(UnknownKeyError) as caught:
        compose(Run, ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=1"])
    assert "collect.group_size" in str(caught.value) and "train.learning_rate" in str(caught.value)


def test_an_unknown_name_gets_the_usual_error() -> None:
    with pytest.raises(UnknownKeyError, match="Did you mean steps"):
        compose(Run, ["stepz=3"])


def test_a_name_with_dots_in_a_file_is_named_although_other_sections_have_the_same_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model.path: tiny\n")
    with pytest.raises(UnknownKeyError, match=r"model\.path is one name with dots here\. Write path under model"):
        compose(Run, file=tmp_path / "mine.yaml")
