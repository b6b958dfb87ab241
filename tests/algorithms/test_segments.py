"""Sums over segments against loops, on lengths around the size of a piece."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms.segments import SCAN_CHUNK, Segments

LENGTHS = [
    [],
    [0],
    [0, 0],
    [1],
    [3, 0, 5, 1, 0],
    [SCAN_CHUNK, SCAN_CHUNK - 1, 0, SCAN_CHUNK + 1],
    [2 * SCAN_CHUNK, 5 * SCAN_CHUNK + 3, 1, 4],
    [SCAN_CHUNK * SCAN_CHUNK + 7, 2],
]


def loop(values: list[float], decay: float) -> list[float]:
    found, behind = [], 0.0
    for x in reversed(values):
        behind = x + decay * behind
        found.append(behind)
    return found[::-1]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("decay", [1.0, 0.97, 0.0])
def test_to_go(lengths: list[int], decay: float) -> None:
    segments = Segments(torch.tensor(lengths, dtype=torch.int64))
    values = torch.randn(segments.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = [g for part in values.split(lengths) for g in loop(part.tolist(), decay)]
    found = segments.suffix_sum(values, decay)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_to_go_depends_on_the_segment_alone() -> None:
    """Bit for bit, wherever it stands; what cannot be summed stays in its own segment."""
    values = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone = Segments(torch.tensor([500])).suffix_sum(values, 0.99)
    among = Segments(torch.tensor([37, 500, 3])).suffix_sum(
        torch.cat([values[:37], values, torch.full((3,), float("nan"), dtype=torch.float64)]), 0.99
    )
    assert torch.equal(among[37:537], alone)
    assert bool(among[:537].isfinite().all()) and bool(among[537:].isnan().all())


@pytest.mark.parametrize("lengths", LENGTHS)
def test_so_far_and_shift(lengths: list[int]) -> None:
    segments = Segments(torch.tensor(lengths, dtype=torch.int64))
    values = torch.randn(segments.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    parts = values.split(lengths)
    torch.testing.assert_close(segments.cumsum(values), torch.cat([part.cumsum(0) for part in parts] or [values]))
    ahead = [torch.cat([part[1:], part.new_full((1,), 9.0)])[: len(part)] for part in parts]
    assert torch.equal(segments.shift(values, 9.0), torch.cat(ahead or [values]))


def test_holding_passes_over_empty_segments() -> None:
    segments = Segments(torch.tensor([0, 2, 0, 0, 1]))
    assert segments.locate(torch.arange(3)).tolist() == segments.segment_ids.tolist() == [1, 1, 4]
