"""The share of a GPU for a server beside a rank."""

from __future__ import annotations

import pytest

from etude.errors import ConfigError
from etude.rollout.gpu_share import GIB, share_beside_rank


@pytest.mark.parametrize(("free", "total", "share"), [(78, 80, 0.9), (64, 80, 0.75), (20.01, 24, 0.667)])
def test_a_server_gets_what_the_rank_leaves(free: float, total: int, share: float) -> None:
    assert share_beside_rank(int(free * GIB), total * GIB) == share


def test_a_full_gpu_is_refused_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match=r"Of 24 GiB of the GPU 4 GiB are free .* `rollout\.devices`"):
        share_beside_rank(4 * GIB, 24 * GIB)
