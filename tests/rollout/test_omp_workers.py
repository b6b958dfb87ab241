"""OpenMP workers start with a parallel kernel and end when released."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from etude.rollout.engine_thread import release_omp_workers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_released_workers_are_gone_and_the_next_kernel_works_as_before() -> None:
    counts: list[int] = []
    threads = Path("/proc/self/task")

    def compute() -> None:
        torch.set_num_threads(3)
        values = torch.randn(1 << 20)
        before = len(list(threads.iterdir()))
        expected = values.exp().sum()
        during = len(list(threads.iterdir()))
        release_omp_workers()
        after = len(list(threads.iterdir()))
        assert torch.equal(values.exp().sum(), expected) and torch.get_num_threads() == 3
        counts.extend([during - before, during - after, len(list(threads.iterdir())) - after])
        release_omp_workers()

    count = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(count)
    assert counts == [2, 2, 2]


def test_releasing_without_workers_does_nothing() -> None:
    release_omp_workers()
    release_omp_workers()
