"""Types as text, values as plain data, fields by path."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from etude.config import Choice, Config
from etude.config.tree import (
    REQUIRED,
    describe_type,
    find_item_type,
    find_section_class,
    iter_fields,
    iter_possible_fields,
    to_plain,
    to_tree,
)
from tests.config.sample_run import GSPO, LOSSES, PPO, Loss, Optim, Precision, Run


class Needy(Config):
    """A class with fields without defaults."""

    size: int = Field(description="A size.")
    optim: Optim = Field(description="A section.")
    loss: Annotated[Loss, Choice(LOSSES)] = Field(description="A choice.")


class Node(Config):
    """A class with a field of the same class."""

    weight: float = Field(1.0, description="A weight.")
    below: Node | None = Field(None, description="The next.")


@pytest.mark.parametrize(
    ("annotation", "description"),
    [
        (int, "a whole number"),
        (float | None, "a number or null"),
        (bool, "true or false"),
        (Path, "a path"),
        (Any, "anything"),
        (Literal["a", 1], "one of 'a', 1"),
        (Precision, "one of 'fp32', 'bf16'"),
        (list[int], "a list (each: a whole number)"),
        (tuple[float, ...], "a list (each: a number)"),
        (tuple[int, str], "a list of 2 (a whole number, text)"),
        (list, "a list"),
        (frozenset[str], "a list (each: text)"),
        (dict[str, float], "a mapping (each value: a number)"),
        (Mapping, "a mapping"),
        (Annotated[int, "note"], "a whole number"),
        (Optim, "a mapping of lr, betas, schedule"),
        (Annotated[Loss, Choice(LOSSES)], "one of ppo, gspo, or a plug-in written module:Name"),
        (complex, "complex"),
        (type[int], "type"),
    ],
)
def test_types_are_described_in_words(annotation: Any, description: str) -> None:
    assert describe_type(annotation) == description


def test_a_type_without_a_description_is_named() -> None:
    class Colour(Enum):
        RED = 1

    assert describe_type(Colour) == "one of 1"
    assert describe_type(Literal) == "typing.Literal"


def test_values_become_plain_data() -> None:
    assert to_plain((1, Precision.BF16, Path("a/b"), {"k": {2, 1}}, None)) == [1, "bf16", "a/b", {"k": [1, 2]}, None]
    assert to_plain(GSPO(), Loss, [Choice(LOSSES)]) == {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
    assert to_plain({"a": GSPO()}, dict[str, Annotated[Loss, Choice(LOSSES)]])["a"]["name"] == "gspo"
    assert to_plain((1, GSPO()), tuple[int, Annotated[Loss, Choice(LOSSES)]])[1]["name"] == "gspo"
    assert to_tree(Run(extra_losses=[PPO()]))["extra_losses"][0]["name"] == "ppo"


def test_items_of_containers_become_plain_data() -> None:
    assert find_item_type(list[int] | None) is int
    assert find_item_type(dict[str, float]) is float
    assert find_item_type(tuple[int, str], 1) is str
    assert find_item_type(tuple[int, str], 2) is None
    assert find_item_type(tuple[int, ...], 5) is int
    assert find_item_type(list) is None
    assert find_item_type(dict) is None


def test_sections_are_found_in_annotations() -> None:
    assert (
        find_section_class(Optim)
        is find_section_class(Optim | None)
        is find_section_class(Annotated[Optim, "note"])
        is Optim
    )
    assert find_section_class(Optim | int) is find_section_class(Optim | GSPO) is find_section_class(int) is None


def test_entries_of_a_class_with_fields_that_must_be_given() -> None:
    entries = {entry.path: entry for entry in iter_fields(Needy, None, None)}
    assert list(entries) == [
        *("size", "optim", "optim.lr", "optim.betas", "optim.schedule"),
        *("optim.schedule.warmup", "optim.schedule.shape", "optim.schedule.points", "loss"),
    ]
    assert entries["size"].default is REQUIRED and entries["loss"].default is REQUIRED
    assert entries["optim"].is_section and entries["optim.lr"].value == 1e-6 and not entries["loss"].is_section


def test_fields_of_a_class_that_holds_itself_are_finite() -> None:
    assert {path for path, _ in iter_possible_fields(Node)} == {"weight", "below"}


def test_fields_within_lists_are_found() -> None:
    paths = {path for path, _ in iter_possible_fields(Run)}
    assert {"rewards", "rewards.*.weight", "extra_losses.*.dual_clip", "kl.clamp", "kl.controller.horizon"} <= paths


def test_a_foreign_pydantic_model_is_a_section_too() -> None:
    class Foreign(BaseModel):
        inner: Optim = Optim()

    assert to_tree(Foreign())["inner"]["lr"] == 1e-6
