"""Checkpoints: complete or absent, found again, and removed by the options that keep them."""

from __future__ import annotations

import hashlib
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.checkpoint import BackgroundSaver, Checkpoint, CheckpointManager, TensorTree
from etude.checkpoint.files import FORMAT
from etude.checkpoint.storage import DTYPES
from etude.errors import CheckpointError, DamagedFileError
from etude.integrity import read_json, write_json

FACTS = {"journal": 7, "rate": 0.1, "names": ["a", "b"]}


def tensors(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Return a tree with two dtypes and an empty branch."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weights": {"a.weight": torch.randn(3, 5, generator=generator), "b": torch.randn(4, generator=generator)},
        "half": {"c": torch.randn(6, generator=generator).bfloat16()},
        "counts": {"steps": torch.tensor(seed), "none": torch.empty(0)},
    }


def like(tree: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the same tree with other numbers."""
    return {name: {key: torch.full_like(value, 9) for key, value in part.items()} for name, part in tree.items()}


def same(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(value, b[name][key]) for name, part in a.items() for key, value in part.items())


Save = Callable[[CheckpointManager, int, TensorTree, Mapping[str, Any]], Checkpoint]


def in_background(
    checkpoints: CheckpointManager, step: int, tensors: TensorTree, facts: Mapping[str, Any]
) -> Checkpoint:
    """Save on another thread, and wait for it."""
    saver = BackgroundSaver()
    saver.begin(checkpoints, step, tensors, facts)
    saved = saver.finish()
    assert saved is not None
    return saved


both_ways = pytest.mark.parametrize("save", [CheckpointManager.save, in_background])


@both_ways
def test_saved_tensors_are_loaded_bit_for_bit(save: Save, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path / "run" / "checkpoints")
    assert checkpoints.newest() is None
    saved = save(checkpoints, 12, tensors(3), FACTS)
    checkpoint = checkpoints.newest()
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.path, checkpoint.facts) == (12, saved.path, FACTS)
    target = like(tensors(3))
    assert not same(target, tensors(3))
    checkpoints.load(checkpoint, target)
    assert same(target, tensors(3))


@both_ways
def test_a_fact_that_is_not_finite_is_reported_and_leaves_the_one_before(save: Save, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    saved = save(checkpoints, 1, tensors(), FACTS)
    with pytest.raises(CheckpointError, match=r"Step 2 could not be saved .* a number that is not finite"):
        save(checkpoints, 2, tensors(), {"score": float("nan")})
    assert checkpoints.newest() == saved and [path.name for path in tmp_path.iterdir()] == [saved.path.name]


def test_a_part_of_a_checkpoint_can_be_read(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    saved = checkpoints.save(1, tensors(3), {})
    target = {"weights": like(tensors())["weights"]}
    checkpoints.load(saved, target)
    assert same(target, tensors(3))


@both_ways
def test_the_newest_and_the_best_stay(save: Save, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2)
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.9), (5, 0.1)):
        save(checkpoints, step, tensors(step), {})
        assert checkpoints.mark_best(step, score) == ((score > 0.5 and step == 2) or step == 1)
    assert [checkpoint.step for checkpoint in checkpoints.list_complete()] == [2, 4, 5]
    best = checkpoints.best()
    assert best is not None and best.step == 2 and checkpoints.best_score() == 0.9
    assert not checkpoints.mark_best(3, 1.0)  # it no longer exists
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {
        "step-00000002",
        "step-00000004",
        "step-00000005",
        "best",
    }


def test_resuming_at_an_earlier_step_overwrites_nothing(tmp_path: Path) -> None:
    """A run returns to step 4 and saves 6 again: its own 6 is the newest, even beside an old 8."""
    checkpoints = CheckpointManager(tmp_path, keep=10)
    for step in (4, 6, 8):
        checkpoints.save(step, tensors(step), {})
    again = checkpoints.save(6, tensors(60), {})
    assert len(checkpoints.list_complete()) == 4
    newest = checkpoints.newest()
    assert newest is not None and newest.path == again.path


def test_a_best_checkpoint_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    """The best checkpoint was damaged, and the run resumed before it."""
    checkpoints = CheckpointManager(tmp_path, keep=1)
    damaged = checkpoints.save(2, tensors(2), {})
    assert checkpoints.mark_best(2, 0.9) and not checkpoints.mark_best(2, 0.9)
    flip(damaged.path / "tensors.json")
    again = checkpoints.save(2, tensors(2), {})
    assert checkpoints.mark_best(2, 0.8), "in half precision a step made again scores otherwise"
    assert not checkpoints.mark_best(2, 0.9 - 0.2)
    best = checkpoints.best()
    assert best is not None and best.path == again.path
    checkpoints.save(3, tensors(3), {})
    assert not damaged.path.exists() and again.path.exists()


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 3)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("rank-0.tensors", Path.unlink, r"its file rank-0.tensors is missing"),
        ("rank-0.tensors", truncate, r"its file rank-0.tensors has \d+ bytes and should have \d+"),
        ("rank-0.tensors", flip, r"its file rank-0.tensors was changed since it was written"),
        ("tensors.json", flip, r"its file tensors.json was changed since it was written"),
        ("facts.json", Path.unlink, r"is broken: .*facts.json cannot be read"),
        ("facts.json", truncate, r"is broken: .*facts.json is damaged"),
        ("facts.json", flip, r"is broken: .*facts.json is damaged"),
    ],
)
def test_a_broken_checkpoint_is_reported_with_the_one_before(
    tmp_path: Path, name: str, damage: Callable[[Path], None], complaint: str
) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, tensors(1), {"at": 1})
    broken = checkpoints.save(2, tensors(2), {"at": 2})
    damage(broken.path / name)
    with pytest.raises(CheckpointError, match=complaint + ".*whole checkpoint before it is step-00000001.1, of step 1"):
        checkpoints.newest()
    checkpoint = checkpoints.newest(fall_back=True)
    assert checkpoint is not None and checkpoint.facts == {"at": 1}
    target = like(tensors())
    checkpoints.load(checkpoint, target)
    assert same(target, tensors(1))
    checkpoints.save(2, tensors(3), {"at": 3})  # the run resumed there: its own checkpoint is the newest
    newest = checkpoints.newest()
    assert newest is not None and newest.facts == {"at": 3}


def test_an_interrupt_within_a_save_is_not_reported_as_a_disk_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, tensors(1), {})

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("etude.checkpoint.files.CheckpointWriter.write_data", interrupted)
        checkpoints.save(2, tensors(2), {})
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 1
    assert checkpoints.save(2, tensors(2), {}).step == 2


def test_a_broken_checkpoint_alone_is_reported(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    truncate(checkpoints.save(2, tensors(2), {}).path / "tensors.json")
    for fall_back in (False, True):
        with pytest.raises(CheckpointError, match="There is no whole checkpoint before it"):
            checkpoints.newest(fall_back=fall_back)


def test_other_tensors_are_refused_before_any_is_written(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    saved = checkpoints.save(2, tensors(2), {})
    weights = like(tensors())["weights"]
    for odd, complaint in (
        ({"zzz": torch.zeros(2)}, "has no tensor `weights.zzz`"),
        ({"b": torch.zeros(5)}, r"`weights.b` is torch.float32 \[4\] in the checkpoint .* torch.float32 \[5\] in this"),
        ({"b": torch.zeros(4).double()}, r"`weights.b` is torch.float32 .* and torch.float64"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            checkpoints.load(saved, {"weights": weights | odd})
        assert bool((weights["a.weight"] == 9).all())


def test_no_bit_of_the_facts_can_change_unnoticed(tmp_path: Path) -> None:
    """They may have another spelling (white space, the case of an escape) of the same values."""
    checkpoints = CheckpointManager(tmp_path)
    file = checkpoints.save(21, tensors(2), FACTS | {"score": 0.5, "name": "é"}).path / "facts.json"
    whole = file.read_bytes()
    before = checkpoints.newest()
    refused = 0
    for place in range(0, 8 * len(whole), 7):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        file.write_bytes(data)
        try:
            assert checkpoints.newest() == before
        except CheckpointError as error:
            assert "facts.json" in str(error)
            refused += 1
    assert refused > len(whole)


@both_ways
def test_every_dtype_is_written_and_read_as_it_was(save: Save, tmp_path: Path) -> None:
    tree = {name: torch.arange(-2, 10).to(dtype).reshape(3, 4) for name, dtype in DTYPES.items()}
    checkpoints = CheckpointManager(tmp_path)
    saved = save(checkpoints, 1, tree, {})
    target = {name: torch.zeros_like(value) for name, value in tree.items()}
    checkpoints.load(saved, target)
    for name, value in tree.items():
        assert torch.equal(target[name].view(torch.uint8), value.view(torch.uint8)), name


class Planted:
    """An object that leaves a file behind if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._mark,)


