"""The Triton kernels of a decode step beside torch's operations, each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.gpu.battery import Figures, Place
from etude.models import StepMemory, StepOps, StepRows, TorchStepOps
from etude.models.kernels.probe import KernelChoice, ProbedModel, probe_kernels
from etude.models.kernels.shapes import SPLIT, AttentionWork, KernelShape
from etude.models.kernels.step import KernelStepOps
from etude.rollout.work_list import WorkList

HIDDEN, INTERMEDIATE = 1024, 3072
EPS = 1e-6


@torch.inference_mode()
def kernels(place: Place) -> Figures:
    """Each kernel beside torch's operations: µs, and the rate at which attention reads keys and values."""
    shape = KernelShape(4, 2, 32, 16) if place.tiny else KernelShape(16, 8, 128, 16)
    dtype = torch.float32 if place.tiny else torch.bfloat16
    choice = probe_kernels(ProbedModel(place.device, dtype, shape, 1000, 1000, True, frozenset({None})))
    figures: Figures = {"kernels": choice.describe()}
    for rows, keys in ((2, 64),) if place.tiny else ((1, 256), (1, 16384), (16, 1024), (256, 256), (256, 4096)):
        for is_shared in (False, True) if rows > 1 else (False,):
            step = _Step(place, shape, dtype, choice, rows, keys, is_shared)
            of_one = 2 * shape.key_heads * keys * shape.width * dtype.itemsize
            name = f"attention, {rows} rows of {keys} {'shared ' if is_shared else ''}keys"
            for kind, timed in step.attention():
                microseconds = _microseconds(place, timed)
                figures[f"{name}, {kind}: µs"] = microseconds
                figures[f"{name}, {kind}: GB/s read"] = rows * of_one / microseconds / 1e3
            if not is_shared:
                for name, timed in step.small_steps():
                    figures[f"{name}: µs"] = _microseconds(place, timed)
            del step
            place.free()
    return figures


def _microseconds(place: Place, work: Callable[[], object]) -> float:
    """Return the time of one call, of twenty in a graph on a GPU."""

    def calls() -> None:
        for _ in range(20):
            work()

    if not place.on_gpu:
        return 1e3 * float(place.milliseconds(calls)["ms"]) / 20
    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return 1e3 * float(place.milliseconds(graph.replay)["ms"]) / 20


class _Step:
    """Rows over keys and values of their own, or of a prompt that all share but its last block."""

    def __init__(
        self,
        place: Place,
        shape: KernelShape,
        dtype: torch.dtype,
        choice: KernelChoice,
        rows: int,
        keys: int,
        is_shared: bool,
    ) -> None:
        per_row = keys // shape.block_size
        table = torch.arange(rows * per_row).view(rows, per_row)
        if is_shared:
            table[:, :-1] = table[0, :-1]
        extent = (1, 2, shape.key_heads, rows * per_row, shape.block_size, shape.width)
        angles = torch.randn(2, keys, shape.width, dtype=dtype, device=place.device)
        memory = StepMemory(
            keys_values=torch.randn(extent, dtype=dtype, device=place.device),
            table=table.to(place.device),
            cos=angles[0],
            sin=angles[1],
            fetch_bytes=1 << 29,
        )
        newest = np.full(rows, keys - 1)
        slots = np.arange(rows)
        of_step = StepRows(
            torch.from_numpy(slots).to(place.device), torch.from_numpy(newest).to(place.device), blocks=per_row
        )
        self._ops: dict[str, StepOps] = {"torch": TorchStepOps(memory, of_step)}
        if choice.held:
            listed = WorkList(split=SPLIT, block_size=shape.block_size, rows_per_entry=shape.rows_per_entry)
            listed.update(slots, newest, table.numpy())
            work = AttentionWork.allocate(shape, rows=rows, splits=-(-keys // SPLIT), device=place.device)
            work.load(torch.from_numpy(listed.entries))
            self._ops["kernel"] = KernelStepOps(memory, of_step, work, choice.held)
        self._rows = rows
        self._shape = shape
        self._x = torch.randn(rows, 2 * INTERMEDIATE, dtype=dtype, device=place.device)

    def attention(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield attention of each kind."""
        heads = self._shape.query_heads
        q = self._x[:, : heads * self._shape.width].reshape(self._rows, heads, -1)
        for kind, ops in self._ops.items():
            yield kind, lambda ops=ops: ops.attend(0, q, scale=1.0, window=None)  # type: ignore[misc]

    def small_steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the other steps of each kind."""
        shape = self._shape
        qkv = self._x[:, : (shape.query_heads + 2 * shape.key_heads) * shape.width].reshape(self._rows, -1, shape.width)
        weight = self._x[0, : shape.width].clone()
        hidden = self._x[:, :HIDDEN].clone()
        residual = hidden.clone()
        scale = self._x[0, :HIDDEN].clone()
        for kind, ops in self._ops.items():
            rows = f"{self._rows} rows, {kind}"
            yield f"norm, {rows}", lambda ops=ops: ops.add_norm(hidden, residual, scale, EPS)  # type: ignore[misc]
            yield f"rotary positions, {rows}", lambda ops=ops: ops.write(0, qkv, weight, weight, EPS)  # type: ignore[misc]
            yield f"activation, {rows}", lambda ops=ops: ops.gated_silu(self._x)  # type: ignore[misc]
