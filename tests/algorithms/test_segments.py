"""Sums over segments compared with loops, for lengths near the size of a chunk."""

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


def suffix_sum_by_loop(values: list[float], decay: float) -> list[float]:
    result, total = [], 0.0
    for x in reversed(values):
        total = x + decay * total
        result.append(total)
    return result[::-1]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("decay", [1.0, 0.97, 0.0])
def test_suffix_sums_equal_a_loop(lengths: list[int], decay: float) -> None:
    segments = Segments(torch.tensor(lengths, dtype=torch.int64))
    values = torch.randn(segments.size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = [g for part in values.split(lengths) for g in suffix_sum_by_loop(part.tolist(), decay)]
    result = segments.suffix_sum(values, decay)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_suffix_sums_depend_on_the_segment_alone() -> None:
    """Sums are the same bits at any position. A NaN stays within its segment."""
    values = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    one_segment = Segments(torch.tensor([500])).suffix_sum(values, 0.99)
    several_segments = Segments(torch.tensor([37, 500, 3])).suffix_sum(
        torch.cat([values[:37], values, torch.full((3,), float("nan"), dtype=torch.float64)]), 0.99
    )
    assert torch.equal(several_segments[37:537], one_segment)
    assert bool(several_segments[:537].isfinite().all()) and bool(several_segments[537:].isnan().all())


@pytest.mark.parametrize("lengths", LENGTHS)
def test_cumulative_sums_and_shifts_stay_within_segments(lengths: list[int]) -> None:
    segments = Segments(torch.tensor(lengths, dtype=torch.int64))
    values = torch.randn(segments.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    parts = values.split(lengths)
    torch.testing.assert_close(segments.cumsum(values), torch.cat([part.cumsum(0) for part in parts] or [values]))
    ahead = [torch.cat([part[1:], part.new_full((1,), 9.0)])[: len(part)] for part in parts]
    assert torch.equal(segments.shift(values, 9.0), torch.cat(ahead or [values]))


def test_locate_skips_empty_segments() -> None:
    segments = Segments(torch.tensor([0, 2, 0, 0, 1]))
    assert segments.locate(torch.arange(3)).tolist() == segments.segment_ids.tolist() == [1, 1, 4]
