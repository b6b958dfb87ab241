"""A trial that decides which kernels are used: each computes a few rows, and so do torch's operations.

A kernel is not used if Triton is missing, if it cannot be compiled, or if its rows are wrong. Triton compiles launchers
with a C compiler and Python's headers, so a machine without them has no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from etude.models.kernels.shapes import AttentionWork, KernelShape
from etude.models.kernels.step import ACTIVATION, ATTENTION, KERNELS, NORM, ROTARY, KernelStepOps, attention
from etude.models.step_ops import StepMemory, StepOps, StepRows, TorchStepOps

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""The largest difference from torch's operations relative to a value, by type: some of its last bits."""
EPS = 1e-6
NEWEST = (300, 290, 5)
"""The newest positions of the trial's rows. The first two hold the same first split."""


@dataclass(frozen=True)
class ProbedModel:
    """The properties of a model for which kernels are compiled."""

    device: torch.device
    dtype: torch.dtype
    shape: KernelShape
    blocks: int
    """The blocks of its cache."""
    parts: int
    """The rows of a step times the splits of a context, at most."""
    has_norms: bool
    """True if queries and keys have norms."""
    windows: frozenset[int | None]
    """The windows of its layers."""


@dataclass(frozen=True)
class KernelChoice:
    """The kernels that hold."""

    held: frozenset[str]
    refused: tuple[str, ...]
    """Each that does not, with the reason."""

    def describe(self) -> str:
        """Return one line that names the kernels, and the reason for each that is not used."""
        used = ", ".join(name for name in KERNELS if name in self.held)
        rest = "; ".join(self.refused)
        if not self.refused:
            return f"Triton kernels in decode steps: {used}."
        if not used:
            return f"Decode steps use torch's operations in place of Triton kernels: {rest}."
        return f"Triton kernels in decode steps: {used}. torch's operations take the place of the others: {rest}."


@cache
def probe_kernels(model: ProbedModel) -> KernelChoice:
    """Try each kernel once for a model like this, on its device."""
    if reason := _missing(model.device):
        return KernelChoice(frozenset(), (reason,))
    refused = {name: reason for name in KERNELS if (reason := _try(name, model))}
    return KernelChoice(
        frozenset(name for name in KERNELS if name not in refused),
        tuple(f"{name}: {reason}" for name, reason in refused.items()),
    )


def _missing(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed; a CUDA build of torch brings it"
    if device.type == "cuda" or attention.is_interpreted():
        return None
    return f"the device is a {device.type.upper()}, not a GPU"


def _try(name: str, model: ProbedModel) -> str | None:
    """Return the reason why a kernel does not hold."""
    if name == ATTENTION and (reason := model.shape.unsupported(model.blocks, model.parts)):
        return reason
    try:
        with torch.inference_mode():
            trial = _Trial(name, model)
            for found, expected in TRIALS[name](trial):
                error = float(((found.float() - expected.float()).abs() / (1 + expected.float().abs())).max())
                if not error <= TOLERANCES[model.dtype]:  # also if it is not a number
                    return f"its result is off by {error:.1g}"
    except Exception as error:  # a compiler, an assembler and a driver raise what they like
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[-1]}"
    return None


class _Trial:
    """A few rows over a small cache, and the operations of both kinds."""

    def __init__(self, name: str, model: ProbedModel) -> None:
        shape = model.shape
        self.model = model
        self._draws = torch.Generator().manual_seed(0)
        per_context = NEWEST[0] // shape.block_size + 1
        table = torch.arange(3)[:, None] * per_context + torch.arange(per_context)
        shared = 256 // shape.block_size
        table[1, :shared] = table[0, :shared]
        self.memory = StepMemory(
            keys_values=self.numbers(2, shape.key_heads, 3 * per_context, shape.block_size, shape.width)[None],
            table=table.to(model.device),
            cos=self.numbers(NEWEST[0] + 1, shape.width),
            sin=self.numbers(NEWEST[0] + 1, shape.width),
            fetch_bytes=1 << 24,
        )
        order = torch.arange(3, device=model.device)
        positions = torch.tensor(NEWEST, device=model.device)
        rows = StepRows(order, positions, blocks=per_context)
        self.theirs: StepOps = TorchStepOps(self.memory, rows)
        self.ours: StepOps = KernelStepOps(self.memory, rows, self._work(), {name})

    def numbers(self, *shape: int) -> Tensor:
        """Return random numbers on the device."""
        drawn = torch.randn(shape, generator=self._draws)
        return drawn.to(self.model.device, self.model.dtype)

    def _work(self) -> AttentionWork:
        """Return the list of work: the first two rows share the first split, if an entry has two rows."""
        shape = self.model.shape
        per_entry = shape.rows_per_entry
        listed = [(0, 0, 1), (1, 0), (1, 1), (0, 2)] if per_entry > 1 else [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
        entries = torch.full((len(listed), 1 + per_entry), -1, dtype=torch.int32)
        for entry, members in zip(entries, listed, strict=True):
            entry[: len(members)] = torch.tensor(members)
        work = AttentionWork.allocate(shape, rows=3, splits=2, device=self.model.device)
        work.load(entries)
        return work


def _try_attention(trial: _Trial) -> Iterator[tuple[Tensor, Tensor]]:
    shape = trial.model.shape
    q = trial.numbers(3, shape.query_heads, shape.width)
    scale = shape.width**-0.5
    for window in trial.model.windows:
        found = trial.ours.attend(0, q, scale=scale, window=window)
        yield found, trial.theirs.attend(0, q, scale=scale, window=window)


def _try_norm(trial: _Trial) -> Iterator[tuple[Tensor, Tensor]]:
    x = trial.numbers(3, 96)
    weight = trial.numbers(96)
    for residual in (None, trial.numbers(3, 96)):
        before = [None if residual is None else residual.clone() for _ in range(2)]
        found = trial.ours.add_norm(x.clone(), before[0], weight, EPS)
        yield from zip(found, trial.theirs.add_norm(x.clone(), before[1], weight, EPS), strict=True)


def _try_rotary(trial: _Trial) -> Iterator[tuple[Tensor, Tensor]]:
    shape = trial.model.shape
    qkv = trial.numbers(3, shape.query_heads + 2 * shape.key_heads, shape.width)
    norm = trial.numbers(shape.width) if trial.model.has_norms else None
    stored = trial.memory.keys_values
    before = stored.clone()
    found = trial.ours.write(0, qkv, norm, norm, EPS)
    written = stored.clone()
    stored.copy_(before)
    yield found, trial.theirs.write(0, qkv, norm, norm, EPS)
    yield written, stored


def _try_activation(trial: _Trial) -> Iterator[tuple[Tensor, Tensor]]:
    x = trial.numbers(3, 2 * 96)
    yield trial.ours.gated_silu(x), trial.theirs.gated_silu(x)


TRIALS: dict[str, Callable[[_Trial], Iterator[tuple[Tensor, Tensor]]]] = {
    ATTENTION: _try_attention,
    NORM: _try_norm,
    ROTARY: _try_rotary,
    ACTIVATION: _try_activation,
}
