"""The plan names the largest micro-batch that fits."""

from __future__ import annotations

import pytest

from etude.tools.plan.micro_batch import FILLED, MOST_TOKENS, fitting_tokens

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "total", "activations", "tokens", "expected"),
    [
        (80 * GIB, 40 * GIB, 16 * GIB, 16384, 50176),  # 1 MiB a token, and 49.6 GiB beside the rest
        (80 * GIB, 40 * GIB, 16 * GIB, 8192, 24576),  # twice as much a token
        (24 * GIB, 30 * GIB, 20 * GIB, 16384, 9216),  # less than planned
        (24 * GIB, 40 * GIB, 10 * GIB, 16384, 0),  # the weights alone do not fit
        (140 * GIB, 20 * GIB, 4 * GIB, 16384, MOST_TOKENS),
        (80 * GIB, 10 * GIB, 0, 16384, MOST_TOKENS),  # a part of a model that keeps nothing
    ],
)
def test_the_largest_micro_batch_fills_the_memory(
    limit: int, total: int, activations: int, tokens: int, expected: int
) -> None:
    fitting = fitting_tokens(limit, total, activations, tokens)
    assert fitting == expected
    if 0 < fitting < MOST_TOKENS:
        assert total - activations + fitting * activations / tokens <= FILLED * limit
