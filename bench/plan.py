"""What `etude plan` foresees beside what is measured: the same steps, once without memory and once with it.

    python -m bench.plan [--only fp32 lora] [--json FILE]

Measured is what torch's own allocator takes and gives back, as its profiler is told of each; the step is the real one,
on random weights. The difference is to stay within a tenth.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from bench.common import machine, versions
from etude.config.compose import compose
from etude.models import tiny
from etude.observe import make_console
from etude.recipes.run import Run
from etude.tools.rehearsal import perform, rehearse

CASES: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "fp32": ({}, ["train.precision=fp32"]),
    "bf16": ({}, ["train.precision=bf16"]),
    "long": ({}, ["train.precision=fp32", "data.max_prompt=256", "sampling.max_tokens=512", "collect.group_size=2"]),
    "one micro-batch": ({}, ["train.precision=fp32", "collect.tasks=1"]),
    "large micro-batches": ({}, ["train.precision=bf16", "train.micro_tokens=4096"]),
    "checkpointing": ({}, ["train.precision=bf16", "train.activation_checkpointing=true"]),
    "lora": ({}, ["train.precision=bf16", "lora.rank=8"]),
    "reference": ({}, ["train.precision=fp32", "kl=reverse"]),
    "critic": ({}, ["train.precision=fp32", "advantage=gae"]),
    "large vocabulary": ({"vocabulary": 32000}, ["train.precision=fp32"]),
    "gemma2": ({"family": "gemma2"}, ["train.precision=fp32"]),
    "gpt2": ({"family": "gpt2"}, ["train.precision=fp32"]),
}
"""Shapes of models, and options of runs."""
SIZES: dict[str, Any] = {"vocabulary": 4096, "layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4}
COMMON = (
    *("data.max_prompt=48", "sampling.max_tokens=96", "collect.tasks=8", "collect.group_size=4", "device=cpu"),
    *("train.micro_tokens=1024", "rollout.kv_gib=0.003", "rollout.max_running=32", "rollout.prefill_tokens=256"),
    "rollout.prepack=false",
)
WITHIN = 0.10


@dataclass(frozen=True)
class Compared:
    """What was foreseen and what was measured, in bytes."""

    name: str
    foreseen: int
    measured: int

    @property
    def ratio(self) -> float:
        """1 is exact."""
        return self.foreseen / self.measured


def run_of(directory: Path, name: str, sizes: Mapping[str, Any] = SIZES, common: Sequence[str] = COMMON) -> Run:
    """A run of a case, whose model is written there as its config alone."""
    shape, options = CASES[name]
    tiny(**{**sizes, **shape}).save_pretrained(directory)
    return compose(Run, [f"model.path={directory}", *common, *options])


def measured(work: Callable[[], object]) -> int:
    """The most bytes that tensors and kernels held at once, of what was taken within, as torch's allocator tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        work()
    events: Any = told.profiler.kineto_results.events()  # type: ignore[union-attr]
    held = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def compared(run: Run, name: str) -> Compared:
    """A case, rehearsed and performed."""
    foreseen = rehearse(run, torch.device("cpu")).ledger.peak().total
    return Compared(name, foreseen, measured(lambda: perform(run)))


def main() -> int:
    """Compare every case; exit code 1 if one differs by more than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("case", "foreseen, MiB", "measured, MiB", "ratio"):
        shown.add_column(title, justify="left" if title == "case" else "right")
    found = []
    with tempfile.TemporaryDirectory() as place:
        for name in asked.only:
            each = compared(run_of(Path(place) / name, name), name)
            found.append(each)
            shown.add_row(name, f"{each.foreseen / 2**20:.1f}", f"{each.measured / 2**20:.1f}", f"{each.ratio:.3f}")
    make_console().print(shown)
    if asked.json:
        cases = [{**asdict(each), "ratio": each.ratio} for each in found]
        whole = {"machine": machine(), "versions": versions(), "cases": cases}
        asked.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return 0 if all(abs(each.ratio - 1) <= WITHIN for each in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
