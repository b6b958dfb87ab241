"""The model from which every learn test starts, created once for the whole session and all its processes."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import torch

from etude.demo.sorting_model import warm_up


@pytest.fixture(scope="session")
def warmed(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A model that imitates the unreliable teacher of the demonstration: right about four times in ten."""
    base = tmp_path_factory.getbasetemp()
    place = (base if worker_id == "master" else base.parent) / "warmed"
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            warm_up(place / "model", 0, lambda: None)
            torch.set_num_threads(threads)
            (place / "done").touch()
    return place / "model"
