"""Saves in the background: a save counts once it is on the disk, and training may change its tensors meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from etude.checkpoint import BackgroundSaver, CheckpointManager
from etude.checkpoint import storage as storage_module
from etude.errors import CheckpointError


class SlowDisk:
    """Holds a save at a point until `release`."""

    def __init__(self, point: str) -> None:
        self.point, self.arrived, self.free = point, threading.Event(), threading.Event()

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.arrived.set()
            assert self.free.wait(60)


@pytest.fixture(params=["checkpoint.writing", "checkpoint.renaming"])
def disk(request: pytest.FixtureRequest) -> Iterator[SlowDisk]:
    held = SlowDisk(request.param)
    yield held
    held.free.set()


def saved_steps(directory: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointManager(directory).list_complete()]


def test_a_save_counts_when_it_is_on_the_disk_and_holds_what_was_there_when_it_began(
    disk: SlowDisk, tmp_path: Path
) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=1, on_point=disk)
    CheckpointManager(tmp_path).save(1, {"x": torch.ones(9)}, {})
    saver, x, facts = BackgroundSaver(), torch.arange(9.0), {"order": [1, 2]}
    saver.begin(checkpoints, 2, {"x": x}, facts)
    assert disk.arrived.wait(60)
    x.zero_()  # the next step
    facts["order"].append(3)
    assert saved_steps(tmp_path) == [1], "the one before is kept until this one is whole"
    with pytest.raises(AssertionError, match="the save before is not finished"):
        saver.begin(checkpoints, 3, {"x": x}, {})
    disk.free.set()
    checkpoint = saver.finish()
    assert checkpoint is not None and saved_steps(tmp_path) == [2] and saver.finish() is None
    target = {"x": torch.zeros(9)}
    checkpoints.load(checkpoint, target)
    assert torch.equal(target["x"], torch.arange(9.0))
    newest = checkpoints.newest()
    assert newest is not None and newest.facts == {"order": [1, 2]}


def test_a_wait_has_an_end(disk: SlowDisk, tmp_path: Path) -> None:
    saver = BackgroundSaver()
    saver.begin(CheckpointManager(tmp_path, on_point=disk), 7, {"x": torch.ones(9)}, {})
    with pytest.raises(CheckpointError, match=r"Step 7 is still being saved after 0\.1 s"):
        saver.finish(timeout=0.1)
    assert not saved_steps(tmp_path)
    disk.free.set()
    checkpoint = saver.finish()
    assert checkpoint is not None and checkpoint.step == 7


def test_a_failure_is_raised_where_the_save_is_finished_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, saver = CheckpointManager(tmp_path), BackgroundSaver()
    checkpoints.save(1, {"x": torch.ones(9)}, {})

    def fails(*_: object) -> None:
        raise RuntimeError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(storage_module.CheckpointWriter, "write", fails)
        saver.begin(checkpoints, 2, {"x": torch.ones(9)}, {})
        with pytest.raises(CheckpointError, match=r"Step 2 could not be saved .*the disk is gone.*are whole"):
            saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.1"]
    saver.begin(checkpoints, 3, {"x": torch.ones(9)}, {})
    saver.finish()
    assert saved_steps(tmp_path) == [1, 3]


def test_no_memory_for_the_copy_is_an_error_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Tensor) -> Tensor:
        raise MemoryError("can't allocate memory")

    monkeypatch.setattr(storage_module, "_copy_to_cpu", full)
    with pytest.raises(CheckpointError, match=r"Step 2 could not be saved .*allocate memory.*`checkpoint.async_save"):
        BackgroundSaver().begin(CheckpointManager(tmp_path), 2, {"x": torch.ones(9)}, {})
    assert not list(tmp_path.iterdir())


def test_the_copy_is_released_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, copy = list[StorageWeakRef](), storage_module._copy_to_cpu

    def copied(piece: Tensor) -> Tensor:
        result = copy(piece)
        copies.append(StorageWeakRef(result.untyped_storage()))  # type: ignore[no-untyped-call]
        return result

    monkeypatch.setattr(storage_module, "_copy_to_cpu", copied)
    saver = BackgroundSaver()
    saver.begin(CheckpointManager(tmp_path), 1, {"x": torch.ones(9), "y": torch.ones(4)}, {})
    saver.finish()
    assert len(copies) == 2 and all(each.expired() for each in copies)  # type: ignore[no-untyped-call]


def test_a_save_that_nobody_waits_for_cannot_become_part_of_a_later_one(disk: SlowDisk, tmp_path: Path) -> None:
    """A run was stopped at once, and another begins in the same process."""
    abandoned = BackgroundSaver()
    abandoned.begin(CheckpointManager(tmp_path, on_point=disk), 1, {"x": torch.zeros(9)}, {})
    assert disk.arrived.wait(60)
    later = CheckpointManager(tmp_path)
    later.save(2, {"x": torch.ones(9)}, {})
    disk.free.set()
    with pytest.raises(CheckpointError, match="Step 1 could not be saved"):
        abandoned.finish()
    newest = later.newest()
    assert newest is not None and newest.step == 2 and len(list(tmp_path.iterdir())) == 1
