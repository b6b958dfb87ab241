"""What the cache relies on: kernels that compute a row the same whatever stands beside it, at the sizes it keeps to."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from etude.rollout.grouping import KEYS
from etude.rollout.kv import QUERIES, ROWS, SHORTEST, Cache, block_bytes
from tests.rollout.engines import model_of

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (300, 192), (512, 1536), (128, 4864)])
def test_a_linear_layer_on_a_multiple_of_rows_gives_each_row_its_own(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight, rows = random(outputs, inputs, dtype=dtype), random(40 * ROWS, inputs, dtype=dtype, seed=1)
    alone = linear(rows[:ROWS], weight)
    for count in (2, 3, 5, 8, 40):
        assert torch.equal(linear(rows[: count * ROWS], weight)[:ROWS], alone)
        assert torch.equal(linear(rows[: count * ROWS].flip(0), weight).flip(0)[:ROWS], alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_products_over_keys_do_not_depend_on_padding_or_company(dtype: torch.dtype, width: int) -> None:
    keys, values = (random(24, 640, width, dtype=dtype, seed=seed) for seed in (1, 2))
    queries = random(24, 128, width, dtype=dtype, seed=3)
    for seen in (SHORTEST, 100, KEYS + 1, 300):
        weights = torch.zeros(24, 128, 640, dtype=dtype)
        weights[:, :, :seen] = torch.rand(24, 128, seen, generator=torch.Generator().manual_seed(4)).to(dtype)
        found = []
        for company, rows, length in ((2, QUERIES, -(-seen // 16) * 16), (24, 8, seen + 40), (3, 128, 640)):
            scores = torch.bmm(queries[:company, :rows], keys[:company, :length].transpose(1, 2))
            total = torch.zeros(company, rows, width, dtype=dtype)
            for start in range(0, length, KEYS):
                part = slice(start, min(start + KEYS, length))
                total.baddbmm_(weights[:company, :rows, part], values[:company, part])
            found.append((scores[:2, :QUERIES, :seen], total[:2, :QUERIES]))
        for scores, total in found[1:]:
            assert torch.equal(scores, found[0][0]) and torch.equal(total, found[0][1])


def test_the_memory_is_what_it_says() -> None:
    model = model_of(layers=3)
    cache = Cache(model, blocks=10, size=8, steady=True)
    assert cache.memory.numel() * cache.memory.itemsize == 10 * block_bytes(model, 8)
    assert cache.block_bytes * model.layers == block_bytes(model, 8)
