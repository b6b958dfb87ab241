"""One override, read by Hydra's grammar."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.config.override import make_override, parse_override
from etude.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "path", "values"),
    [
        ("optim.lr=1e-4", "optim.lr", [1e-4]),
        ("+a=true", "a", [True]),
        ("++a=null", "a", [None]),
        ("a=[x,1]", "a", [["x", 1]]),
        ("a={b: 1}", "a", [{"b": 1}]),
        ("a='x, y'", "a", ["x, y"]),
        ("a=b=c", "a", None),
        ("kl/controller=fixed", "kl.controller", ["fixed"]),
        ("loss=my.mod:Name", "loss", ["my.mod:Name"]),
        ("a=", "a", [""]),
    ],
)
def test_a_value_is_parsed_by_its_type(text: str, path: str, values: list[Any] | None) -> None:
    if values is None:
        with pytest.raises(ConfigError, match="cannot be read"):
            parse_override(text, "seed")
        return
    override = parse_override(text, "seed")
    assert (override.path, override.values, override.is_sweep) == (path, values, False)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,2", [1, 2]),
        ("a=range(1,4)", [1, 2, 3]),
        ("a=choice(x,'y z')", ["x", "y z"]),
        ("a=interval(0,1)", []),
        ("a=glob(*)", []),
    ],
)
def test_sweeps_are_recognised(text: str, values: list[Any]) -> None:
    override = parse_override(text, "seed")
    assert override.is_sweep and override.values == values


def test_overrides_of_hydra_itself_are_recognised() -> None:
    assert (
        parse_override("hydra.sweep.subdir=x", "seed").is_hydra
        and parse_override("hydra/launcher=basic", "seed").is_hydra
    )
    assert not parse_override("hydraulics=1", "seed").is_hydra


@pytest.mark.parametrize("text", ["loss.clip==", "seed", "a b=1", "a=[1", "a={b"])
def test_an_unreadable_override_is_reported_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(text, "seed")
    assert str(caught.value).startswith(f"The override {text} cannot be read. Write key=value, for example seed=…")


def test_a_value_needs_a_key() -> None:
    with pytest.raises(ConfigError, match=r"The override =1 names no key\. Write key=value, for example seed="):
        parse_override("=1", "seed")


@pytest.mark.parametrize("text", ["~loss", "loss@other=ppo"])
def test_the_tree_keeps_its_shape(text: str) -> None:
    with pytest.raises(ConfigError, match="adds or removes a part of the tree"):
        parse_override(text, "seed")


def test_secrets_are_masked() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override("api_key==hunter2", "seed")
    assert "hunter2" not in str(caught.value)


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        (None, None),
        (True, True),
        ("${a}", r"\${a}"),
        (3, 3),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (Path("a/b"), "a/b"),
        (Colour.RED, "red"),
        ((1, (2.5,)), [1, [2.5]]),
        ({"b", "a"}, ["a", "b"]),
        ({"x": {"y": (1,)}}, {"x": {"y": [1]}}),
    ],
)
def test_a_value_of_a_program_stands_for_itself(value: Any, meant: Any) -> None:
    override = make_override("a.b", value)
    assert (override.path, override.is_sweep) == ("a.b", False) and override.values is not None
    (parsed,) = override.values
    assert parsed == meant and type(parsed) is type(meant)


@pytest.mark.parametrize("value", [object(), [1, b"x"], {"x": {"y": 1j}}])
def test_a_value_that_no_option_holds_is_refused(value: Any) -> None:
    place = r"a\.x\.y" if isinstance(value, Mapping) else "a"
    with pytest.raises(
        ConfigError, match=rf"`{place}` was given a value of type (object|bytes|complex)\. An option is"
    ):
        make_override("a", value)
