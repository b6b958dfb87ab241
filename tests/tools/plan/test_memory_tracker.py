"""The memory tracker of a plan: bytes by kind and phase, of tensors with memory and of fake tensors."""

from __future__ import annotations

import gc

import pytest
import torch

from etude.tools.plan.fake_tensors import FakeDeviceMode, MemoryTrackingMode, use_fake_tensors
from etude.tools.plan.memory_tracker import MemoryTracker
from etude.tools.plan.results import GIB

CPU = torch.device("cpu")


@pytest.mark.kept
def test_the_tracker_records_memory_and_its_lifetime() -> None:
    tracker = MemoryTracker()
    with MemoryTrackingMode(tracker):
        with tracker.labeled_as("kept"):
            kept = torch.zeros(256)
            view = kept.view(16, 16)[3:]
        with tracker.phase("work"), tracker.labeled_as("passing"):
            torch.ones(512).sum()
            del kept
        del view
    gc.collect()
    assert tracker.trace().phases == ["work"]
    peak = tracker.trace().peak("work")
    assert peak.kinds["kept"] == 1024, "a view keeps it alive"
    assert 2048 <= peak.kinds["passing"] <= 2048 + 8 and peak.total == sum(peak.kinds.values())
    assert tracker.trace().peak("work", frozenset({"kept"})).total == peak.kinds["passing"]


def test_the_tracker_records_storages_that_are_resized() -> None:
    tracker = MemoryTracker()
    with MemoryTrackingMode(tracker), tracker.labeled_as("kept"):
        kept = torch.zeros(256)
        with tracker.phase("away"):
            kept.untyped_storage().resize_(0)
            torch.zeros(64)
        with tracker.phase("back"):
            kept.untyped_storage().resize_(1024)
        with tracker.phase("grown"):
            kept.untyped_storage().resize_(4096)
        del kept
    gc.collect()
    assert [tracker.trace().peak(phase).total for phase in ("away", "back", "grown")] == [1024, 1024, 1024 + 4096]
    with MemoryTrackingMode(tracker), tracker.phase("over"):
        pass
    assert tracker.trace().peak("over").total == 0
    before = tracker.trace().peak().total
    torch.zeros(1).untyped_storage().resize_(1 << 20)
    assert tracker.trace().peak().total == before, "a change after the phases is not recorded"


def test_mixed_precision_makes_a_wider_copy_on_a_cpu_but_not_on_a_gpu() -> None:
    totals = []
    for device in (CPU, torch.device("cuda", 0)):
        tracker = MemoryTracker()
        with use_fake_tensors(tracker) as fake_mode:
            full, half = torch.zeros(256), torch.zeros(256, dtype=torch.bfloat16)
            with tracker.phase("adding"):
                if device.type == "cuda":
                    with FakeDeviceMode(fake_mode, device):
                        full += half
                else:
                    full += half
        totals.append(tracker.trace().peak("adding").total)
    assert totals == [1024 + 512 + 1024, 1024 + 512]


def test_a_tensor_can_be_labeled_later() -> None:
    tracker = MemoryTracker()
    with MemoryTrackingMode(tracker):
        a, b = torch.zeros(256), torch.zeros(128)
        tracker.label([a], "gradients")
        tracker.label([b], None)
    assert tracker.kind_of(a) == "gradients"
    assert tracker.trace().peak().kinds == {"gradients": 1024} and tracker.trace().peak().total == 1024


def test_fake_tensors_have_shapes_and_lifetimes_and_integers_keep_their_values() -> None:
    tracker = MemoryTracker()
    with use_fake_tensors(tracker):
        weight = torch.zeros(1 << 20, 1 << 16)  # of 256 GiB
        rows = torch.tensor([2, 5]).add(1)
        assert rows.tolist() == [3, 6]
        assert int(torch.full((1, 1), 7)) == 7
        out = weight[rows] @ weight.T
        assert float(out.sum()) == 1.0 and not torch.equal(out, out)
    assert tracker.trace().peak().total > 256 * GIB


def test_a_fake_view_has_no_memory_and_an_in_place_operation_returns_its_argument() -> None:
    tracker = MemoryTracker()
    with use_fake_tensors(tracker):
        table = torch.zeros(64, 48)
        parts = table.t().split(16)
        strided = parts[1].unsqueeze(0).expand(2, 16, 64)[:, 3:]
        assert parts[1].add_(1) is parts[1]
        total = tracker.trace().peak().total
        halved = torch.mm(table.t(), table).bfloat16()
    real = torch.zeros(64, 48).t().split(16)[1].unsqueeze(0).expand(2, 16, 64)[:, 3:]
    assert (strided.shape, strided.stride()) == (real.shape, real.stride())
    assert strided.storage_offset() == real.storage_offset()
    assert total == 4 * 64 * 48 and halved.dtype == torch.bfloat16
    assert tracker.trace().peak().total == total + (4 + 2) * 48 * 48


def test_a_fake_gpu_takes_the_code_paths_of_a_gpu() -> None:
    gpu, devices = torch.device("cuda", 0), list[torch.device]()
    with use_fake_tensors(MemoryTracker()) as fake_mode, FakeDeviceMode(fake_mode, gpu):
        weight = torch.zeros(3, requires_grad=True)
        weight.register_hook(lambda grad: devices.append(grad.device))
        product = torch.ones(3, device=gpu) * weight.to("cuda")
        product.sum().backward()
        assert weight.device == product.device == torch.tensor([1]).to(gpu).device == gpu
        assert weight.grad is not None and devices == [gpu]
    assert weight.device.type == "cpu"
