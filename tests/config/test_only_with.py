"""Options that need another one: which is refused, and what is told."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from etude.config import Config
from etude.config.only_with import OnlyWith, idle_options


class Sails(Config):
    number: Annotated[int, OnlyWith("wind", bool, "needs `wind`, and `wind={other}`.")] = Field(1, description="")
    reefed: Annotated[
        bool,
        OnlyWith("wind", bool, "needs `wind`."),
        OnlyWith("storm", bool, "is for storms."),
    ] = Field(False, description="")


class Boat(Config):
    wind: int = Field(0, description="")
    motor: bool = Field(False, description="")
    sails: Annotated[Sails, OnlyWith("storm", lambda storm: not storm, "stay down in a storm.")] = Field(
        Sails(), description=""
    )

    @property
    def storm(self) -> bool:
        return self.wind > 9


def problems(boat: Boat, *sections: str) -> list[str]:
    return [str(problem) for problem in idle_options(boat, sections)]


def test_an_option_that_differs_from_its_default_needs_the_other_one() -> None:
    assert problems(Boat(sails=Sails(number=2))) == ["`sails.number=2` needs `wind`, and `wind=0`."]
    assert problems(Boat(sails=Sails(number=2), wind=3)) == problems(Boat()) == []


def test_of_several_marks_the_first_that_forbids_it_is_told() -> None:
    assert problems(Boat(sails=Sails(reefed=True))) == ["`sails.reefed=true` needs `wind`."]
    assert problems(Boat(sails=Sails(reefed=True), wind=3)) == ["`sails.reefed=true` is for storms."]


def test_a_mark_on_a_section_is_for_all_its_options() -> None:
    assert problems(Boat(sails=Sails(number=2), wind=10)) == ["`sails` stay down in a storm."]
    assert problems(Boat(wind=10)) == []


def test_only_the_named_sections_are_checked() -> None:
    boat = Boat(sails=Sails(number=2))
    assert problems(boat, "motor") == []
    assert problems(boat, "motor", "sails") == problems(boat)
