"""What a plan says, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.tools.ledger import Peak
from etude.tools.pace import Pace

__all__ = ["GIB", "Knob", "Plan", "Planned"]

GIB = 2**30


@dataclass(frozen=True)
class Planned:
    """What one device of a kind holds."""

    name: str
    count: int
    """How many of them there are."""
    phases: Mapping[str, Peak]
    """The most that is held in each phase of a step."""
    limit: int | None
    """Bytes that it has, where that is known."""
    also: int = 0
    """Bytes of the program itself, which is no tensor's."""

    @property
    def worst(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def total(self) -> int:
        """Bytes, at the worst moment."""
        return self.phases[self.worst].total + self.also

    @property
    def fits(self) -> bool | None:
        """Whether it has room for that."""
        return None if self.limit is None else self.total <= self.limit


@dataclass(frozen=True)
class Knob:
    """An option, set to something else, and what the fullest device would hold then."""

    option: str
    value: str
    total: int


@dataclass(frozen=True)
class Plan:
    """What was found."""

    devices: tuple[Planned, ...]
    """The one on which the policy learns is the first."""
    ranks: int
    row: tuple[int, int]
    """The longest prompt, and its longest answer."""
    at_once: int
    """Answers that are drawn at once by an engine; 0 where nothing is sampled."""
    cached: int
    """Tokens that it holds keys and values of; 0 where that is not known."""
    parameters: int
    pace: Pace | None
    knobs: tuple[Knob, ...] = ()
    notes: tuple[str, ...] = ()
    """What of it is not known, or was chosen here."""

    @property
    def fits(self) -> bool | None:
        """Whether every device has room."""
        answers = [device.fits for device in self.devices]
        return None if None in answers else all(answers)
