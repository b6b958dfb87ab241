"""Time the embedded engine and an update with filters of the sampler, beside the same work without one.

    python -m bench.filters [--rounds 5] [--vocabulary 151936] [--json FILE]

A small random model has a large vocabulary, so that its head is most of the work: the worst case. Its distribution is
nearly even. So `top_p` alone keeps most of the vocabulary, and its sets are bits.

    sample   16 requests for 8 tokens each, and the sets of all tokens
    update   one step on these answers: a forward and a backward pass over their sets
    center   one step without a filter, with `correction.center` and 32 alternatives to each token

The case `JSON` holds the answers to a schema whose strings are long, over a vocabulary of random words.

A ratio is the median over the rounds of a case's time divided by that of the case without a filter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from rich.box import SIMPLE_HEAD
from rich.table import Table
from tokenizers import decoders, models

from bench.common import written
from etude.algorithms import AlgorithmConfig, AlgorithmState
from etude.algorithms.corrections import CorrectionConfig
from etude.batch import Batch
from etude.chat import Tokenizer
from etude.chat.grammar import HEADER
from etude.data.samples import build_samples
from etude.models import Model, create, tiny_config
from etude.observe import make_console, progress
from etude.recipes.workers.policy_worker import PolicyObjective
from etude.records import Completion, Rollout, SamplingParams, Turn
from etude.rollout import TorchEngine, TorchEngineConfig
from etude.train import Learner, TrainConfig

REQUESTS, TOKENS, PROMPT = 16, 8, 32
FILTERS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "top_k 20": {"top_k": 20},
    "top_p 0.95, top_k 512": {"top_p": 0.95, "top_k": 512},
    "top_p 0.95": {"top_p": 0.95},
}
CENTERED = {"alternatives": 32}
SCHEMA = {"type": "array", "items": {"type": "string", "minLength": 100}, "minItems": 3}
GRAMMAR = f"{HEADER}start: %json {json.dumps(SCHEMA)}"


@dataclass(frozen=True)
class Timing:
    """The time of one piece of work in one round, in seconds."""

    work: str
    case: str
    seconds: float


def tokenizer_of(vocabulary: int, directory: Path) -> Tokenizer:
    """Return a tokenizer of all printable characters and of random words."""
    numbers = np.random.default_rng(0)
    characters = [chr(code) for code in range(32, 127)]
    words = dict.fromkeys(["<end>", *characters])
    while len(words) < vocabulary:
        sizes = numbers.integers(2, 9, vocabulary)
        words |= dict.fromkeys("".join(numbers.choice(characters[33:], size)) for size in sizes.tolist())
    model = models.WordLevel({word: id for id, word in enumerate(list(words)[:vocabulary])}, unk_token="<end>")
    inner = tokenizers.Tokenizer(model)
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return Tokenizer.load(directory)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a function, and the seconds it took."""
    began = time.perf_counter()
    result = function()
    return result, time.perf_counter() - began


def sample(engine: TorchEngine, prompts: Sequence[np.ndarray], options: Mapping[str, Any]) -> list[Completion]:
    """Return an answer to each prompt, with what the trainer needs to know of the sampler."""
    params = [
        SamplingParams(max_tokens=TOKENS, seed=seed, support=bool(options), **options) for seed in range(len(prompts))
    ]
    return engine.generate_all(list(prompts), params)


def batch_of(prompts: Sequence[np.ndarray], completions: Sequence[Completion]) -> Batch:
    """Return the answers as the batch of a step."""
    turns = [Turn(prompt, completion, 0) for prompt, completion in zip(prompts, completions, strict=True)]
    rows = [row for place, turn in enumerate(turns) for row in build_samples([turn], place)]
    return Batch.from_records(rows, [Rollout(place, 0, 0, float(place % 2)) for place in range(len(turns))])


def update(model: Model, batch: Batch, correction: CorrectionConfig) -> float:
    """Return the seconds of one step on the batch."""
    algorithm = AlgorithmConfig(correction=correction)
    learner = Learner(model, TrainConfig(precision="fp32", learning_rate=0.0))
    objective = PolicyObjective(algorithm)
    estimated = algorithm.estimate(batch.replace(old_logp=batch.behavior_logp), AlgorithmState())
    objective.state = estimated.state
    return timed(lambda: learner.update(estimated.batch, objective))[1]


def measure(model: Model, tokenizer: Tokenizer, rounds: int) -> list[Timing]:
    """Time every case once in each round; the first round is not counted."""
    numbers = np.random.default_rng(0)
    timings: list[Timing] = []
    cases = [*FILTERS.items(), ("JSON", {"grammar": GRAMMAR}), ("center", CENTERED)]
    engine = TorchEngine(model, tokenizer, TorchEngineConfig(kv_gib=0.1))
    try:
        with progress("sampling and updating", (rounds + 1) * len(cases)) as bar:
            for place in range(rounds + 1):
                prompts = [numbers.integers(0, model.vocab_size, PROMPT, dtype=np.int32) for _ in range(REQUESTS)]
                found: list[Timing] = []
                for name, options in cases:
                    answers, sampled = timed(lambda: sample(engine, prompts, options))  # noqa: B023  # called at once
                    correction = CorrectionConfig(center=name == "center")
                    found.append(Timing("sample", name, sampled))
                    found.append(Timing("update", name, update(model, batch_of(prompts, answers), correction)))
                    bar.advance()
                timings += found if place else []
    finally:
        engine.close()
    return timings


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each with all cases in turn")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="tokens of the vocabulary")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write a JSON file where one is named."""
    options = parse_arguments(arguments)
    config = tiny_config(options.vocabulary, layers=4, hidden=512, heads=8, kv_heads=4, intermediate=1536)
    with TemporaryDirectory(prefix="etude-bench-") as directory:
        tokenizer = tokenizer_of(options.vocabulary, Path(directory))
    timings = measure(create(config, seed=0), tokenizer, options.rounds)
    table = Table(box=SIMPLE_HEAD, title=f"{REQUESTS} requests for {TOKENS} tokens of {options.vocabulary:,}")
    for heading in ("case", "sample", "ratio", "update", "ratio"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    ratios: dict[str, float] = {}
    for name in (*FILTERS, "JSON", "center"):
        cells = [name]
        for work in ("sample", "update"):
            own, plain = (
                [timing.seconds for timing in timings if (timing.work, timing.case) == (work, case)]
                for case in (name, "none")
            )
            ratios[f"{work} {name}"] = median(one / other for one, other in zip(own, plain, strict=True))
            cells += [f"{median(own):.2f} s", f"{ratios[f'{work} {name}']:.2f}"]
        table.add_row(*cells)
    make_console().print(table)
    if options.json is not None:
        written(options.json, cases=[asdict(timing) for timing in timings], ratios=ratios)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
