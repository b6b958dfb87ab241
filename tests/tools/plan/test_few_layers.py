"""The memory of a deep model from dry runs with few of its layers equals that of the whole dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.plan import COLLECTING, LEARNING, SIZES, run_of
from etude.config.compose import compose
from etude.models import tiny_config
from etude.recipes.run.config import Run
from etude.tools.plan.dry_run import ALL_ROLES, dry_run, whole_dry_run
from etude.tools.plan.few_layers import LayerCount, count_layers
from etude.tools.plan.layer_extrapolation import Repeat, extrapolate
from etude.tools.plan.memory_tracker import MemoryTrace, MemoryTracker

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SMALL: dict[str, Any] = {**SIZES, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab_size": 2048}
SLOWER = ("lora", "fsdp", "critic", "gemma2", "distill")
OFFLOADED = frozenset({"masters", "optimizer"})


class Steps:
    """A step of a model, recorded like a dry run."""

    def __init__(self) -> None:
        self.tracker = MemoryTracker()
        self.tensors: dict[str, torch.Tensor] = {}

    def allocate(self, name: str, size: int, operator: str) -> None:
        self.tensors[name] = torch.empty(size, dtype=torch.uint8)
        self.tracker.record(self.tensors[name], operator=operator)

    def trace(self, layers: int, others: int = 1) -> MemoryTrace:
        """Record a step of a model with this number of layers, and of another model."""
        with self.tracker.labeled_as("weights"):
            for layer in range(layers):
                self.allocate(f"weight {layer}", 70, "empty")
        with self.tracker.labeled_as("activations"), self.tracker.phase("updating"):
            self.allocate("cache", 11 * layers, "zeros")
            for layer in range(layers):
                self.allocate("product", 300, "mm")
                self.allocate(f"kept {layer}", 40, "norm")
                del self.tensors["product"]
            self.allocate("logits", 900, "mm")
            for layer in range(others):
                self.allocate(f"other {layer}", 25, "exp")
            for layer in reversed(range(layers)):
                self.allocate("product", 500, "mm")
                del self.tensors[f"kept {layer}"]
                self.allocate(f"gradient {layer}", 70, "mm")
            del self.tensors["logits"], self.tensors["product"]
        return self.tracker.trace()


def test_more_layers_repeat_what_one_layer_adds() -> None:
    few, more, other = (Steps().trace(*layers) for layers in ((2, 1), (3, 1), (2, 2)))
    composed, whole = extrapolate(few, [Repeat(more, 38), Repeat(other, 6)]), Steps().trace(40, 7)
    assert composed is not None
    (span,), (whole_span,) = composed.spans, whole.spans
    assert composed.sizes[span.first : span.last].tolist() == whole.sizes[whole_span.first : whole_span.last].tolist()
    assert composed.peak("updating") == whole.peak("updating") and composed.peak() == whole.peak()
    assert composed.peak(excluded=frozenset({"weights"})) == whole.peak(excluded=frozenset({"weights"}))


def test_other_changes_than_repeated_layers_are_not_extrapolated() -> None:
    few, fewer = Steps().trace(3), Steps().trace(2)
    assert extrapolate(few, [Repeat(fewer, 5)]) is None
    with (tracker := MemoryTracker()).phase("sampling"), tracker.phase("updating"):
        pass
    assert extrapolate(few, [Repeat(tracker.trace(), 5)]) is None


@pytest.mark.parametrize(
    ("family", "layers", "period", "few"),
    [("qwen3", 80, 1, 2), ("gemma2", 27, 2, 3), ("gemma3", 62, 6, 8), ("gpt2", 5, 1, 2)],
)
def test_layers_repeat_with_the_period_of_their_kinds(
    family: str, layers: int, period: int, few: int, tmp_path: Path
) -> None:
    tiny_config(512, layers=layers, family=family).save_pretrained(tmp_path)
    run = compose(Run, [f"model.path={tmp_path}", "train.precision=bf16"])
    counts = count_layers(run, ALL_ROLES)
    assert counts == ({tmp_path: LayerCount(layers, period)} if layers > 5 else {})
    assert LayerCount(layers, period).few == few
    frozen = compose(Run, [f"model.path={tmp_path}", "model.freeze=[layers.3]", "train.precision=bf16"])
    assert not count_layers(frozen, ALL_ROLES), "its layers differ"


@pytest.mark.slow
def test_layers_that_differ_at_the_start_are_built_and_not_repeated(tmp_path: Path) -> None:
    dense_first = {**SMALL, "family": "qwen3_moe", "layers": 9, "mlp_only_layers": [0], "num_experts": 4}
    run = run_of(tmp_path / "model", "sft", dense_first)
    (count,) = count_layers(run, ALL_ROLES).values()
    assert count == LayerCount(9, period=1, start=1) and count.few == 3
    composed, whole = dry_run(run, GPU).memory, whole_dry_run(run, GPU).memory
    assert not composed.operators, "it was composed"
    assert composed.peak().total == pytest.approx(whole.peak().total, rel=1e-4, abs=1000)
    assert composed.peak().kinds == pytest.approx(whole.peak().kinds, rel=1e-3, abs=1000)


@pytest.mark.parametrize(
    ("name", "device", "layers"),
    [
        ("sft", GPU, 6),
        pytest.param("qwen3_5", CPU, 17, marks=pytest.mark.integration),
        *(pytest.param(name, CPU, 12, marks=pytest.mark.integration) for name in SLOWER),
        *(
            pytest.param(name, device, layers, marks=pytest.mark.soak)
            for name in (*COLLECTING, *LEARNING)
            for device, layers in ((CPU, 24), (GPU, 12))
        ),
    ],
)
def test_few_layers_give_the_memory_of_all(
    name: str, device: torch.device, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in COLLECTING:
        shape, options = COLLECTING[name]
        monkeypatch.setitem(COLLECTING, name, ({**shape, "layers": layers}, options))  # type: ignore[arg-type]
    run = run_of(tmp_path / "model", name, {**SMALL, "layers": layers})
    assert count_layers(run, ALL_ROLES)
    composed, whole = dry_run(run, device).memory, whole_dry_run(run, device).memory
    assert not composed.operators, "it was composed"
    for phase in whole.phases:
        for excluded in (frozenset[str](), OFFLOADED):
            peaks = composed.peak(phase, excluded), whole.peak(phase, excluded)
            assert peaks[0].total == pytest.approx(peaks[1].total, rel=1e-4, abs=1000)
            assert peaks[0].kinds == pytest.approx(peaks[1].kinds, rel=1e-3, abs=1000)
