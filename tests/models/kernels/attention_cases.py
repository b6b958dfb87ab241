"""Cases of the attention kernel: steps with shared prompts and chunks of prompts, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etude.models import StepMemory, StepRows
from etude.models.kernels.paged_attention import Scoring, paged_attention
from etude.models.kernels.shapes import SPLIT, AttentionWork, KernelShape
from etude.rollout.work_list import WorkList

TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""The largest error, by type: that of the weights' rounding. float32 has products of its own precision."""


@dataclass(frozen=True)
class AttentionCase:
    """One shape of heads, and one way to score."""

    width: int = 32
    query_heads: int = 4
    key_heads: int = 2
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    shared: int = 256
    """The tokens of the prompt that three of the requests answer."""
    chunk: bool = False
    """Rows are tokens of two prompts instead of the newest of six requests."""


@dataclass(frozen=True, eq=False)
class Step:
    """The keys and values of requests, and the rows of a step."""

    memory: StepMemory
    rows: StepRows
    q: Tensor
    scoring: Scoring

    def attend(self) -> Tensor:
        """Compute all rows by the kernel."""
        work = make_work(self.memory, self.rows, self.q.shape[1], programs=5)
        return paged_attention(self.q, self.memory, 0, self.rows, work, self.scoring)

    def attend_alone(self, row: int) -> Tensor:
        """Compute one row by the kernel, with one program for each head."""
        one = slice(row, row + 1)
        rows = StepRows(self.rows.slots[one].clone(), self.rows.positions[one].clone(), self.rows.blocks)
        work = make_work(self.memory, rows, self.q.shape[1], programs=1)
        return paged_attention(self.q[one].clone(), self.memory, 0, rows, work, self.scoring)[0]


def make_work(memory: StepMemory, rows: StepRows, query_heads: int, *, programs: int) -> AttentionWork:
    """Return the list of work for rows. What no row reads is NaN, or a row that does not exist."""
    _, _, key_heads, _, size, width = memory.keys_values.shape
    shape = KernelShape(query_heads, key_heads, width, size)
    made = WorkList(split=SPLIT, block_size=size, rows_per_entry=shape.rows_per_entry)
    made.update(rows.slots.cpu().numpy(), rows.positions.cpu().numpy(), memory.table.cpu().numpy())
    splits = int(rows.positions.max()) // SPLIT + 2
    work = AttentionWork.allocate(shape, rows=len(rows.slots), splits=splits, device=memory.table.device)
    work.entries.fill_(-1_000_000)
    work.partial.fill_(torch.nan)
    work.partial_lse.fill_(torch.nan)
    work.load(torch.from_numpy(made.entries))
    return replace(work, programs=programs)


def make_step(case: AttentionCase, device: str, dtype: torch.dtype) -> Step:
    """Slots 0, 1 and 2 answer one prompt, 3 and 4 hold keys of their own, and 5 is the scratch slot with block 0."""
    torch.manual_seed(0)
    size = case.block_size
    table = torch.zeros(6, 640 // size, dtype=torch.int64)
    unused = iter((torch.randperm(1300 // size) + 1).tolist())
    common = [next(unused) for _ in range(case.shared // size)]
    for slot, (held, tokens) in enumerate([(common, 48), (common, 48), (common, 48), ([], 320), ([], 32)]):
        blocks = held + [next(unused) for _ in range(tokens // size)]
        table[slot, : len(blocks)] = torch.tensor(blocks)
    if case.chunk:  # tokens 250 to 261 of one prompt, and the first five of another
        slots = [3] * 12 + [4] * 5
        positions = [*range(250, 262), *range(5)]
    else:
        slots = [2, 0, 3, 1, 4, 5]
        positions = [case.shared + 17, case.shared + 3, 300, case.shared + 40, 5, 0]
    blocks = 1300 // size + 1
    stored = torch.randn(2, case.key_heads, blocks * size, case.width)
    is_held = torch.zeros(blocks * size, dtype=torch.bool)
    for slot, position in zip(slots, positions, strict=True):
        n = torch.arange(position + 1)
        is_held[table[slot, n // size] * size + n % size] = True
    stored[:, :, ~is_held] = torch.nan  # what no row sees must not matter
    sinks = torch.randn(case.query_heads).to(device) if case.has_sinks else None
    memory = StepMemory(
        keys_values=stored.view(1, 2, case.key_heads, blocks, size, case.width).to(device, dtype),
        table=table.to(device),
        cos=torch.empty(0),
        sin=torch.empty(0),
        fetch_bytes=0,
    )
    return Step(
        memory,
        StepRows(torch.tensor(slots).to(device), torch.tensor(positions).to(device), table.shape[1]),
        torch.randn(len(slots), case.query_heads, case.width).to(device, dtype),
        Scoring(case.width**-0.5, case.window, case.softcap, sinks),
    )


def expected(step: Step) -> Tensor:
    """Attention in float64, row by row."""
    stored = step.memory.keys_values[0].flatten(2, 3)
    size = step.memory.keys_values.shape[4]
    group = step.q.shape[1] // stored.shape[1]
    out = torch.empty(step.q.shape, dtype=torch.float64, device=step.q.device)
    scoring = step.scoring
    for row, (slot, position) in enumerate(zip(step.rows.slots.tolist(), step.rows.positions.tolist(), strict=True)):
        n = torch.arange(position + 1, device=step.q.device)
        place = step.memory.table[slot, n // size] * size + n % size
        keys, values = stored[:, :, place].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,hnd->hn", step.q[row].double(), keys) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        if scoring.window is not None:
            scores = scores.masked_fill(n <= position - scoring.window, -torch.inf)
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks.double()[:, None]], 1)
        weights = torch.softmax(scores, -1)[:, : position + 1]
        out[row] = torch.einsum("hn,hnd->hd", weights, values)
    return out


def check_attention(case: AttentionCase, device: str, dtype: torch.dtype, alone: Sequence[int] = ()) -> None:
    """The kernel is within the tolerance; the rows that are named have the same bits alone and in company."""
    step = make_step(case, device, dtype)
    out = step.attend()
    error = float((out.double() - expected(step)).abs().max())
    assert error < TOLERANCES[dtype], f"{case} in {dtype} is off by {error:.1e}"
    for row in alone:
        assert torch.equal(step.attend_alone(row), out[row]), f"row {row} of {case} has other bits alone"


def check_scratch_rows(device: str, dtype: torch.dtype) -> None:
    """Rows of the scratch slot see its first key, whatever list was left by the step before."""
    step = make_step(AttentionCase(), device, dtype)
    work = make_work(step.memory, step.rows, step.q.shape[1], programs=5)
    rows = StepRows(torch.full_like(step.rows.slots, 5), torch.zeros_like(step.rows.positions), step.rows.blocks)
    out = paged_attention(step.q, step.memory, 0, rows, work, step.scoring)
    first = step.memory.keys_values[0, 1, :, 0, 0].repeat_interleave(2, 0)
    assert torch.equal(out, first.expand_as(out))
