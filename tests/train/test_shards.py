"""How weights are cut into shards and buckets; what ranks make of that is in tests/recipes/test_ranks.py."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.train.shards import _buckets, _rows, _stretch

shapes = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=6)


def leaves(shapes_of: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {f"leaf.{i}": torch.zeros(shape, dtype=dtype) for i, shape in enumerate(shapes_of)}


@given(shapes=shapes, ranks=st.integers(2, 5))
def test_shards_are_cut_as_torch_chunks(shapes: list[tuple[int, ...]], ranks: int) -> None:
    for leaf in leaves(shapes).values():
        rows = _rows(leaf, ranks)
        if leaf.ndim == 0:
            assert rows == [slice(0, 1)] * ranks  # a single number is every rank's
            continue
        chunks = [len(chunk) for chunk in leaf.chunk(ranks)]
        assert [each.stop - each.start for each in rows] == chunks + [0] * (ranks - len(chunks))
        assert all(a.stop == b.start for a, b in pairwise(rows))


@given(shapes=shapes, ranks=st.integers(2, 5), size=st.sampled_from([1, 64, 4096]), half=st.booleans())
def test_every_row_goes_through_one_bucket(shapes: list[tuple[int, ...]], ranks: int, size: int, half: bool) -> None:
    every = leaves(shapes, torch.bfloat16 if half else torch.float32)
    buckets = _buckets(every, ranks, half, size)
    seen = {name: [torch.zeros(rows.stop - rows.start) for rows in _rows(leaf, ranks)] for name, leaf in every.items()}
    for bucket in buckets:
        assert bucket.dtype == torch.float32
        widest = max(piece.row for piece in bucket.pieces)
        assert bucket.size * ranks * 4 <= max(size, widest * ranks * 4)
        ends = 0
        for piece in bucket.pieces:
            assert piece.at == ends
            ends += (piece.last - piece.first) * piece.row
            for held in seen[piece.name]:
                held[_stretch(slice(0, len(held)), piece)] += 1
        assert ends == bucket.size
    assert all(bool((held == 1).all()) for shards in seen.values() for held in shards)


def test_buckets_follow_the_backward_pass() -> None:
    every = leaves([(8, 4), (8, 4), (8, 4)])
    names = [piece.name for bucket in _buckets(every, 2, False, 128) for piece in bucket.pieces]
    assert names == ["leaf.2", "leaf.1", "leaf.0"]
    assert [len(bucket.pieces) for bucket in _buckets(every, 2, False, 2**20)] == [3]
