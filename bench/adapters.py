"""Time training and sampling with adapters, and with compiled steps, against full training of the same model.

    python -m bench.adapters [--rounds 5] [--only train] [--size 75m] [--json FILE]

All cases use one random Qwen3-shaped model with adapters of rank 16 on every linear layer, in the precision that
`train.precision=auto` chooses:

    train    an optimizer step on rows of 16 to 128 tokens: with adapters, and full training with train.compile
    sample   64 requests of 64 tokens each and 64 new ones: with adapters, and with merged weights

A ratio is the time divided by that of full training; a limit is the most that it should be. At the end the benchmark
prints the difference of sampler and trainer with equal weights, over the tokens of one round of answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table

from bench.common import Case, computed_dtype, machine, measure, precision, table, write_json
from bench.train_step import SIZES, VOCABULARY, Rows, config_of, etude_step, mixed_rows, tree
from bench.train_step import answers as trained
from etude.models import LoraAdapterConfig, Model, PackedAttention, adapt, create, token_logp
from etude.observe import make_console, progress
from etude.records import Completion, SamplingParams
from etude.rollout import TorchEngine, TorchEngineConfig

RANK, SPREAD = 16, 0.02
"""The rank of the adapters, and the size of the factors that start at zero: about that of a short training."""
KINDS = ("train", "sample")
LENGTH = {"75m": 64, "tiny": 8}
"""The tokens of a prompt, and of an answer."""


def whole(size: str) -> Model:
    """Return the model for full training."""
    return create(config_of(size), seed=0, dtype=computed_dtype())


def adapted(size: str) -> Model:
    """Return the model with adapters that are not zero."""
    model = adapt(whole(size), LoraAdapterConfig(rank=RANK), seed=0)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.trained_weights():
            if ".lora_B." in name:
                weight.copy_(SPREAD * torch.randn(weight.shape, generator=chance))
    return model


def training(size: str, rows: int) -> list[Case]:
    """Return the cases of optimizer steps."""
    compiled = whole(size)
    compiled.compile()
    given = mixed_rows(rows, VOCABULARY[size])
    plain = etude_step(whole(size), given)
    kind = f"a train step, {rows} rows"
    return [
        Case("train: adapter", kind, etude_step(adapted(size), given), plain, 0.9),
        Case("train: compiled", kind, etude_step(compiled, given), plain, 1.05),
    ]


def sampling(size: str, requests: int, engines: dict[str, TorchEngine]) -> list[Case]:
    """Return the cases of sampling, in which each engine has its own weights."""
    kind = f"{requests} requests, {LENGTH[size]} new tokens each"
    requests_by_engine = {name: partial(answers, engine, size, requests) for name, engine in engines.items()}
    return [
        Case("sample: adapter", kind, requests_by_engine["adapter"], requests_by_engine["whole"], 1.6),
        Case("sample: merged", kind, requests_by_engine["merged"], requests_by_engine["whole"], 1.05),
    ]


def answers(engine: TorchEngine, size: str, requests: int) -> list[Completion]:
    """Return requests with random prompts, the same each time."""
    length = LENGTH[size]
    params = [SamplingParams(max_tokens=length, seed=i) for i in range(requests)]
    return engine.generate_all(list(prompts(size, requests)), params)


def prompts(size: str, requests: int) -> NDArray[np.int32]:
    """[requests, tokens]"""
    return np.random.default_rng(0).integers(0, VOCABULARY[size], (requests, LENGTH[size]), dtype=np.int32)


@torch.no_grad()
def apart(engine: TorchEngine, size: str, requests: int) -> tuple[float, float, float]:
    """Compare the log-probs of trainer and sampler for an answer's tokens.

    The result is the mean distance of log-probs, their divergence by k3, and the largest distance of probabilities.
    """
    completions, prompt_ids = answers(engine, size, requests), prompts(size, requests)
    ids = tuple(
        torch.from_numpy(np.concatenate(pair)) for pair in zip(prompt_ids, (c.ids for c in completions), strict=True)
    )
    rows = Rows(ids, (LENGTH[size],) * requests, 1)
    pack, action = tree(rows), trained(rows)
    hidden = engine.model.hidden(pack.ids, pack.positions, PackedAttention(pack))
    trainer_logp = token_logp(engine.model, hidden[pack.source[action]], torch.cat(ids)[action]).double()
    drawn = torch.from_numpy(np.concatenate([c.logp for c in completions])).double()
    gap = trainer_logp - drawn
    k3 = gap.expm1() - gap
    return float(gap.abs().mean()), float(k3.mean()), float((trainer_logp.exp() - drawn.exp()).abs().max())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; medians are shown")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step, and requests at once")
    parser.add_argument("--size", choices=list(SIZES), default="75m", help="the model")
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS, help="time these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    console = make_console()
    with ExitStack() as stack:
        timed_cases, engines = training(arguments.size, arguments.rows) if "train" in arguments.only else [], {}
        if "sample" in arguments.only:
            made = {
                "whole": whole(arguments.size),
                "adapter": adapted(arguments.size),
                "merged": adapted(arguments.size),
            }
            for name, model in made.items():
                engine = TorchEngine(model, None, TorchEngineConfig(kv_gib=0.5), merge=name == "merged")
                engines[name] = stack.enter_context(closing(engine))
            timed_cases += sampling(arguments.size, arguments.rows, engines)
        with progress("timing", len(timed_cases) * (arguments.rounds + 1), console) as bar:
            measured = measure(timed_cases, arguments.rounds, bar.advance)
        merging = engines["merged"].stats().reduce()["engine/merge_seconds"] if engines else 0.0
        gaps = {name: apart(engine, arguments.size, arguments.rows) for name, engine in engines.items()}
    console.print(
        f"Size {arguments.size}, {precision()}, {machine()['threads']} threads, median of {arguments.rounds} rounds."
    )
    console.print(table(measured, "whole"))
    if gaps:
        console.print(f"Merging once took {1e3 * merging:.0f} ms. Sampler and trainer, with equal weights:")
        shown = Table("", "mean distance of log-probs", "divergence, k3", "largest distance of probabilities")
        for name, gap in gaps.items():
            shown.add_row(name, *(f"{value:.2g}" for value in gap))
        console.print(shown)
    if arguments.json:
        write_json(
            arguments.json, measured, {"size": arguments.size, "rows": arguments.rows, "rank": RANK, "gaps": gaps}
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
