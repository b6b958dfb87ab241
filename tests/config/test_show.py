"""The options of a run are shown, and their YAML composes back to the same run."""

from __future__ import annotations

import tempfile
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from etude.config import Choice, Config
from etude.config.compose import compose
from etude.config.show import render_config, to_yaml
from etude.config.tree import REQUIRED, to_tree
from tests.config.sample_run import (
    GSPO,
    K1,
    K3,
    KL,
    LOSSES,
    PPO,
    Adaptive,
    Controller,
    Fixed,
    Loss,
    MyLoss,
    Optim,
    Precision,
    Reward,
    Run,
    Schedule,
)
from tests.option_lists import find_undocumented_fields, find_untyped_fields, list_option_paths, list_options

rates = st.floats(0.125, 1.0)
anything = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
words = anything | st.sampled_from(
    ["1e-3", "1e5", "off", "null", "007", "${seed}", r"\${x}", r"a\\${b}", "???", "~", "- a", "#", " x "]
)
controllers: st.SearchStrategy[Controller] = st.builds(Fixed, coef=rates) | st.builds(
    Adaptive, target=rates, horizon=st.integers(1, 10**9)
)
kls: st.SearchStrategy[KL] = st.builds(K3, controller=controllers) | st.builds(
    K1, controller=controllers, clamp=st.tuples(rates, rates)
)
losses: st.SearchStrategy[Loss] = (
    st.builds(PPO, clip_low=rates, clip_high=rates, dual_clip=st.none() | st.floats(1.5, 1e300))
    | st.builds(GSPO, clip_low=rates)
    | st.builds(MyLoss, my_knob=st.integers())
)
schedules = st.builds(
    Schedule,
    warmup=st.integers(0, 9),
    shape=st.sampled_from(["constant", "cosine"]),
    points=st.lists(st.integers(), max_size=3).map(tuple),
)
runs = st.builds(
    Run,
    seed=st.integers(0, 2**63),
    title=words,
    api_key=st.none() | words,
    max_tokens=st.integers(1, 100).map(lambda half: 2 * half),
    steps=st.integers() | st.just("auto"),
    shuffle=st.booleans(),
    precision=st.sampled_from(Precision),
    output=st.none() | words.map(Path),
    stop=st.lists(words, max_size=3),
    rewards=st.dictionaries(anything, st.builds(Reward, weight=rates), max_size=2),
    limits=st.dictionaries(anything, st.integers(), max_size=2),
    loss=losses,
    kl=st.none() | kls,
    optim=st.builds(Optim, lr=st.floats(1e-12, 1e3), betas=st.tuples(rates, rates), schedule=schedules),
    extra_losses=st.lists(losses, max_size=2),
)


