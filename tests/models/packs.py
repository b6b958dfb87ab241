"""Small forests of token segments: as packs, and as separate rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etude.batch import Pack

# (parent, length): two prompts with answers, one answer with further turns, and a separate row.
FOREST = ((-1, 9), (0, 7), (0, 4), (0, 1), (-1, 6), (4, 3), (5, 2), (5, 5), (-1, 11))


def pack_of(segments: Sequence[tuple[int, int]], *, vocabulary: int = 50, seed: int = 0) -> Pack:
    """Return segments of random tokens, each given as (parent, length)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [length for _, length in segments]
    ends: list[int] = []
    positions = []
    for parent, length in segments:
        start = ends[parent] if parent >= 0 else 0
        positions.append(torch.arange(start, start + length))
        ends.append(start + length)
    total = sum(lengths)
    return Pack(
        ids=torch.randint(0, vocabulary, (total,), generator=generator, dtype=torch.int32),
        positions=torch.cat(positions),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        parent=torch.tensor([parent for parent, _ in segments]),
        source=torch.arange(-1, total - 1),
    )


def paths(pack: Pack) -> list[Tensor]:
    """Return the rows of a pack: for each leaf, the indices of the tokens from its root on."""
    starts = pack.offsets.tolist()
    parents = pack.parent.tolist()
    rows: list[Tensor] = []
    for segment, parent in enumerate(parents):
        own = torch.arange(starts[segment], starts[segment + 1])
        rows.append(torch.cat([rows[parent], own]) if parent >= 0 else own)
    return [rows[segment] for segment in range(len(parents)) if segment not in parents]


def unshared(pack: Pack) -> Pack:
    """Return the same rows as separate segments, without shared tokens."""
    rows = paths(pack)
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.cat(rows)
    return Pack(
        ids=pack.ids[tokens],
        positions=pack.positions[tokens],
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        parent=torch.full_like(lengths, -1),
        source=torch.arange(-1, len(tokens) - 1),
    )
