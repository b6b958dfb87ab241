"""The plan as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.tools.plan.memory_tracker import PeakMemory
from etude.tools.plan.step_time import StepTime

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one kind of device."""

    name: str
    count: int
    """The number of such devices."""
    phases: Mapping[str, PeakMemory]
    """The peak memory of each phase of a step."""
    limit: int | None
    """The device's memory in bytes; None if it is unknown."""
    base_bytes: int = 0
    """The bytes of the program itself, without tensors."""
    host_bytes: int = 0
    """The most bytes of CPU memory that a GPU's offloaded tensors take; 0 for the CPU itself."""

    @property
    def peak_phase(self) -> str:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def total(self) -> int:
        """The peak in bytes, with the program itself."""
        return self.phases[self.peak_phase].total + self.base_bytes

    @property
    def fits(self) -> bool | None:
        """True if the peak fits into the device; None if its memory is unknown."""
        return None if self.limit is None else self.total <= self.limit


@dataclass(frozen=True)
class MemorySaving:
    """An option, another value for it, and the peak of the fullest device with that value."""

    option: str
    value: str
    total: int


@dataclass(frozen=True)
class MemoryPlan:
    """The result of planning a run."""

    devices: tuple[DeviceMemory, ...]
    """The kinds of devices; the first one trains the policy."""
    ranks: int
    row: tuple[int, int]
    """The longest prompt and the longest answer, in tokens."""
    max_concurrency: int
    """The most answers that an engine samples at the same time; 0 without sampling."""
    kv_tokens: int
    """The capacity of the KV cache in tokens; 0 if it is unknown."""
    state_bytes: int
    """The bytes of the states of one request in recurrent layers; 0 for a model without them."""
    parameters: int
    active_parameters: int
    """The parameters that one token uses: fewer than all in a mixture of experts."""
    step_time: StepTime | None
    savings: tuple[MemorySaving, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about unknown parts, and about choices of the planner."""

    @property
    def fits(self) -> bool | None:
        """True if every device fits; None if a device's memory is unknown."""
        fits = [device.fits for device in self.devices]
        return None if None in fits else all(fits)
