"""What a plan says, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.tools.plan.memory_tracker import PeakMemory
from etude.tools.plan.step_time import StepTime

__all__ = ["GIB", "DeviceMemory", "MemoryPlan", "MemorySaving"]

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """What one device of a kind holds."""

    name: str
    count: int
    """How many of them there are."""
    phases: Mapping[str, PeakMemory]
    """The most that is held in each phase of a step."""
    limit: int | None
    """Bytes that it has, where that is known."""
    base_bytes: int = 0
    """Bytes of the program itself, which is no tensor's."""

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def total(self) -> int:
        """Bytes, at the worst moment."""
        return self.phases[self.peak_phase].total + self.base_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it has room for that."""
        return None if self.limit is None else self.total <= self.limit


@dataclass(frozen=True)
class MemorySaving:
    """An option, set to something else, and what the fullest device would hold then."""

    option: str
    value: str
    total: int


@dataclass(frozen=True)
class MemoryPlan:
    """What was found."""

    devices: tuple[DeviceMemory, ...]
    """The one on which the policy learns is the first."""
    ranks: int
    row: tuple[int, int]
    """The longest prompt, and its longest answer."""
    max_concurrency: int
    """Answers that are drawn at once by an engine; 0 where nothing is sampled."""
    kv_tokens: int
    """Tokens that it holds keys and values of; 0 where that is not known."""
    parameters: int
    step_time: StepTime | None
    savings: tuple[MemorySaving, ...] = ()
    notes: tuple[str, ...] = ()
    """What of it is not known, or was chosen here."""

    @property
    def fits(self) -> bool | None:
        """Whether every device has room."""
        fits = [device.fits for device in self.devices]
        return None if None in fits else all(fits)