@given(runs)
@settings(max_examples=9)
@example(Run(stop=["\x85"], title="1e-3"))
def test_the_yaml_of_a_run_composes_back_to_it(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(to_yaml(run, masked=False), encoding="utf-8")
        assert compose(Run, file=file) == run


def overrides() -> st.SearchStrategy[list[str]]:
    """Draw overrides as a user would write them; those of a choice come with the choice that they need."""
    free = {
        "seed": st.integers(0, 99),
        "optim.lr": rates,
        "optim.schedule.shape": st.sampled_from(["constant", "cosine"]),
        "optim.betas": st.sampled_from(["[0.1,0.2]", "[0,1]"]),
        "limits.a": st.integers(),
        "steps": st.sampled_from(["auto", "3"]),
        "title": st.sampled_from(["'a b'", "${loss.name}", '"1e-3"']),
    }
    chosen = st.sampled_from(
        [
            [],
            ["loss=gspo", "loss.clip_high=1e-3"],
            ["loss=tests.config.sample_run:MyLoss", "loss.my_knob=4"],
            ["kl=k1", "kl.clamp=[-1,1]"],
            ["kl=k3", "kl.controller=adaptive", "kl.controller.target=2"],
            ["loss.dual_clip=3", "kl=none"],
        ]
    )
    plain = st.fixed_dictionaries({}, optional=free).map(
        lambda given: [f"{key}={value}" for key, value in given.items()]
    )
    return st.tuples(plain, chosen).flatmap(lambda pair: st.permutations([*pair[0], *pair[1]]))


@given(overrides())
@settings(max_examples=8)
def test_overrides_written_down_and_read_again_are_the_same_run(options: list[str]) -> None:
    run = compose(Run, options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(to_yaml(run), encoding="utf-8")
        assert compose(Run, file=file) == run


def test_show_prints_values_meanings_alternatives_and_changes() -> None:
    run = compose(Run, ["loss=gspo", "loss.clip_high=0.5", "kl=k1", "stop=['', a]", "limits={x: 1}"])
    lines = {line.split(":")[0].strip(): line for line in render_config(run).plain.splitlines()}
    assert lines["loss"].split("  # ")[1:] == ["What the policy minimizes. [ppo | gspo] (default: ppo)"]
    assert lines["kl"].endswith("[k3 | k1 | none] (default: none)")
    assert lines["clip_low"].startswith("  clip_low: 0.0003") and lines["clip_low"].endswith(
        "# How far below 1 the ratio may fall."
    )
    assert lines["clip_high"].endswith("(default: 0.0004)")
    assert lines["optim"].startswith("optim:  ") and lines["shape"].startswith("    shape: constant")
    assert lines["stop"].startswith("stop: ['', a]") and lines["limits"].startswith("limits: {x: 1}")
    assert lines["shuffle"].startswith("shuffle: true") and lines["output"].startswith("output: null")


def test_changes_are_highlighted_on_a_terminal() -> None:
    styles = {str(span.style) for span in render_config(Run(seed=2)).spans}
    assert "bold" in styles and "dim" in styles


def test_required_and_undocumented_fields_are_shown() -> None:
    class Bare(BaseModel):
        size: int
        quiet: str = "x"

    assert render_config(Bare(size=3)).plain == "size: 3   # (required)\nquiet: x\n"
    assert find_undocumented_fields(Bare) == ["quiet", "size"]


def test_secrets_are_masked_in_the_output() -> None:
    run = Run(api_key="hunter2", title="sk-abcdefgh")
    for text in (render_config(run).plain, to_yaml(run)):
        assert "hunter2" not in text and "abcdefgh" not in text and "***" in text and "max_tokens: 256" in text
    assert "hunter2" in to_yaml(run, masked=False)


def test_a_tree_names_its_choices() -> None:
    tree = to_tree(Run(loss=MyLoss(), kl=K3()))
    assert tree["loss"] == {"name": "tests.config.sample_run:MyLoss", "my_knob": 1}
    assert tree["kl"] == {"name": "k3", "controller": {"name": "fixed", "coef": 0.001}}
    assert tree["rewards"] == {"exact": {"weight": 1.0}} and tree["precision"] == "fp32"


def test_leaves_count_a_choice_once_beside_its_fields() -> None:
    leaves = {leaf.path: leaf for leaf in list_options(compose(Run, ["kl=k3", "loss=gspo"]))}
    assert leaves["loss"].default == "ppo" and leaves["loss"].type.startswith("one of ppo, gspo")
    assert leaves["loss.clip_low"].default == 3e-4 and leaves["loss.clip_low"].type == "a number"
    assert (
        leaves["kl.controller"].default == "fixed"
        and leaves["kl"].meaning == "What keeps the policy near its reference."
    )
    assert "optim" not in leaves and "optim.schedule.warmup" in leaves and "loss.dual_clip" not in leaves
    assert {leaf.path for leaf in list_options(Run)} == {leaf.path for leaf in list_options(Run())}


def test_leaves_of_a_class_with_fields_that_must_be_given() -> None:
    class Needy(Config):
        size: int = Field(description="A size.")
        loss: Annotated[Loss, Choice(LOSSES)] = Field(description="A loss.")

    assert [(leaf.path, leaf.default is REQUIRED) for leaf in list_options(Needy)] == [("size", True), ("loss", True)]


def test_all_paths_are_counted_once_over_all_choices() -> None:
    paths = list_option_paths(Run)
    assert {
        "loss",
        "loss.clip_low",
        "loss.dual_clip",
        "kl.controller",
        "kl.controller.coef",
        "kl.controller.horizon",
    } <= paths
    assert {"rewards", "limits", "extra_losses", "optim.lr"} <= paths
    assert not {"optim", "rewards.*.weight", "extra_losses.*.clip_low"} & paths
    assert {leaf.path for leaf in list_options(compose(Run, ["kl=k1"]))} <= paths


def test_free_form_and_undocumented_fields_are_found_at_any_depth() -> None:
    class Inner(Config):
        options: dict[str, Any] = Field({})
        fine: dict[str, int] = Field({}, description="Fine.")

    class Holder(Config):
        bare: dict = Field({}, description="Bare.")  # type: ignore[type-arg]
        deep: list[dict[str, dict[str, Any]]] = Field([], description="Deep.")
        open: Any = Field(None, description="Open.")
        pair: tuple[int, ...] | None = Field(None, description="Fine.")
        inner: Inner = Field(Inner(), description="Inner.")
        by_name: dict[str, Inner] = Field({}, description="By name.")
        choice: Annotated[Config, Choice({"inner": Inner})] = Field(Inner(), description="Choice.")

    assert find_untyped_fields(Holder) == [
        "bare",
        "by_name.*.options",
        "choice.options",
        "deep",
        "inner.options",
        "open",
    ]
    assert find_undocumented_fields(Holder) == ["by_name.*.options", "choice.options", "inner.options"]
    assert find_untyped_fields(Run) == find_undocumented_fields(Run) == []


class Allowing(Config, extra="allow"):
    """A section that allows additional keys."""


def test_bare_containers_and_open_sections_are_free_form() -> None:
    class Holder(Config):
        a: list = Field()  # type: ignore[type-arg]
        b: tuple = Field()  # type: ignore[type-arg]
        c: set = Field()  # type: ignore[type-arg]
        d: typing.Dict = Field()  # type: ignore[type-arg]  # noqa: UP006
        e: typing.Mapping = Field()  # type: ignore[type-arg]
        f: dict[str, list] = Field()  # type: ignore[type-arg]
        g: Allowing = Field()
        h: Annotated[Config, Choice({"allowing": Allowing})] = Field()
        i: dict[str, Allowing] = Field()
        fine: dict[str, tuple[Literal["x"], ...]] | None = Field()

    assert find_untyped_fields(Holder) == list("abcdefghi")
    assert find_untyped_fields(Allowing) == ["Allowing"]


@pytest.mark.parametrize("masked", [True, False])
def test_the_yaml_is_a_mapping_in_the_order_of_the_fields(masked: bool) -> None:
    keys = [line.split(":")[0] for line in to_yaml(Run(), masked=masked).splitlines() if line[0].isalpha()]
    assert keys == list(Run.model_fields)