def test_nothing_in_a_checkpoint_is_unpickled(tmp_path: Path) -> None:
    """Neither another file nor a manifest that was changed to match it is unpickled."""
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    saved = checkpoints.save(1, tensors(1), {})
    mark = tmp_path / "ran"
    pickled = pickle.dumps(Planted(mark))
    manifest = read_json(saved.path / "facts.json")
    for name in (*manifest["files"], ".metadata"):
        (saved.path / name).write_bytes(pickled)
        manifest["files"][name] = {"size": len(pickled), "sha256": hashlib.sha256(pickled).hexdigest()}
    write_json(saved.path / "facts.json", manifest)
    checkpoint = checkpoints.newest()
    assert checkpoint is not None, "the manifest agrees"
    with pytest.raises(CheckpointError, match=r"tensors\.json is damaged: it is not the JSON object"):
        checkpoints.load(checkpoint, like(tensors()))
    assert not mark.exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Reading the memory of a process at offset 0 is an input/output error, as from a failing disk."""
    checkpoints = CheckpointManager(tmp_path)
    for name in ("rank-0.tensors", "facts.json"):
        saved = checkpoints.save(1, {"x": torch.zeros(0)}, {})
        (saved.path / name).unlink()
        (saved.path / name).symlink_to("/proc/self/mem")
        with pytest.raises(CheckpointError, match=rf"{name}.*[Ii]nput/output error|[Ii]nput/output error.*{name}"):
            checkpoints.newest()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"name": 3}', '{"name": "step-00000001.1", "step": 1}'])
def test_a_broken_best_file_is_reported(tmp_path: Path, content: str) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, tensors(1), {})
    (tmp_path / "best.json").write_text(content)
    with pytest.raises(DamagedFileError, match=r"best\.json is damaged.*bring it back from a copy, or remove it"):
        checkpoints.best()


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    facts = checkpoints.save(2, tensors(2), {}).path / "facts.json"
    manifest = read_json(facts)
    write_json(facts, manifest | {"format": 99})
    with pytest.raises(CheckpointError, match=rf"of format 99.*reads format {FORMAT}.*with the version that wrote it"):
        checkpoints.newest()


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from etude.checkpoint import BackgroundSaver, CheckpointManager

def at(point):
    if point == "checkpoint.renaming":
        os.kill(os.getpid(), signal.SIGKILL)
checkpoints = CheckpointManager(Path(sys.argv[1]), on_point=at)
state = 2, {"x": torch.full((50_000,), 2.0)}, {"at": 2}
if sys.argv[2] == "at once":
    checkpoints.save(*state)
saver = BackgroundSaver()
saver.begin(checkpoints, *state)
saver.finish()
"""


