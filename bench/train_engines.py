"""Time an optimizer step of each train engine, beside plain transformers under FSDP2.

    python -m bench.train_engines [--rounds 5] [--only mixed] [--size 13m] [--beside CHECKOUT] [--json FILE]

All train the same random Qwen3-shaped weights in fp32 on the same rows: log-probs of answer tokens, a policy gradient,
AdamW without clipping. Each rank is a process with one thread, and gloo connects them. The plain step has padded rows
in micro-batches of eight and a cross entropy over all logits. Engines take turns, step by step. Cases as in
`bench.train_step`:

    mixed    rows of 16 to 128 tokens, a quarter of each a separate prompt
    shared   512-token prompts, each shared by eight answers of 32 tokens

A ratio is the speedup of `fsdp` over the plain step on as many ranks, or that of `local` over `local` of another
checkout (`--beside`). The limit is 1, and 0.95 against another checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import Case, Measured, measure, table, write_json
from bench.train_step import Rows, mixed_rows, shared_rows
from bench.workers import ROOT, Worker
from etude.models import create, save, tiny_config
from etude.observe import make_console, progress

SIZES: dict[str, dict[str, Any]] = {
    "13m": {"vocab_size": 4096, "layers": 4, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1024},
    "tiny": {"vocab_size": 64, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64},
}
NAMES = ("mixed", "shared")
FASTER, AS_FAST = 1.0, 0.95


@dataclass(frozen=True)
class Setting:
    """The work of all ranks: a model's directory, and the rows of each case."""

    directory: Path
    cases: dict[str, list[dict[str, Any]]]
    scratch: Path

    def share(self, rank: int, ranks: int) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of a rank: whole groups."""
        return {name: [row for row in rows if row["group"] % ranks == rank] for name, rows in self.cases.items()}


class World:
    """The ranks of one engine."""

    def __init__(self, setting: Setting, name: str, engine: str, ranks: int, checkout: Path = ROOT) -> None:
        script = [sys.executable, str(ROOT / "bench" / "train_engines_worker.py")]
        environment = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        log, store = setting.scratch / name, setting.scratch / f"{name}.store"
        self.name = name
        about = {"launched": time.time(), "engine": engine, "ranks": ranks, "tensor": 1}
        about |= {"store": str(store), "precision": "fp32"}
        self._ranks = [Worker(f"{name} {rank}", script, Path(f"{log}-{rank}"), environment) for rank in range(ranks)]
        for rank, worker in enumerate(self._ranks):
            share = {"rank": rank, "directory": str(setting.directory), "cases": setting.share(rank, ranks)}
            worker.tell(json.dumps({**about, **share}))
        self.seconds: dict[str, float] = self._answers()[0]["seconds"]
        """The phases of the start of the first rank."""

    def step(self, case: str) -> float:
        """Make one optimizer step, and return the loss."""
        for worker in self._ranks:
            worker.tell(json.dumps({"case": case}))
        losses = [answer["loss"] for answer in self._answers()]
        return sum(losses) if self.name.startswith("plain") else losses[0]

    def close(self) -> None:
        """End its processes."""
        for worker in self._ranks:
            worker.close()

    def _answers(self) -> list[dict[str, Any]]:
        return [worker.hear() for worker in self._ranks]


def records(rows: Rows) -> list[dict[str, Any]]:
    """Return rows as records, each with a different advantage."""
    advantages = torch.randn(len(rows.ids), generator=torch.Generator().manual_seed(1)).tolist()
    whole = sum(len(ids) - prompt for ids, prompt in zip(rows.ids, rows.prompts, strict=True))
    return [
        {"ids": ids.tolist(), "prompt": prompt, "group": row // rows.group, "advantage": advantage, "whole": whole}
        for row, (ids, prompt, advantage) in enumerate(zip(rows.ids, rows.prompts, advantages, strict=True))
    ]


def setting_of(size: str, count: int, only: Sequence[str], scratch: Path) -> Setting:
    """Write the model, and return what all engines train on."""
    vocabulary = SIZES[size]["vocab_size"]
    prompt, answer = (24, 4) if size == "tiny" else (512, 32)
    rows = {"mixed": mixed_rows(count, vocabulary), "shared": shared_rows(count, vocabulary, prompt, answer)}
    save(create(tiny_config(tied=False, **SIZES[size]), seed=0), scratch / "model")
    return Setting(scratch / "model", {name: records(rows[name]) for name in only or NAMES}, scratch)


def compared(setting: Setting, beside: Path | None, stack: ExitStack) -> tuple[list[Case], list[World]]:
    """Start all engines, and return the cases to time."""

    def start(name: str, engine: str, ranks: int, checkout: Path = ROOT) -> World:
        world = stack.enter_context(closing(World(setting, name, engine, ranks, checkout)))
        worlds.append(world)
        return world

    def step_of(world: World, case: str) -> Callable[[], float]:
        return lambda: world.step(case)

    worlds: list[World] = []
    pairs = [(start(f"plain-{ranks}", "plain", ranks), start(f"fsdp-{ranks}", "fsdp", ranks)) for ranks in (1, 2)]
    local = start("local", "local", 1)
    pairs.append((pairs[0][0], local))
    if beside is not None:
        pairs.append((start("beside", "local", 1, beside), local))
    cases = []
    for peer, ours in pairs:
        limit = AS_FAST if peer.name == "beside" else FASTER
        for case in setting.cases:
            name, steps = f"{ours.name} beside {peer.name}: {case}", (step_of(peer, case), step_of(ours, case))
            cases.append(Case(name, "one optimizer step", *steps, limit, is_peer=True))
    return cases, worlds


def startup(worlds: Sequence[World]) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase of the start, by engine."""
    return {world.name: world.seconds for world in worlds}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; medians are shown")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step; a multiple of 16")
    parser.add_argument("--size", choices=list(SIZES), default="13m", help="the model")
    parser.add_argument("--only", nargs="*", default=[], choices=NAMES, help="time these alone")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="time `local` of another checkout as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    console = make_console()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        setting = setting_of(arguments.size, arguments.rows, arguments.only, Path(scratch))
        cases, worlds = compared(setting, arguments.beside, stack)
        with progress("timing", len(cases) * (arguments.rounds + 1), console) as bar:
            measured: list[Measured] = measure(cases, arguments.rounds, bar.advance)
    console.print(f"Size {arguments.size}, fp32, one thread a rank, median of {arguments.rounds} rounds.")
    console.print(table(measured, "Etude's"))
    for name, seconds in startup(worlds).items():
        console.print(f"{name} starts: " + ", ".join(f"{phase} {took:.2f} s" for phase, took in seconds.items()))
    if arguments.json:
        write_json(
            arguments.json, measured, {"size": arguments.size, "rows": arguments.rows, "startup": startup(worlds)}
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
