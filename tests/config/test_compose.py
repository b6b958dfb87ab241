"""Composition: the results of overrides, files and sweeps, and the error for each invalid input."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from pydantic import BaseModel, Field

from etude.config import Choice, Config
from etude.config.choice import ChoiceOptions
from etude.config.compose import compose
from etude.demo.tabular.run import DemoRun
from etude.errors import ConfigError, PluginError, UnknownChoiceError, UnknownKeyError
from tests.config.sample_run import (
    GSPO,
    K1,
    K3,
    LOSSES,
    PLUG_IN,
    PPO,
    Adaptive,
    Loss,
    MyLoss,
    Optim,
    Precision,
    Reward,
    Run,
    Schedule,
    written,
)


def test_no_overrides_give_the_defaults() -> None:
    assert compose(Run) == Run()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["seed=3"], Run(seed=3)),
        (["+seed=3"], Run(seed=3)),
        (["seed=2", "seed=3"], Run(seed=3)),
        (["loss=gspo"], Run(loss=GSPO())),
        (["loss=gspo", "loss=ppo"], Run(loss=PPO())),
        (["loss.name=gspo"], Run(loss=GSPO())),
        (["loss.name=gspo", "loss=ppo"], Run(loss=PPO())),
        (["loss=gspo", "loss.clip_high=1e-3"], Run(loss=GSPO(clip_high=1e-3))),
        (["loss.clip_high=0.3"], Run(loss=PPO(clip_high=0.3))),
        (["loss.dual_clip=3"], Run(loss=PPO(dual_clip=3))),
        (["kl=k3"], Run(kl=K3())),
        (["kl=none"], Run(kl=None)),
        (["kl=null"], Run(kl=None)),
        (["kl=k3", "kl.controller=adaptive"], Run(kl=K3(controller=Adaptive()))),
        (["kl=k3", "kl/controller=adaptive", "kl.controller.target=2"], Run(kl=K3(controller=Adaptive(target=2)))),
        (["kl=k1"], Run(kl=K1(controller=Adaptive(target=3.0)))),
        (["kl=k1", "kl.clamp=[-1,1]"], Run(kl=K1(clamp=(-1, 1)))),
        ([f"loss={PLUG_IN}", "loss.my_knob=3"], Run(loss=MyLoss(my_knob=3))),
        (
            ["optim.schedule.shape=cosine", "optim.lr=1e-4"],
            Run(optim=Optim(lr=1e-4, schedule=Schedule(shape="cosine"))),
        ),
        (["optim.schedule.points=[1,2,3]"], Run(optim=Optim(schedule=Schedule(points=(1, 2, 3))))),
        (["optim={lr: 0.1}"], Run(optim=Optim(lr=0.1))),
        (
            ["precision=bf16", "output=a/b", "shuffle=false"],
            Run(precision=Precision.BF16, output=Path("a/b"), shuffle=False),
        ),
        (["steps=10"], Run(steps=10)),
        (["title='a, b: c'"], Run(title="a, b: c")),
        (['title="7"'], Run(title="7")),
        (["title=${loss.name}-${seed}"], Run(title="ppo-1")),
        (["stop=['</s>',x]"], Run(stop=["</s>", "x"])),
        (["limits.a=1", "limits.b=2"], Run(limits={"a": 1, "b": 2})),
        (["limits={a: 1}"], Run(limits={"a": 1})),
        (["rewards.length.weight=0.5"], Run(rewards={"exact": Reward(), "length": Reward(weight=0.5)})),
        (["rewards={length: {weight: 2}}"], Run(rewards={"length": Reward(weight=2)})),
        (["rewards={}"], Run(rewards={})),
        (["extra_losses=[gspo,{name: ppo, clip_low: 0.1}]"], Run(extra_losses=[GSPO(), PPO(clip_low=0.1)])),
    ],
)
def test_overrides_set_options_and_choices(overrides: list[str], expected: Run) -> None:
    assert compose(Run, overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "kind", "sentence"),
    [
        (
            ["loss=gspo", "loss.dual_clip=3"],
            UnknownKeyError,
            r"loss\.dual_clip is not an option of loss=gspo\. It belongs to loss=ppo",
        ),
        (["clip_low=1"], UnknownKeyError, r"clip_low is not an option\. Did you mean loss\.clip_low\?"),
        (["optm.lr=1"], UnknownKeyError, r"optm is not an option\. Did you mean optim\?"),
        (["kl.controller=fixed"], UnknownKeyError, r"kl: none has no options, so controller cannot be set"),
        (["loss=gsppo"], UnknownChoiceError, r"loss: there is no 'gsppo'\. Did you mean gspo\?"),
        (
            ["kl=k3", "kl.controller=fix"],
            UnknownChoiceError,
            r"kl\.controller: there is no 'fix'\. Did you mean fixed\?",
        ),
        (["loss=3"], UnknownChoiceError, r"loss: a name is needed, and 3 was given"),
        (["loss=none"], UnknownChoiceError, r"loss: there is no 'none'"),
        (["loss=null"], UnknownChoiceError, r"loss: a name is needed, and None was given"),
        (
            ["loss=no.such:Loss"],
            PluginError,
            r"loss: The plug-in 'no\.such:Loss' was requested, and there is no module no",
        ),
        ([f"loss={PLUG_IN}", "loss.my_knb=3"], UnknownKeyError, r"Did you mean loss\.my_knob\?"),
        (
            ["loss.clip_low=abc"],
            ConfigError,
            r"^loss\.clip_low expects a number; 'abc' was given\. Its meaning: How far below",
        ),
        (
            ["loss.clip_low=3"],
            ConfigError,
            r"^clip_low is more than ten times clip_high: lower clip_low or raise clip_high\.$",
        ),
        (["seed.deep=3"], ConfigError, r"seed expects a whole number; \{'deep': 3\} was given"),
        (["seed="], ConfigError, r"seed expects a whole number; '' was given"),
        (["optim=3"], ConfigError, r"optim is a section .* lr, betas, schedule; 3 was given\. .* `optim\.lr=3`"),
        (["optim=3", "optim.schedule=linear"], ConfigError, r"optim is a section .* such as `optim\.lr=3`"),
        (["optim=[1,2]"], ConfigError, r"optim is a section .* \[1, 2\] was given\. .* `optim\.betas=\[1,2\]`"),
        (["optim=none_takes_it"], ConfigError, r"optim is a section"),
        (
            ["loss.clip=="],
            ConfigError,
            r"The override loss\.clip== cannot be read\. Write key=value, for example seed=",
        ),
        (["loss=ppo,gspo"], ConfigError, r"loss=ppo,gspo asks for several values, which is a sweep\. Add --multirun"),
        (["seed=range(1,4)"], ConfigError, r"seed=range\(1,4\) asks for several values, which is a sweep"),
        (
            ["hydra.sweep.dir=x"],
            ConfigError,
            r"hydra\.sweep\.dir is an option of Hydra itself, which only a sweep uses",
        ),
        (["title=${nowhere}"], ConfigError, r"title refers to an option that does not exist: .*'nowhere'"),
        (["title=${optim.lr"], ConfigError, r"cannot be read"),
        (
            ["title=${no_such_resolver:1}"],
            ConfigError,
            r"title refers to an option that does not exist: .*no_such_resolver",
        ),
        (["loss=gsppo", "kl=k9"], UnknownChoiceError, r"There are 2 problems\.\n- loss: .*\n- kl: "),
    ],
)
def test_invalid_overrides_are_refused_in_sentences(
    overrides: list[str], kind: type[ConfigError], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        compose(Run, overrides)
    assert type(caught.value) is kind


def test_references_to_the_environment_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TEST_SEED", "5")
    assert compose(Run, ["seed=${oc.env:ETUDE_TEST_SEED}"]).seed == 5
    monkeypatch.delenv("ETUDE_TEST_SEED")
    assert compose(Run, ["seed=${oc.env:ETUDE_TEST_SEED,7}"]).seed == 7
    with pytest.raises(
        ConfigError, match=r"^seed reads the environment variable ETUDE_TEST_SEED, which is not set\. Set it, or"
    ):
        compose(Run, ["seed=${oc.env:ETUDE_TEST_SEED}"])


def test_secrets_never_come_back_in_a_message() -> None:
    for overrides in (["api_key=[hunter2]"], ["api_key==hunter2"], ["seed=sk-hunter222"], ["api_key=hunter2,x"]):
        with pytest.raises(ConfigError) as caught:
            compose(Run, overrides)
        assert "hunter2" not in f"{caught.value} {caught.value.__cause__}" and "***" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", [], Run()),
        ("seed: 4", [], Run(seed=4)),
        ("seed: 4", ["seed=5"], Run(seed=5)),
        ("loss: gspo", [], Run(loss=GSPO())),
        ("loss: {name: gspo, clip_high: 1e-3}", [], Run(loss=GSPO(clip_high=1e-3))),
        ("loss: {name: gspo, clip_high: 1e-3}", ["loss=gspo"], Run(loss=GSPO(clip_high=1e-3))),
        ("loss: {name: gspo, clip_high: 1e-3}", ["loss=ppo"], Run(loss=PPO())),
        ("loss: {clip_high: 0.3}", [], Run(loss=PPO(clip_high=0.3))),
        ("loss: {clip_high: 0.3}", ["loss.clip_low=0.1"], Run(loss=PPO(clip_high=0.3, clip_low=0.1))),
        (f"loss: {{name: '{PLUG_IN}', my_knob: 2}}", [], Run(loss=MyLoss(my_knob=2))),
        ("kl: {name: k3, controller: adaptive}", [], Run(kl=K3(controller=Adaptive()))),
        ("kl: {name: k1, controller: {horizon: 9}}", [], Run(kl=K1(controller=Adaptive(target=3.0, horizon=9)))),
        ("kl: k3", ["kl=none"], Run()),
        ("kl: null", [], Run()),
        ("kl: {name: none}", [], Run()),
        ("optim: {schedule: {warmup: 3}}", ["optim.lr=0.1"], Run(optim=Optim(lr=0.1, schedule=Schedule(warmup=3)))),
        ("optim: {betas: [0.1, 0.2]}", [], Run(optim=Optim(betas=(0.1, 0.2)))),
        ("rewards: {other: {weight: 2}}", [], Run(rewards={"other": Reward(weight=2)})),
        ("rewards: {other: {weight: 2}}", ["rewards={length: {weight: 3}}"], Run(rewards={"length": Reward(weight=3)})),
        (
            "rewards: {other: {weight: 2}}",
            ["rewards.length.weight=3"],
            Run(rewards={"other": Reward(weight=2), "length": Reward(weight=3)}),
        ),
        ("title: '${loss.name}'", ["loss=gspo"], Run(title="gspo", loss=GSPO())),
    ],
)
def test_a_file_lies_between_defaults_and_overrides(
    tmp_path: Path, text: str, overrides: list[str], expected: Run
) -> None:
    assert compose(Run, overrides, file=written(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sed: 3", r"sed is not an option\. Did you mean seed.*\? It is set in .*mine\.yaml\."),
        (
            "loss: {name: gspo, dual_clip: 3}",
            r"loss\.dual_clip is not an option of loss=gspo\. .* It is set in .*mine\.yaml\.",
        ),
        ("optim: {lrr: 3}\nsed: 1", r"There are 2 problems\.\n- sed .*mine\.yaml\.\n- optim\.lrr .*mine\.yaml\."),
        ("1: x", r"1 is not an option"),
        ("kl: {name: none, clamp: 1}", r"kl: none has no options, so clamp cannot be set"),
        ("loss: 3", r"loss: a name is needed, and 3 was given"),
        ("loss: off", r"loss: a name is needed, and False was given"),
        ("loss: {name: gsppo}", r"loss: there is no 'gsppo'\. Did you mean gspo\?"),
        ("seed: x", r"seed expects a whole number; 'x' was given\. .* It is set in .*mine\.yaml\."),
        ("optim: 3", r"optim is a section .* lr, betas, schedule; 3 was given\. .* It is set in .*mine\.yaml\."),
        ("seed: [1\ntitle: x", r"mine\.yaml, line 2, column 6 is not YAML: expected ',' or '\]'"),
        ("seed: 1\nseed: 2", r"mine\.yaml, line 2, column 1 is not YAML: found duplicate key seed"),
        ("- 1\n- 2", r"mine\.yaml is YAML, and not a mapping\. Write one `key: value` a line"),
        ("just words", r"mine\.yaml is YAML, and not a mapping"),
        ("title: '${'", r"^title holds a \$\{ that begins no reference\. .* It is set in .*mine\.yaml\."),
        ("seed: \x07", r"mine\.yaml is not YAML that can be used: .*special characters"),
    ],
)
def test_an_invalid_file_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        compose(Run, file=written(tmp_path, text))


def test_what_an_override_sets_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(Run, ["seed=x"], file=written(tmp_path, "seed: 3"))
    assert "mine.yaml" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:  # a rule of the whole section
        compose(Run, ["loss.clip_low=9"], file=written(tmp_path, "loss: {name: ppo, clip_high: 0.2}"))
    assert "ten times clip_high" in str(caught.value) and "mine.yaml" not in str(caught.value)


def test_a_files_options_of_a_choice_not_taken_are_checked_too(tmp_path: Path) -> None:
    with pytest.raises(UnknownKeyError, match=r"loss\.clip_hihg is not an option of loss=gspo"):
        compose(Run, ["loss=ppo"], file=written(tmp_path, "loss: {name: gspo, clip_hihg: 3}"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: &a [*a]", "contains itself: an alias in it refers to its own parent"),
        ("api_key: '***'", "api_key is *** in"),
        ("loss.clip_high: 0.3", "loss.clip_high is one name with dots here. Write clip_high under loss, indented."),
    ],
)
def test_a_likely_mistake_in_a_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        compose(Run, file=file)
    assert sentence in str(raised.value)


def test_an_abstract_plug_in_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(PluginError, match=r"PolicyLoss' is abstract: it lacks per_token_loss"):
        ChoiceOptions(table={}, base=BaseModel, optional=False).resolve("etude.algorithms.base:PolicyLoss")


def test_an_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The configuration file .*none\.yaml cannot be read: No such file"):
        compose(Run, file=tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        compose(Run, file=tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"bytes\.yaml is not text in UTF-8"):
        compose(Run, file=tmp_path / "bytes.yaml")


class Needy(Config):
    """A class with fields that must be given, and a section that may be absent."""

    size: int = Field(description="A size.")
    loss: Annotated[Loss, Choice(LOSSES)] = Field(description="A loss.")
    optim: Optim | None = Field(None, description="How weights move.")
    tuned: Annotated[Loss, Choice(LOSSES)] = Field(
        PPO(clip_low=0.1), description="A loss set otherwise than its class."
    )


def test_required_fields_are_composed_and_reported() -> None:
    run = compose(Needy, ["size=3", "loss=gspo", "optim.lr=0.1"])
    assert run == Needy(size=3, loss=GSPO(), optim=Optim(lr=0.1))
    with pytest.raises(
        ConfigError, match=r"(?s)size needs a value and has none\. Set size to a whole number.*loss: a name is needed"
    ):
        compose(Needy)


def test_a_name_means_the_class_and_no_name_means_the_default() -> None:
    assert compose(Needy, ["size=3", "loss=ppo"]).tuned == PPO(clip_low=0.1)
    assert compose(Needy, ["size=3", "loss=ppo", "tuned=ppo"]).tuned == PPO()


class Wrapped(Loss):
    """A loss around another loss: the table holds its own class."""

    inner: Annotated[Loss, Choice(LOSSES)] = Field(GSPO(), description="The loss within.")


NESTED: dict[str, type[Loss]] = {**LOSSES, "wrapped": Wrapped}


class Foreign(BaseModel):
    """A root that is a plain pydantic model, with text that OmegaConf would read as its own syntax."""

    loss: Annotated[Loss, Choice(NESTED)] = PPO()
    template: str = r"${a} \${b} \\${c} \d ???"
    nested: dict[str, list[str]] = {"x": ["${y}"]}


def test_a_choice_within_itself_and_text_that_looks_like_a_reference() -> None:
    assert compose(Foreign) == Foreign()
    run = compose(Foreign, ["loss=wrapped", "loss.inner=ppo", "loss.inner.clip_low=0.1"])
    assert run == Foreign(loss=Wrapped(inner=PPO(clip_low=0.1)))


def test_composing_leaves_no_global_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose(Run)
    store = ConfigStore.instance()
    before = store.repo, set(store.repo), list(logging.getLogger().handlers)
    for seed in range(20):
        assert compose(Run, [f"seed={seed}", "loss=gspo"]).seed == seed
    assert (store.repo, set(store.repo), list(logging.getLogger().handlers)) == before
    assert not GlobalHydra.instance().is_initialized() and not HydraConfig.initialized()
    assert list(tmp_path.iterdir()) == []


def test_composing_works_inside_another_hydra_application() -> None:
    ConfigStore.instance().store(name="theirs", node={"x": 1})
    ConfigStore.instance().store(group="loss", name="theirs", node={"y": 1})
    try:
        with hydra.initialize(version_base="1.3", config_path=None):
            assert compose(Run, ["loss=gspo"]).loss == GSPO()
            assert hydra.compose("theirs", ["+loss=theirs"]) == {"x": 1, "loss": {"y": 1}}
    finally:
        del ConfigStore.instance().repo["theirs.yaml"], ConfigStore.instance().repo["loss"]


def test_threads_may_compose_at_the_same_time() -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda seed: compose(Run, [f"seed={seed}"]), range(24)))
    assert [run.seed for run in runs] == list(range(24))


def test_an_invalid_reference_is_reported_with_its_file(tmp_path: Path) -> None:
    file = written(tmp_path, "optim: {schedule: {shape: 'x ${'}}")
    with pytest.raises(ConfigError, match=r"^optim\.schedule\.shape holds a \$\{ .* It is set in .*mine\.yaml\.$"):
        compose(Run, file=file)
    assert compose(Run, ["title='\\${'"]).title == "${"


@pytest.mark.parametrize("text", ["password: *hunter2", "api_key: 1\ntitle: *hunter2"])
def test_an_error_of_the_yaml_reader_quotes_no_secret(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml, line \d, column \d+ is not YAML: .*'\*\*\*'") as caught:
        compose(Run, file=written(tmp_path, text))
    assert "hunter2" not in str(caught.value)


def test_a_file_goes_over_a_preset_and_its_choices_take_their_options_along(tmp_path: Path) -> None:
    preset, file = tmp_path / "preset.yaml", tmp_path / "mine.yaml"
    preset.write_text("seed: 3\nsteps: 7\nloss: {name: ppo, clip_high: 0.3}\n")
    file.write_text("steps: 8\nloss: {name: gspo, clip_high: 0.01}\n")
    run = compose(DemoRun, ["noise=0.5"], file=file, preset=preset)
    assert (run.seed, run.steps, run.noise) == (3, 8, 0.5)
    assert type(run.loss).__name__ == "GSPO"
    assert compose(DemoRun, preset=preset).steps == 7
