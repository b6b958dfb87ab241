"""The configuration stays small, typed and explained."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from etude.demo.tabular.run import DemoRun
from etude.recipes.run.config import Run
from tests.option_lists import find_undocumented_fields, find_untyped_fields, list_option_paths, list_options

MAX_OPTIONS = 199
MAX_PATHS = 300


ROOTS = pytest.mark.parametrize("root", [Run, DemoRun])


@ROOTS
def test_a_composed_run_has_few_options(root: type[BaseModel]) -> None:
    assert 0 < len(list_options(root)) <= MAX_OPTIONS


@ROOTS
def test_all_choices_together_have_few_fields(root: type[BaseModel]) -> None:
    assert len(list_options(root)) < len(list_option_paths(root)) <= MAX_PATHS


@ROOTS
def test_no_field_is_free_form(root: type[BaseModel]) -> None:
    assert not find_untyped_fields(root)


@ROOTS
def test_every_field_says_what_it_means(root: type[BaseModel]) -> None:
    assert not find_undocumented_fields(root)


class Loose(BaseModel):
    """A section with a free-form field."""

    anything: dict[str, Any]


class LooseRun(BaseModel):
    """A run with such a section."""

    loose: Loose = Field(description="a section")


def test_a_free_form_field_without_a_description_is_reported() -> None:
    assert find_untyped_fields(LooseRun) == find_undocumented_fields(LooseRun) == ["loose.anything"]
