"""The items of the battery, in the order of what they tell a second."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.common import matrix_rate
from bench.gpu.battery import Figures, Item, Place
from bench.gpu.kernels import kernels
from bench.gpu.work import GROUP, Ids, make_batch, make_engine, make_model, prompts
from bench.train_engines_worker import PolicyGradient, batch_of
from etude.batch import Batch
from etude.models import Model
from etude.records import SamplingParams
from etude.rollout.torch_engine import TorchEngine
from etude.sync import publish_to_engine
from etude.train import Learner, TrainConfig

DECODED = 32
"""Tokens that a timed decode makes for each request."""
PARITY_SECONDS = 150
DEAREST = 15
"""Kernels that are listed by name."""


def facts(place: Place) -> Figures:
    """The device, its drivers, and the limits that the other figures are read against."""
    figures: Figures = {"torch": torch.__version__, "compiler": shutil.which("gcc") or "none"}
    if not place.tiny:
        figures["matrix product, TFLOP/s"] = matrix_rate() / 1e12
    if place.on_gpu:
        properties = torch.cuda.get_device_properties(place.device)
        figures["device"] = properties.name
        figures["memory, GB"] = properties.total_memory / 1e9
        figures["CUDA"] = str(torch.version.cuda)
    numbers = torch.zeros(2**12 if place.tiny else 2**29, dtype=torch.bfloat16, device=place.device)
    copied = place.milliseconds(lambda: numbers.add_(1))
    figures["read and write, GB/s"] = 2 * numbers.nbytes / float(copied["ms"]) / 1e6
    small = torch.zeros(8, device=place.device)

    def launches() -> None:
        for _ in range(1000):
            small.add_(1)

    figures["launch, µs"] = float(place.milliseconds(launches)["ms"])
    if place.on_gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
        figures["launch in a graph, µs"] = float(place.milliseconds(graph.replay)["ms"])
    return figures


def decode(place: Place) -> Figures:
    """A decode step of the embedded engine: requests at once, and tokens that each attends to.

    Steps without static shapes are timed beside it, and the equal answers of both are counted.
    """
    model = make_model(place, "0.5b")
    figures: Figures = {}
    asked = prompts(4 if place.tiny else 256, 16 if place.tiny else 256, model.vocab_size)
    with make_engine(place, model, kv_gib=30.0, static_steps=False) as engine:
        for requests in (1, len(asked)):
            step = _decode_step(place, engine, asked[:requests])
            figures[f"{requests} requests of {len(asked[0])} tokens, not static: ms"] = 1e3 * step
        answers = _generate(engine, asked, DECODED)
    with make_engine(place, model, kv_gib=60.0, static_steps=True) as engine:
        pairs = zip(answers, _generate(engine, asked, DECODED), strict=True)
        figures["share of answers that are those of steps that are not static"] = float(
            np.mean([np.array_equal(one, other) for one, other in pairs])
        )
        for context in (16,) if place.tiny else (256, 1024, 4096):
            for requests in (1, 4) if place.tiny else (1, 16, 64, 256):
                if requests * context > 512 * 1024:
                    continue  # the keys and values of 256 requests of 4,096 tokens take 120 GB
                step = _decode_step(place, engine, prompts(requests, context, model.vocab_size))
                name = f"{requests} requests of {context} tokens"
                figures[f"{name}: ms"] = 1e3 * step
                figures[f"{name}: tokens/s"] = requests / step
        if place.on_gpu:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                _generate(engine, asked, DECODED)
            busy = sum(event.self_device_time_total for event in profiled.key_averages()) / 1e3
            figures["256 requests of 256 tokens: device ms a step, with the prompts' share"] = busy / DECODED
    return figures


def _decode_step(place: Place, engine: TorchEngine, asked: list[Ids]) -> float:
    """Return the seconds of a step. The prompts are cached, so the difference of two lengths is decoding alone."""
    _generate(engine, asked, 2)
    steps = []
    for _ in range(1 if place.tiny else 3):
        short = place.seconds(lambda: _generate(engine, asked, 1))
        long = place.seconds(lambda: _generate(engine, asked, 1 + DECODED))
        steps.append(max(long - short, 1e-9) / DECODED)
    return median(steps)


def _generate(engine: TorchEngine, asked: list[Ids], tokens: int) -> list[Ids]:
    samplings = [SamplingParams(max_tokens=tokens, seed=place) for place in range(len(asked))]
    return [answer.ids for answer in engine.generate_all(asked, samplings)]


def train(place: Place) -> Figures:
    """An update of 65,536 tokens: prompts of 128, each with eight answers of equal and of mixed lengths."""
    answers = {"equal": [128] * GROUP, "mixed": [16, 48, 80, 112, 144, 176, 208, 240]}
    figures: Figures = {}
    for compiled in (False, True) if place.on_gpu else (False,):
        model = make_model(place, "0.5b")
        learner = _learner(place, model, compile=compiled)
        for name, lengths in answers.items():
            batch = make_batch(model, 1 if place.tiny else 32, 16 if place.tiny else 128, lengths)
            measured = _update(place, learner, batch)
            kind = f"{name}{', compiled' if compiled else ''}"
            figures |= {f"{kind}: {figure}": value for figure, value in measured.items()}
        if place.on_gpu and not compiled:
            figures |= _dearest(learner, batch)
        del learner, model
        place.free()
    return figures


def train_4b(place: Place) -> Figures:
    """An update of 16,384 tokens in rows of 4,096, with selective checkpointing."""
    model = make_model(place, "4b")
    learner = _learner(place, model, activation_checkpointing="selective")
    return _update(place, learner, make_batch(model, 2, 16 if place.tiny else 1024, [48 if place.tiny else 3072] * 2))


def _learner(place: Place, model: Model, **options: Any) -> Learner:
    peak = matrix_rate() if place.on_gpu else None
    config = TrainConfig(precision="bf16", learning_rate=1e-6, **options)
    return Learner(model, config, steps=1_000, peak=peak)


def _update(place: Place, learner: Learner, batch: Batch) -> Figures:
    objective = PolicyGradient()
    learner.update(batch, objective)  # compiles, and chooses kernels
    place.free()
    reduced = [learner.update(batch, objective).reduce() for _ in range(1 if place.tiny else 5)]
    seconds = median(metrics["update_seconds"] for metrics in reduced)
    figures: Figures = {"ms": 1e3 * seconds, "tokens/s": batch.num_tokens / seconds, "peak, GB": place.peak_gb()}
    if place.on_gpu:
        figures["mfu"] = median(metrics["mfu"] for metrics in reduced)
    return figures


def _dearest(learner: Learner, batch: Batch) -> Figures:
    """Return the kernels that take most of an update, and the share of it in which the device is idle."""
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        learner.update(batch, PolicyGradient())
        torch.cuda.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - start)
    kernels = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
    busy = sum(kernel.self_device_time_total for kernel in kernels) / 1e3
    figures: Figures = {"idle share of the device, profiled": 1 - busy / milliseconds}
    for kernel in kernels[:DEAREST]:
        figures[f"{kernel.key[:80]}: ms"] = kernel.self_device_time_total / 1e3
    return figures


def grpo(place: Place) -> Figures:
    """Steps of GRPO whose engine shares the learner's weights: 256 answers of 128 tokens."""
    model = make_model(place, "0.5b")
    learner = _learner(place, model)
    groups, length, new, steps = (1, 8, 4, 2) if place.tiny else (32, 128, 128, 5)
    spent = {name: list[float]() for name in ("collect", "annotate", "update", "publish")}
    written, mismatch = 0.0, 0.0
    with make_engine(place, model) as engine:
        for step in range(steps):
            asked = [ids for ids in prompts(groups, length, model.vocab_size, seed=step) for _ in range(GROUP)]
            sampling = [SamplingParams(max_tokens=new)] * len(asked)
            start = time.perf_counter()
            answers = engine.generate_all(asked, sampling)
            spent["collect"].append(time.perf_counter() - start)
            rewards = np.array([(answer.ids < model.vocab_size // 2).mean() for answer in answers])
            centered = rewards - rewards.reshape(groups, GROUP).mean(1).repeat(GROUP)
            batch = batch_of(
                [
                    {
                        "ids": [*prompt, *answer.ids],
                        "prompt": length,
                        "group": index // GROUP,
                        "advantage": float(centered[index]),
                    }
                    for index, (prompt, answer) in enumerate(zip(asked, answers, strict=True))
                ]
            )
            start = time.perf_counter()
            annotated = learner.annotate(batch, frozenset({"old_logp"}))
            spent["annotate"].append(time.perf_counter() - start)
            behavior = torch.from_numpy(np.concatenate([answer.logp for answer in answers]))
            trained = annotated.require("old_logp")[annotated.action]
            mismatch = max(mismatch, float((trained - behavior).abs().mean()))
            spent["update"].append(learner.update(batch, PolicyGradient()).reduce()["update_seconds"])
            published = asyncio.run(publish_to_engine(engine, learner.weights(), learner.version)).reduce()
            spent["publish"].append(published["publish_ms"] / 1e3)
            written = max(written, published["publish_bytes"])
    figures: Figures = {f"{name}, s": median(seconds[1:]) for name, seconds in spent.items()}
    return figures | {"published, bytes": written, "mean distance of log-probs": mismatch, "peak, GB": place.peak_gb()}


def memory(place: Place) -> Figures:
    """Sleep and wake of the engine: their time, and the memory that comes back."""
    model = make_model(place, "0.5b")
    times = 2 if place.tiny else 20
    figures: Figures = {}
    with make_engine(place, model) as engine:
        asked = prompts(8, 32, model.vocab_size)
        _generate(engine, asked, 2)
        first, sleeps, wakes = 0.0, [], []
        for index in range(times):
            sleeps.append(place.seconds(lambda: asyncio.run(engine.sleep())))
            place.free()
            asleep = torch.cuda.memory_reserved(place.device) / 1e9 if place.on_gpu else 0.0
            first = asleep if index == 0 else first
            wakes.append(place.seconds(lambda: asyncio.run(engine.wake())))
            _generate(engine, asked, 2)
        figures |= {"sleep, ms": 1e3 * median(sleeps), "wake, ms": 1e3 * median(wakes)}
        figures |= {"reserved asleep, GB": asleep, f"more after {times} times, GB": asleep - first}
    return figures


def growth(place: Place) -> Figures:
    """The memory that 50 small updates and collections leave behind."""
    model = make_model(place, "tiny")
    learner = _learner(place, model)
    after = []
    with make_engine(place, model, kv_gib=0.1) as engine:
        for step in range(5 if place.tiny else 50):
            _generate(engine, prompts(4, 8 + step, model.vocab_size, seed=step), 4)
            learner.update(make_batch(model, 2, 8 + step, [4 + step] * 2, seed=step), PolicyGradient())
            after.append(torch.cuda.memory_allocated(place.device) / 1e6 if place.on_gpu else 0.0)
    return {"MB after the first fifth": after[len(after) // 5], "MB at the end": after[-1]}


def exactness(place: Place) -> Figures:
    """In float32: whether a request gets the same tokens and bits alone, in a batch, and again."""
    model = make_model(place, "0.5b", torch.float32)
    with make_engine(place, model) as engine:
        asked = prompts(3 if place.tiny else 17, 32, model.vocab_size)
        sampling = SamplingParams(max_tokens=16, seed=0)
        alone = [engine.generate_all([ids], [sampling])[0] for ids in asked]
        together = engine.generate_all(asked, [sampling] * len(asked))
        pairs = list(zip(alone, together, strict=True))
        return {
            "claims exact": float(engine.exact),
            "share of the same tokens": float(np.mean([np.array_equal(a.ids, b.ids) for a, b in pairs])),
            "share of the same bits": float(np.mean([np.array_equal(a.logp, b.logp) for a, b in pairs])),
        }


def parity(place: Place) -> Figures:
    """The tests of the marker gpu, each test's outcome."""
    report = place.folder / "gpu-tests.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests",
        "-m",
        "gpu",
        "-q",
        f"--junitxml={report}",
    ]
    try:
        subprocess.run(command, check=False, timeout=PARITY_SECONDS, capture_output=True)
    except subprocess.TimeoutExpired:
        return {"tests": f"still running after {PARITY_SECONDS} s"}
    return outcomes(report)


def outcomes(report: Path) -> Figures:
    """Return the number of tests by outcome, and the first line of each failure."""
    counts: Counter[str] = Counter()
    figures: Figures = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        counts["passed" if found is None else found.tag] += 1
        if found is not None:
            figures[f"{case.get('classname')}::{case.get('name')}"] = (found.get("message") or found.tag).split("\n")[0]
    return {name: float(number) for name, number in sorted(counts.items())} | figures


def traces(place: Place) -> Figures:
    """Chrome traces of a few decode steps and of one update, beside the file."""
    model = make_model(place, "0.5b")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    figures: Figures = {}
    with make_engine(place, model) as engine:
        asked = prompts(16, 64, model.vocab_size)
        _generate(engine, asked, 4)
        with profile(activities=activities) as profiled:
            _generate(engine, asked, 4)
        figures["decode, MB"] = _save(profiled, place.folder / "decode-trace.json.gz")
    learner = _learner(place, model)
    batch = make_batch(model, 1, 64, [64] * 4)
    learner.update(batch, PolicyGradient())
    with profile(activities=activities) as profiled:
        learner.update(batch, PolicyGradient())
    figures["update, MB"] = _save(profiled, place.folder / "update-trace.json.gz")
    return figures


def _save(profiled: profile, file: Path) -> float:
    profiled.export_chrome_trace(str(file))
    return file.stat().st_size / 1e6


ITEMS = (
    Item("facts", 10, facts),
    Item("kernels", 40, kernels),
    Item(
        "decode",
        80,
        decode,
        goals={"1 requests of 256 tokens: tokens/s": 300, "256 requests of 256 tokens: tokens/s": 15_000},
    ),
    Item("train", 70, train, goals={"equal, compiled: mfu": 0.35}),
    Item("grpo", 60, grpo),
    Item("train 4B", 60, train_4b, goals={"mfu": 0.45}),
    Item("parity", PARITY_SECONDS, parity, needs_gpu=True),
    Item("memory", 30, memory),
    Item("exactness", 40, exactness),
    Item("growth", 20, growth),
    Item("traces", 15, traces),
)
