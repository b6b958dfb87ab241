"""The configuration stays small, typed and explained: it is where systems of this kind rot first."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from etude.config.show import all_paths, free_form, leaves, undocumented
from etude.demo.algorithms import DemoRun

MAX_OPTIONS = 150
MAX_PATHS = 300


def test_a_composed_run_has_few_options() -> None:
    assert 0 < len(leaves(DemoRun)) <= MAX_OPTIONS


def test_all_choices_together_have_few_fields() -> None:
    assert len(leaves(DemoRun)) < len(all_paths(DemoRun)) <= MAX_PATHS


def test_no_field_is_free_form() -> None:
    assert not free_form(DemoRun)


def test_every_field_says_what_it_means() -> None:
    assert not undocumented(DemoRun)


class Loose(BaseModel):
    """A section as it must not be."""

    anything: dict[str, Any]


class LooseRun(BaseModel):
    """A run with such a section."""

    loose: Loose = Field(description="a section")


def test_a_free_form_field_without_meaning_is_told() -> None:
    assert free_form(LooseRun) == undocumented(LooseRun) == ["loose.anything"]
