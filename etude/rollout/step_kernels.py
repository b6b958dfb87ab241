"""The Triton kernels of an engine's decode steps, with their list of work on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.models import Model, StepMemory, StepOps, StepRows
from etude.models.kernels.probe import KernelChoice, ProbedModel, probe_kernels
from etude.models.kernels.shapes import SPLIT, AttentionWork, KernelShape
from etude.models.kernels.step import ATTENTION, KernelStepOps
from etude.observe import get_logger
from etude.rollout.kv_cache import KVCache
from etude.rollout.slot_state import SlotState
from etude.rollout.work_list import WorkList


def make_kernels(model: Model, cache: KVCache, state: SlotState) -> StepKernels | None:
    """Return the kernels that hold for a model over a cache; None if there are none."""
    assert model.own_layers is not None, "see `supports_static`"
    layers = model.own_layers.layers
    splits = -(-state.table.shape[1] * cache.size // SPLIT)
    rows = len(state.row_slots)
    choice = probe_kernels(
        ProbedModel(
            device=model.device,
            dtype=model.dtype,
            shape=_shape(cache),
            blocks=cache.blocks,
            parts=rows * splits,
            has_norms=layers[0].q_norm is not None,
            windows=frozenset(layer.window for layer in layers),
        )
    )
    if choice.held or model.device.type == "cuda":  # a CPU has none, which needs no line
        _report(choice)
    if not choice.held:
        return None
    work = None
    if ATTENTION in choice.held:
        work = AttentionWork.allocate(_shape(cache), rows=rows, splits=splits, device=cache.device)
    return StepKernels(choice.held, work, block_size=cache.size, scratch=state.scratch)


class StepKernels:
    """The operations of passes by the kernels that hold (a `MakeStepOps`)."""

    def __init__(self, held: frozenset[str], work: AttentionWork | None, *, block_size: int, scratch: int) -> None:
        """work: for the kernel of attention, if it is held. scratch: the slot of rows without a request."""
        self._held = held
        self._work = work
        self._scratch = scratch
        if work is not None:
            self._list = WorkList(split=SPLIT, block_size=block_size, rows_per_entry=work.rows_per_entry)

    @property
    def has_attention(self) -> bool:
        """True if attention is a kernel, which needs no bound of the contexts."""
        return self._work is not None

    def __call__(self, memory: StepMemory, rows: StepRows) -> StepOps:
        """Return the operations of a pass."""
        return KernelStepOps(memory, rows, self._work, self._held)

    def set_rows(self, slots: Sequence[int], lengths: Sequence[int], count: int, table: NDArray[np.int64]) -> None:
        """List the work of the next step, without a wait for the device.

        lengths: of the contexts, with the newest token. count: the rows, of which the rest are scratch. table: the
        blocks of each slot.
        """
        if self._work is None:
            return
        padding = count - len(slots)
        positions = np.array([*(length - 1 for length in lengths), *[0] * padding])
        if self._list.update(np.array([*slots, *[self._scratch] * padding]), positions, table):
            self._work.load(torch.from_numpy(self._list.entries))

    def tensors(self) -> list[Tensor]:
        """Return all buffers."""
        return [] if self._work is None else self._work.tensors()


def _shape(cache: KVCache) -> KernelShape:
    return KernelShape(cache.heads * cache.queries_per_kv_head, cache.heads, cache.width, cache.size)


@cache  # one line for each choice of a process
def _report(choice: KernelChoice) -> None:
    """Log the kernels, and the reason for each that is not used."""
    log = get_logger("rollout")
    if choice.refused:
        log.warning(choice.describe())
    else:
        log.info(choice.describe())
