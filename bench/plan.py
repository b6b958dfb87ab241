"""Compare the memory that `etude plan` predicts with measured memory.

    python -m bench.plan [--only fp32 lora "etude train"] [--json FILE]

The measurement is that of torch's own allocator, over all threads, through its profiler. Cases that begin with `etude
train` are runs from start to end. The others are the phases of a dry run, once with fake tensors and once with real
memory and random weights. Several ranks are as many processes, of which the first is measured. The difference should
stay within a tenth.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.common import written
from bench.plan_worker import Performer, measured
from bench.words import write_model, write_tasks
from etude.config.compose import compose
from etude.models import tiny_config
from etude.observe import make_console
from etude.recipes.recipe import Recipe
from etude.recipes.registry import RECIPES
from etude.recipes.run.config import Run
from etude.recipes.run.loop import train
from etude.recipes.servers.rank_engines import start_ranks
from etude.tools.plan.dry_run import dry_run, real_run
from etude.tools.plan.planner import add_to_phases, engine_activations

LARGE = {"hidden": 256, "layers": 8}
LITTLE = (
    *("data.max_prompt_length=16", "sampling.max_tokens=16", "collect.tasks=4", "train.max_tokens_per_micro_batch=128"),
    "collect.group_size=4",
)
COLLECTING: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "fp32": ({}, ["train.precision=fp32"]),
    "bf16": ({}, ["train.precision=bf16"]),
    "long": (
        {},
        [
            *("train.precision=fp32", "data.max_prompt_length=256", "sampling.max_tokens=512", "collect.group_size=2"),
            "rollout.kv_gib=0.006",  # with 24 layers a row must fit too
        ],
    ),
    "one micro-batch": ({}, ["train.precision=fp32", "collect.tasks=1"]),
    "large micro-batches": ({}, ["train.precision=bf16", "train.max_tokens_per_micro_batch=4096"]),
    "checkpointing": ({}, ["train.precision=bf16", "train.activation_checkpointing=full"]),
    "lora": ({}, ["train.precision=bf16", "lora.rank=8"]),
    "reference": ({}, ["train.precision=fp32", "kl=reverse"]),
    "critic": ({}, ["train.precision=fp32", "critic.train.precision=bf16", "advantage=gae"]),
    "large vocabulary": ({"vocab_size": 32000}, ["train.precision=fp32"]),
    "gemma2": ({"family": "gemma2"}, ["train.precision=fp32"]),
    "gpt2": ({"family": "gpt2"}, ["train.precision=fp32"]),
    "qwen3_5": (
        {"family": "qwen3_5", "layers": 4},
        ["train.precision=fp32", "rollout.kv_gib=0.02"],  # the states of 24 layers fit too
    ),
    "qwen3_moe": ({"family": "qwen3_moe"}, ["train.precision=fp32"]),
    "qwen3_moe, fsdp, bf16": ({"family": "qwen3_moe"}, ["train.precision=bf16", "ranks=2"]),
    "weights laid out": ({}, ["train.precision=bf16", "rollout.prepack=true"]),
    "fsdp": ({}, ["train.precision=fp32", "ranks=2"]),
    "fsdp, bf16": ({}, ["train.precision=bf16", "ranks=2"]),
    "fsdp, one rank": ({}, ["train.precision=bf16", "train.engine=fsdp"]),
    "fsdp, large": (LARGE, ["train.precision=fp32", "ranks=2", *LITTLE]),
    "fsdp, large, bf16": (LARGE, ["train.precision=bf16", "ranks=2", *LITTLE]),
    "fsdp, lora": (LARGE, ["train.precision=bf16", "ranks=2", "lora.rank=8", *LITTLE]),
    "fsdp, checkpointing": ({}, ["train.precision=bf16", "ranks=2", "train.activation_checkpointing=full"]),
    "fsdp beside servers": (LARGE, ["train.precision=fp32", "ranks=2", *LITTLE, "rollout=vllm", "mini_batches=2"]),
    "fsdp beside servers, bf16": (LARGE, ["train.precision=bf16", "ranks=2", *LITTLE, "rollout=vllm"]),
    "fsdp, reference, critic": (
        LARGE,
        ["train.precision=fp32", "ranks=2", *LITTLE, "critic.train.precision=fp32", "kl=reverse", "advantage=gae"],
    ),
    "mesh.tensor": ({}, ["train.precision=bf16", "ranks=2", "mesh.tensor=2"]),
    "mesh.tensor, large": (LARGE, ["train.precision=fp32", "ranks=2", "mesh.tensor=2", *LITTLE]),
    "mesh.context": ({}, ["train.precision=bf16", "ranks=2", "mesh.context=2"]),
    "qwen3_moe, mesh.context, mesh.expert": (
        {"family": "qwen3_moe"},
        ["train.precision=bf16", "ranks=2", "mesh.context=2", "mesh.expert=2"],
    ),
    "trainer beside servers": ({}, ["train.precision=bf16", "rollout=vllm", "kl=reverse"]),
}
"""Shapes of models, and options of runs of `etude train`."""
LEARNING: Mapping[str, tuple[str, Sequence[str]]] = {
    "sft": ("sft", []),
    "sft, long rows": ("sft", ["data.max_tokens=768", "train.precision=fp32"]),
    "sft, lora": ("sft", ["lora.rank=8"]),
    "sft, mesh.tensor": ("sft", ["ranks=2", "mesh.tensor=2"]),
    "sft, fsdp": ("sft", ["train.precision=bf16", "ranks=2"]),
    "dpo": ("dpo", []),
    "dpo, large micro-batches": ("dpo", ["train.max_tokens_per_micro_batch=4096"]),
    "reward-model": ("reward-model", ["train.precision=fp32"]),
    "distill": ("distill", ["teacher.path={model}", "teacher.top=16"]),
}
"""Commands of supervised runs, and their options."""
TRAINED: Mapping[str, Sequence[str]] = {
    "etude train": ["train.precision=fp32"],
    "etude train, reference": ["train.precision=bf16", "rollout.prepack=false", "kl=reverse"],
    "etude train, max_staleness": [
        *("train.precision=fp32", "placement.layout=split", "correction.weight=truncate", "max_staleness=2", "steps=6"),
    ],
}
"""Runs of `etude train` itself, and their options."""
LONG: Mapping[str, Sequence[str]] = {
    "64k tokens, one rank": ["train.engine=fsdp"],
    "64k tokens, mesh.context=2": ["ranks=2", "mesh.context=2"],
    "64k tokens, mesh.context=4": ["ranks=4", "mesh.context=4"],
    "64k tokens, mesh.context=4, checkpointing": [
        *("ranks=4", "mesh.context=4", "train.activation_checkpointing=full"),
    ],
}
"""Options of `etude sft` runs on one row of 65,536 tokens. Each takes some minutes."""
CASES = (*COLLECTING, *LEARNING, *TRAINED)
SIZES: dict[str, Any] = {"vocab_size": 4096, "layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4}
COMMON = (
    *("data.max_prompt_length=48", "sampling.max_tokens=96", "collect.tasks=8", "collect.group_size=4", "device=cpu"),
    *("train.max_tokens_per_micro_batch=1024", "rollout.max_num_seqs=32"),
)
ENGINE = ("rollout.kv_gib=0.003", "rollout.max_num_batched_tokens=256")
REAL = (
    *("steps=2", "reward=function", f"reward.path={Path(__file__).with_name('grpo_worker.py')}:judge"),
    *("observe.console=off", "observe.level=error"),
)
EXAMPLES = (
    *("data.max_tokens=128", "batch_size=32", "train.max_tokens_per_micro_batch=1024", "device=cpu"),
    "train.precision=bf16",
)
LONG_SIZES = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "context": 65536}
LONG_ROW = ("data.max_tokens=65536", "batch_size=1", "train.max_tokens_per_micro_batch=65536", "train.precision=fp32")
WITHIN = 0.10


@dataclass(frozen=True)
class Compared:
    """The predicted and the measured peak, in bytes."""

    name: str
    foreseen: int
    measured: int

    @property
    def ratio(self) -> float:
        """Predicted over measured; 1 is exact."""
        return self.foreseen / self.measured


def run_of(directory: Path, name: str, sizes: Mapping[str, Any] = SIZES) -> Recipe:
    """Return the run of a case, whose model directory has only a config."""
    if name in LEARNING:
        command, options = LEARNING[name]
        tiny_config(**sizes).save_pretrained(directory)
        named = [option.format(model=directory) for option in options]
        return compose(RECIPES[command], [f"model.path={directory}", *EXAMPLES, *named])
    if name in LONG:
        tiny_config(**{**sizes, **LONG_SIZES}).save_pretrained(directory)
        return compose(RECIPES["sft"], [f"model.path={directory}", *EXAMPLES, *LONG_ROW, *LONG[name]])
    if name in TRAINED:
        tasks = directory.with_name(f"{directory.name}.jsonl")
        write_model(directory, sizes)
        write_tasks(tasks, sizes["vocab_size"], prompt=48)
        where = (f"model.path={directory}", f"data.train=[{tasks}]", f"directory={directory}.run")
        return compose(Run, [*where, *COMMON, *ENGINE, *REAL, *TRAINED[name]])
    shape, options = COLLECTING[name]
    tiny_config(**{**sizes, **shape}).save_pretrained(directory)
    engine = () if "rollout=vllm" in options else ENGINE
    if engine and "train.precision=bf16" in options:  # the case with weights laid out says otherwise after it
        engine = (*engine, "rollout.prepack=false")
    return compose(Run, [f"model.path={directory}", *COMMON, *engine, *options])


def performed(run: Recipe) -> int:
    """Return the peak memory of the first rank of a run, in bytes; all ranks are running."""
    if run.in_process:
        return measured(lambda: real_run(run))
    with tempfile.TemporaryDirectory() as logs, closing(start_ranks(Performer, run, Path(logs))) as crew:
        return crew.call(Performer.peak)


def compared(run: Recipe, name: str) -> Compared:
    """Compare the dry run of a case with its real phases, or with a whole run of `etude train`."""
    memory = dry_run(run, torch.device("cpu")).memory
    phases = {phase: memory.peak(phase) for phase in memory.phases}
    if isinstance(run, Run) and run.max_staleness:
        phases = add_to_phases(phases, engine_activations(phases["sampling"]), but="sampling")
    foreseen = max(memory.peak().total, *(peak.total for peak in phases.values()))
    if name not in TRAINED:
        return Compared(name, foreseen, performed(run))
    assert isinstance(run, Run), "a run that collects"
    return Compared(name, foreseen, measured(lambda: train(run)))


def main() -> int:
    """Compare every case; exit code 1 if a difference is over the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=(*CASES, *LONG), default=list(CASES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("case", "predicted, MiB", "measured, MiB", "ratio"):
        shown.add_column(title, justify="left" if title == "case" else "right")
    results = []
    with tempfile.TemporaryDirectory() as place:
        for name in arguments.only:
            result = compared(run_of(Path(place) / str(len(results)), name), name)
            results.append(result)
            shown.add_row(
                name, f"{result.foreseen / 2**20:.1f}", f"{result.measured / 2**20:.1f}", f"{result.ratio:.3f}"
            )
    make_console().print(shown)
    if arguments.json:
        cases = [{**asdict(result), "ratio": result.ratio} for result in results]
        written(arguments.json, cases, {result.name: result.ratio for result in results})
    return 0 if all(abs(result.ratio - 1) <= WITHIN for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
