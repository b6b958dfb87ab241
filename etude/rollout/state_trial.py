"""The trial of recurrent layers: a row's bits must not depend on what shares its batch, or on the pieces it comes in.

One layer of each shape is tried, with the inputs that the model computes for random tokens. The same rows are computed
alone, all together, in two pieces, and then one drawn token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from etude.models import Model
from etude.models.mixers import AloneMixer
from etude.models.states import NO_SLOT, Recurrence, Rows, SlotMemory, StateTree
from etude.rollout.scheduler import STATE_CHUNK

LENGTHS = (150, 70, STATE_CHUNK, STATE_CHUNK, 5, 1, 129, 17, 6)
"""The tokens of each row."""

Compute = Callable[[StateTree, Tensor, SlotMemory], Tensor]
"""Computes these tokens of the recorded inputs as a forest: [n] → [n, …]."""


@dataclass(frozen=True)
class _Piece:
    """Tokens that begin with the state of a slot, and leave theirs in another."""

    tokens: Tensor
    read: int
    write: int
    is_step: bool = False


class _Recorder(AloneMixer):
    """A mixer that records the operations of one layer of each shape, with their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[object, tuple[Compute, int]] = {}

    def convolve(self, layer: int, run: Callable[[Tensor], Tensor], x: Tensor, width: int) -> Tensor:
        def compute(tree: StateTree, tokens: Tensor, memory: SlotMemory) -> Tensor:
            return tree.convolve(run, x[:, tokens], width, memory).T

        self.recorded.setdefault((width, x.shape), (compute, x.shape[1]))
        return super().convolve(layer, run, x, width)

    def scan(self, layer: int, recurrence: Recurrence, inputs: Rows) -> Tensor:
        def compute(tree: StateTree, tokens: Tensor, memory: SlotMemory) -> Tensor:
            return tree.scan(recurrence, tuple(x[tokens] for x in inputs), memory)

        self.recorded.setdefault(tuple(x.shape for x in inputs), (compute, len(inputs[0])))
        return super().scan(layer, recurrence, inputs)


def states_are_batch_invariant(model: Model, ids: Tensor, positions: Tensor, multiple: int) -> bool:
    """Return True if every recurrent operation of the model gives a row the same bits however it is computed.

    multiple: the tokens of a pass are padded to a multiple of this number.
    """
    recorder = _Recorder()
    model.hidden(ids, positions, recorder)
    return all(_rows_match(compute, count, multiple) for compute, count in recorder.recorded.values())


def _rows_match(compute: Compute, count: int, multiple: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(count, (length,), generator=generator) for length in LENGTHS]
    drawn = torch.randint(count, (len(rows), 1), generator=generator)
    alone: list[Tensor] = []
    alone_drawn: list[Tensor] = []
    for row, token in zip(rows, drawn, strict=True):
        memory = SlotMemory(1)
        alone += _run(compute, [_Piece(row, NO_SLOT, 0)], memory, multiple)
        alone_drawn += _run(compute, [_Piece(token, 0, 0, is_step=True)], memory, multiple)
    for border in (None, STATE_CHUNK):
        memory = SlotMemory(len(rows))
        whole = _in_pieces(compute, rows, border, memory, multiple)
        steps = [_Piece(token, slot, slot, is_step=True) for slot, token in enumerate(drawn)]
        other = _Piece(rows[0], NO_SLOT, NO_SLOT)  # a prompt that comes while the others draw
        next_tokens = _run(compute, [*steps, other], memory, multiple)[:-1]
        if not all(map(torch.equal, [*whole, *next_tokens], [*alone, *alone_drawn])):
            return False
    return True


def _in_pieces(
    compute: Compute, rows: Sequence[Tensor], border: int | None, memory: SlotMemory, multiple: int
) -> list[Tensor]:
    """Compute all rows together, those that are longer than `border` in two pieces."""
    first = _run(compute, [_Piece(row[:border], NO_SLOT, slot) for slot, row in enumerate(rows)], memory, multiple)
    if border is None:
        return first
    longer = [slot for slot, row in enumerate(rows) if len(row) > border]
    rest = _run(compute, [_Piece(rows[slot][border:], slot, slot) for slot in longer], memory, multiple)
    for slot, part in zip(longer, rest, strict=True):
        first[slot] = torch.cat([first[slot], part])
    return first


def _run(compute: Compute, pieces: Sequence[_Piece], memory: SlotMemory, multiple: int) -> list[Tensor]:
    """Compute these pieces in one pass. Return the outputs of each."""
    tokens = torch.cat([piece.tokens for piece in pieces])
    padding = -len(tokens) % multiple
    lengths = [len(piece.tokens) for piece in pieces] + ([padding] if padding else [])
    tree = StateTree(
        [0, *accumulate(lengths)],
        [-1] * len(lengths),
        tokens.device,
        reads=[piece.read for piece in pieces] + [NO_SLOT] * bool(padding),
        writes=[[piece.write] if piece.write != NO_SLOT else [] for piece in pieces] + [[]] * bool(padding),
        steps=[piece.is_step for piece in pieces] + [False] * bool(padding),
    )
    out = compute(tree, torch.cat([tokens, tokens.new_zeros(padding)]), memory)
    return list(torch.split(out, lengths))[: len(pieces)]