def interrupted_at_writing(directory: Path) -> None:
    def at(point: str) -> None:
        if point == "checkpoint.writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CheckpointManager(directory, on_point=at).save(2, {"x": torch.full((50_000,), 2.0)}, {"at": 2})


def killed_at_renaming(directory: Path, way: str = "at once") -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(directory), way], timeout=120)
    assert done.returncode == -signal.SIGKILL


def killed_in_the_background(directory: Path) -> None:
    killed_at_renaming(directory, "in the background")


@pytest.mark.parametrize("end", [interrupted_at_writing, killed_at_renaming, killed_in_the_background])
def test_a_save_that_is_killed_leaves_the_one_before(tmp_path: Path, end: Callable[[Path], None]) -> None:
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.save(1, {"x": torch.ones(50_000)}, {"at": 1})
    end(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    newest = checkpoints.newest()
    assert newest is not None and newest.facts == {"at": 1}
    checkpoints.save(2, {"x": torch.ones(50_000)}, {"at": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.1", "step-00000002.2"]


@both_ways
def test_a_file_that_cannot_grow_leaves_the_one_before_and_no_litter(save: Save, tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path)
    save(checkpoints, 1, {"x": torch.ones(50_000)}, {"at": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"Step 2 could not be saved in .*rank-0\.tensors.* Make room"):
            save(checkpoints, 2, {"x": torch.ones(50_000)}, {"at": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.1"]
    newest = checkpoints.newest()
    assert newest is not None and newest.facts == {"at": 1}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, if this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@both_ways
def test_a_full_disk_leaves_the_one_before_and_no_litter(save: Save, small_disk: Path) -> None:
    checkpoints = CheckpointManager(small_disk)
    save(checkpoints, 1, {"x": torch.ones(120_000)}, {"at": 1})
    with pytest.raises(CheckpointError, match=r"Step 2 could not be saved in .* where 0 MiB are free"):
        save(checkpoints, 2, {"x": torch.ones(150_000)}, {"at": 2})
    assert [path.name for path in small_disk.iterdir()] == ["step-00000001.1"]
    target = {"x": torch.zeros(120_000)}
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(newest, target)
    assert bool((target["x"] == 1).all())


RANKS = """
import os, sys
from pathlib import Path
import torch, torch.distributed as dist
from etude.checkpoint import BackgroundSaver
from etude.errors import CheckpointError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from etude.checkpoint import CheckpointManager

directory, other = Path(sys.argv[1]), os.fork()
rank = 0 if other else 1
dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.arange(30.0).reshape(10, 3), mesh, [Shard(0)])
checkpoints = CheckpointManager(directory / "checkpoints")
saved = checkpoints.save(1, {"x": x}, {"at": 1})
assert saved.path.name == "step-00000001.1"
y = distribute_tensor(torch.zeros(10, 3), mesh, [Shard(1)])
checkpoints.load(checkpoints.newest(), {"x": y})
assert torch.equal(y.full_tensor(), torch.arange(30.0).reshape(10, 3))

saver = BackgroundSaver()
x = distribute_tensor(torch.arange(30.0).reshape(10, 3), mesh, [Shard(0)])
saver.begin(checkpoints, 2, {"x": x}, {"at": 2})
x.to_local().zero_()
dist.all_reduce(torch.ones(1000))  # training goes on by the default group
assert saver.finish().path.name == "step-00000002.2"
checkpoints.load(checkpoints.newest(), {"x": x})
assert torch.equal(x.full_tensor(), torch.arange(30.0).reshape(10, 3))

saver.begin(checkpoints, 3, {"x": x}, {"at": 3})
saver.finish()
if rank == 1:  # its disk fails
    from etude.checkpoint.storage import CheckpointWriter
    def fails(self): raise OSError(28, "No space left on device")
    CheckpointWriter.write = fails
saver.begin(checkpoints, 4, {"x": x}, {"at": 4})
try:
    saver.finish()
except CheckpointError as error:
    assert "Step 4 could not be saved" in str(error) and "No space left" in str(error), error
else:
    raise AssertionError("one rank could not write")
assert saver.finish() is None and checkpoints.newest().step == 3
assert not list((directory / "checkpoints").glob(".writing*"))
dist.barrier()
# Not by `sys.exit`: gloo's threads do not always end in good order with the interpreter.
os._exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) if other else 0)
"""


def test_a_checkpoint_of_two_ranks_is_read_by_one(tmp_path: Path) -> None:
    """Two processes, forked from one that has loaded torch."""
    done = subprocess.run([sys.executable, "-c", RANKS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    newest = checkpoints.newest()
    assert newest is not None and newest.step == 3
    target = torch.zeros(10, 3)
    checkpoints.load(newest, {"x": target})
    assert torch.equal(target, torch.arange(30.0).reshape(10, 3))
