"""The contract of new weights while requests run: for the embedded engine, for servers, and for real servers.

The servers of a process are scripted: they have the cache of a server, and no model. Real ones take minutes, so each
has a few of the tests.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from etude.errors import ConfigError, EngineError
from etude.models import load
from etude.protocols import KvPolicy, RunningPolicy
from etude.records import Completion, SamplingParams
from etude.rollout import ServerPool, SglangConfig, TorchEngine, TorchEngineConfig, VllmConfig
from etude.rollout.launch import launch_specs, start_servers
from etude.rollout.request import MAX_RESTARTS
from etude.rollout.server_backend import LaunchSpec
from etude.rollout.server_engine import ModelShape
from etude.rollout.sglang import SglangBackend
from etude.rollout.vllm import VllmBackend
from tests.rollout.cached_server import VOCABULARY, CachedServer, cached_server
from tests.rollout.engines import Ids, logits_of
from tests.served import CONTEXT, on
from tests.waits import until

TOKENS = CONTEXT - 30
OPTIONS = TorchEngineConfig(kv_gib=0.01, max_num_seqs=32)
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0)
DRAWN = SamplingParams(max_tokens=TOKENS, seed=3, logit_bias={1: -100.0})
"""Sampling that a tokenizer's end token does not end early."""
SIZES = {"num_attention_heads": 1, "hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 512}
SCRIPTED = [pytest.param(f"scripted {kind}", marks=pytest.mark.slow) for kind in ("vllm", "sglang")]
AHEAD = OPTIONS.model_copy(update={"static_steps": True, "deterministic": False})
"""With these the embedded engine launches a step before it reads the one before."""
EMBEDDED = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("embedded", "one step ahead")]
IN_MEMORY = [*EMBEDDED, *SCRIPTED]
REAL = [pytest.param(kind, marks=on(kind)) for kind in ("vllm", "sglang")]
Truth = Callable[[Ids, Completion, int, int], NDArray[np.float32]]


@dataclass
class Case:
    """An engine with the first weights as version 0."""

    engine: TorchEngine | ServerPool
    publish: Callable[[int, int], None]
    """Publish the first or the second weights under a version."""
    truth: Truth
    """The log-probs of a completion's tokens from a position on, by a prefill with the first or the second weights."""
    tolerance: float
    sampling: SamplingParams = GREEDY
    script: CachedServer | None = None

    async def drawn(self, count: int) -> None:
        """Wait until so many more tokens were drawn."""
        async with asyncio.timeout(60):
            while count > 0:
                count -= int((await asyncio.to_thread(self.engine.stats)).reduce()["engine/new_tokens"])
                await asyncio.sleep(0.001)

    @property
    def holds_new(self) -> bool:
        """True if new requests wait for other weights."""
        if isinstance(self.engine, TorchEngine):
            return self.engine._scheduler._holds_new
        return all(server.withdrawn for server in self.engine.servers)

    def assert_drawn_by(self, prompt: Ids, answer: Completion, start: int, place: int) -> None:
        """Assert that a prefill with these weights would have drawn the tokens from `start` on."""
        logp = answer.raw_logp if self.sampling is GREEDY else answer.logp
        assert start < len(answer.ids) and logp is not None
        assert np.abs(logp[start:] - self.truth(prompt, answer, start, place)).max() <= self.tolerance


Make = Callable[..., AbstractContextManager[Case]]


@pytest.fixture(scope="module")
def fresh_engines(served_models: tuple[Path, Path]) -> Iterator[list[TorchEngine]]:
    """Engines with the first and the second weights, to which nothing is published."""
    models = [load(directory, dtype=torch.float32) for directory in served_models]
    with ExitStack() as stack:
        yield [stack.enter_context(TorchEngine(model, None, OPTIONS)) for model in models]


@pytest.fixture
def make(request: pytest.FixtureRequest, served_models: tuple[Path, Path], tmp_path: Path) -> Make:
    """Start an engine of the test's kind, with the policies that are given."""
    kind = str(request.param)
    if kind == "embedded":
        return partial(embedded, request.getfixturevalue("fresh_engines"), served_models)
    if kind == "one step ahead":
        return partial(embedded, request.getfixturevalue("fresh_engines"), served_models, options=AHEAD, tolerance=1e-4)
    if kind.startswith("scripted"):
        request.getfixturevalue("monkeypatch").setattr("etude.rollout.server_pool.CHECK_INTERVAL", 0.05)
        return partial(scripted, kind.split()[1], tmp_path)
    return partial(real, kind, request.getfixturevalue(f"{kind}_server"), served_models)


engines = pytest.mark.parametrize("make", IN_MEMORY, indirect=True)
all_engines = pytest.mark.parametrize("make", [*IN_MEMORY, *REAL], indirect=True)


@contextmanager
def embedded(
    fresh_engines: list[TorchEngine],
    directories: tuple[Path, Path],
    running: RunningPolicy = "continue",
    kv: KvPolicy = "keep",
    timeout: float = 300.0,
    options: TorchEngineConfig = OPTIONS,
    tolerance: float = 0.0,
) -> Iterator[Case]:
    options = options.model_copy(update={"running": running, "kv": kv, "update_timeout": timeout})

    def publish(place: int, version: int) -> None:
        weights = [(name, weight.detach()) for name, weight in fresh_engines[place].model.named_weights()]
        asyncio.run(engine.update_weights(weights, version))

    def truth(prompt: Ids, answer: Completion, start: int, place: int) -> NDArray[np.float32]:
        context = np.concatenate([prompt, answer.ids[:start]])
        rest = SamplingParams(max_tokens=len(answer.ids) - start, temperature=0)
        (fresh,) = fresh_engines[place].generate_all([context], [rest])
        assert fresh.ids.tolist() == answer.ids[start:].tolist() and fresh.raw_logp is not None
        return fresh.raw_logp

    with TorchEngine(load(directories[0], dtype=torch.float32), None, options) as engine:
        yield Case(engine, publish, truth, tolerance)


def directory_of(directory: Path, weights: int) -> Path:
    """Write the weights of a scripted server."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SIZES | {"vocab_size": VOCABULARY}))
    (directory / "salt").write_text(str(weights))
    return directory


@contextmanager
def scripted(
    kind: str,
    directory: Path,
    running: RunningPolicy = "continue",
    kv: KvPolicy = "recompute",
    timeout: float = 300.0,
) -> Iterator[Case]:
    directories = [directory_of(directory / "first", 0), directory_of(directory / "second", 1)]
    with cached_server(kind) as script:
        options = {"url": script.url, "kv": kv, "max_num_seqs": 32}
        config = VllmConfig(**options) if kind == "vllm" else SglangConfig(**options)
        engine = start_servers(
            config, directories[0], None, dtype="float32", device="cpu", logs=directory, threads=1, console=None
        )

        def publish(place: int, version: int) -> None:
            asyncio.run(engine.load(directories[place], version, running=running, timeout=timeout))

        def truth(prompt: Ids, answer: Completion, start: int, place: int) -> NDArray[np.float32]:
            state, logps = 0, []
            for token in [*prompt.tolist(), *answer.ids.tolist()]:
                state = zlib.crc32(f"{state} {token} {place}".encode())
                logps.append(-(1 + state % 1009) / 1009)
            return np.array(logps[len(prompt) + start - 1 : -1], np.float32)

        with engine:
            yield Case(engine, publish, truth, 1e-6, script=script)


@contextmanager
def real(
    kind: str,
    engine: ServerPool,
    directories: tuple[Path, Path],
    running: RunningPolicy = "continue",
    kv: KvPolicy = "recompute",
    timeout: float = 300.0,
) -> Iterator[Case]:
    models = [load(directory, dtype=torch.float32) for directory in directories]
    (server,) = engine.servers
    before, server.backend = server.backend, VllmBackend(kv=kv) if kind == "vllm" else SglangBackend(kv=kv)

    def publish(place: int, version: int) -> None:
        asyncio.run(engine.load(directories[place], version, running=running, timeout=timeout))

    def truth(prompt: Ids, answer: Completion, start: int, place: int) -> NDArray[np.float32]:
        context = np.concatenate([prompt, answer.ids])
        logits = logits_of(models[place], context)[len(prompt) - 1 : -1].clone()
        for token, bias in DRAWN.logit_bias.items():
            logits[:, token] += bias
        logp: NDArray[np.float32] = torch.log_softmax(logits, -1).numpy()
        return logp[np.arange(start, len(answer.ids)), answer.ids[start:]]

    try:
        publish(0, 0)
        yield Case(engine, publish, truth, 2e-3, DRAWN)
    finally:
        server.backend = before
        publish(0, 0)


def prompts_of(count: int) -> list[Ids]:
    """Return unrelated prompts."""
    draw = np.random.default_rng(count)
    return [draw.integers(2, 40, 16 + n).astype(np.int32) for n in range(count)]


def answers(case: Case, publish: Callable[[], None], *, count: int = 3, before: int = 12) -> list[Completion]:
    """Return answers that run while the test publishes. before: the tokens that are drawn until then."""

    async def run() -> list[Completion]:
        tasks = await running_requests(case, count, before)
        await asyncio.to_thread(publish)
        return [await task for task in tasks]

    return asyncio.run(run())


def changed_answers(case: Case) -> list[Completion]:
    """Return answers that both weights drew tokens of."""
    for _ in range(5):
        found = answers(case, lambda: case.publish(1, 1))
        if all(answer.version[-1] == 1 for answer in found):
            break
        case.publish(0, 0)  # a busy machine has published too late
    return found


def requests_of(case: Case, count: int) -> list[asyncio.Task[Completion]]:
    """Start unrelated requests."""
    return [asyncio.create_task(case.engine.generate(prompt, case.sampling)) for prompt in prompts_of(count)]


async def running_requests(case: Case, count: int, drawn: int) -> list[asyncio.Task[Completion]]:
    """Start requests, and return when so many of their tokens were drawn, and none has ended."""
    tasks: list[asyncio.Task[Completion]] = []
    while not tasks or any(task.done() for task in tasks):  # a busy machine may have looked too late
        await asyncio.gather(*tasks)
        case.engine.stats()
        tasks = requests_of(case, count)
        await case.drawn(drawn)
    return tasks


def changed_at(answer: Completion) -> int:
    """Return the number of tokens of the first version, which are not all of them."""
    assert answer.version[0] == 0 and answer.version[-1] == 1
    return int((answer.version == 0).sum())


@all_engines
def test_a_paused_engine_draws_no_token(make: Make) -> None:
    async def run(case: Case) -> None:
        tasks: list[asyncio.Task[Completion]] = []
        while not tasks or any(task.done() for task in tasks):  # a busy machine may have paused too late
            await case.engine.resume()
            tasks = await running_requests(case, 3, 9)
            await case.engine.pause()
            await asyncio.sleep(0.2)  # tokens on the way arrive
        case.engine.stats()
        await asyncio.sleep(0.2)
        assert case.engine.stats().reduce()["engine/new_tokens"] == 0
        assert not any(task.done() for task in tasks)
        await case.engine.resume()
        for task in tasks:
            assert len((await task).ids) == TOKENS

    with make() as case:
        asyncio.run(run(case))


@all_engines
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_each_token_has_a_version_which_rises_and_a_later_request_has_the_newest(make: Make, kv: KvPolicy) -> None:
    later: list[Completion] = []

    def publish() -> None:
        case.publish(1, 1)
        later.extend(case.engine.generate_all(prompts_of(2), [case.sampling] * 2))

    with make(kv=kv) as case:
        for answer in [*answers(case, publish), *later]:
            assert len(answer.ids) == len(answer.logp) == len(answer.version) == TOKENS
            assert answer.version.tolist() == sorted(answer.version.tolist()) and set(answer.version) <= {0, 1}
        assert {version for answer in later for version in answer.version.tolist()} == {1}


@all_engines
def test_recomputed_requests_go_on_as_a_prefill_with_the_new_weights(make: Make) -> None:
    with make(kv="recompute") as case:
        found = changed_answers(case)
        for prompt, answer in zip(prompts_of(3), found, strict=True):
            at = changed_at(answer)
            case.assert_drawn_by(prompt, answer, at, 1)


@all_engines
def test_with_kept_keys_a_running_request_reads_old_ones_and_later_requests_read_none(make: Make) -> None:
    """The later requests have the same prompts, whose keys are still cached."""
    with make(kv="keep") as case:
        found = changed_answers(case)
        for prompt, answer in zip(prompts_of(3), found, strict=True):
            with pytest.raises(AssertionError):
                case.assert_drawn_by(prompt, answer, changed_at(answer) + 1, 1)
        later = case.engine.generate_all(prompts_of(3), [case.sampling] * 3)
        for prompt, answer in zip(prompts_of(3), later, strict=True):
            case.assert_drawn_by(prompt, answer, 0, 1)
        if case.script is not None:
            assert not {"/reset_prefix_cache", "/flush_cache"} & set(case.script.posts)


@engines
def test_running_requests_finish_first_and_others_begin_with_the_new_weights(make: Make) -> None:
    async def run(case: Case) -> tuple[list[Completion], list[Completion]]:
        first = await running_requests(case, 2, 20)
        publishing = asyncio.create_task(asyncio.to_thread(case.publish, 1, 1))
        await until(lambda: publishing.done() or case.holds_new)
        later = requests_of(case, 2)
        await publishing
        return [await task for task in first], [await task for task in later]

    with make("finish") as case:
        first, later = asyncio.run(run(case))
        for prompt, old, new in zip(prompts_of(2), first, later, strict=True):
            assert set(old.version) == {0} and set(new.version) == {1}
            case.assert_drawn_by(prompt, old, 0, 0)
            case.assert_drawn_by(prompt, new, 0, 1)


@engines
def test_the_wait_for_running_requests_is_bounded(make: Make) -> None:
    with make("finish", timeout=0.02) as case:

        def publish() -> None:
            with pytest.raises(EngineError, match=r"still ran 0\.02 s|still under way at .* after 0\.02 s"):
                case.publish(1, 1)

        found = answers(case, publish, before=10)
        assert all(len(answer.ids) == TOKENS and answer.version[0] in (0, 1) for answer in found)


@engines
def test_restarted_requests_are_drawn_whole_by_the_new_weights(make: Make) -> None:
    with make("restart") as case:
        found = answers(case, lambda: case.publish(1, 1))
        for prompt, answer in zip(prompts_of(3), found, strict=True):
            assert set(answer.version) == {1} and len(answer.ids) == TOKENS
            case.assert_drawn_by(prompt, answer, 0, 1)
        assert case.engine.stats().reduce()["engine/requests_restarted"] == 3


@pytest.mark.parametrize("make", SCRIPTED, indirect=True)
def test_requests_of_servers_that_are_withdrawn_for_other_transports_restart(make: Make) -> None:
    with make() as case:
        script, engine = case.script, case.engine
        assert script is not None and isinstance(engine, ServerPool)

        def publish() -> None:
            (server,) = engine.withdraw_servers(running="restart", timeout=20)
            assert not server.active_requests and server.is_up
            script.weights, script.label = 1, "1"
            engine.readmit_servers({server: 1}, 1)

        for prompt, answer in zip(prompts_of(3), answers(case, publish), strict=True):
            assert set(answer.version) == {1}
            case.assert_drawn_by(prompt, answer, 0, 1)


@engines
def test_a_request_that_every_publish_restarts_ends(make: Make) -> None:
    """After its last restart it keeps its tokens, each with its version."""

    async def run(case: Case) -> tuple[Completion, int]:
        (prompt,) = prompts_of(1)
        task = asyncio.create_task(case.engine.generate(prompt, case.sampling))
        version = 0
        while not task.done():
            await asyncio.wait([task, asyncio.create_task(case.drawn(8))], return_when=asyncio.FIRST_COMPLETED)
            version += 1
            await asyncio.to_thread(case.publish, version % 2, version)
        return await task, version

    with make("restart") as case:
        answer, version = asyncio.run(run(case))
    versions = answer.version.tolist()
    assert version > MAX_RESTARTS + 1 and len(answer.ids) == TOKENS
    assert versions == sorted(versions) and versions[0] == MAX_RESTARTS and versions[-1] > MAX_RESTARTS


@engines
def test_a_streamed_answer_is_not_restarted(make: Make) -> None:
    """Its reader has the beginning."""

    async def run(case: Case) -> list[int]:
        (prompt,) = prompts_of(1)
        tokens: list[int] = []
        completion: Completion | None = None
        async for delta in case.engine.stream(prompt, case.sampling):
            tokens += delta.ids.tolist()
            completion = delta.completion
            if len(tokens) == 20:
                await asyncio.to_thread(case.publish, 1, 1)
        assert completion is not None and completion.ids.tolist() == tokens and len(tokens) == TOKENS
        return completion.version.tolist()

    with make("restart") as case:
        versions = asyncio.run(run(case))
    assert versions == sorted(versions) and versions[0] == 0 and versions[-1] == 1


@pytest.mark.slow
def test_a_server_whose_pause_leaves_a_step_under_way_is_refused_if_keys_are_kept(tmp_path: Path) -> None:
    """The step would meet the change of weights. A server that is started gets the argument."""
    model = directory_of(tmp_path / "model", 0)
    shape = ModelShape.read(model)
    commands = []
    for kv in ("keep", "recompute"):
        config = SglangConfig(kv=kv)
        (launch,) = launch_specs(LaunchSpec(config, model, Path("python"), "float32", "cuda"), shape)
        commands.append(config.create_backend().command(launch))
    assert ["--disable-overlap-schedule" in command for command in commands] == [True, False]
    with cached_server("sglang") as script:
        script.overlaps = True
        config = SglangConfig(url=(script.url,), kv="keep")
        with pytest.raises(ConfigError, match=r"pauses requests in place.*`--disable-overlap-schedule`"):
            start_servers(config, model, None, dtype="float32", device="cpu", logs=tmp_path)


@pytest.mark.parametrize("make", SCRIPTED, indirect=True)
@pytest.mark.parametrize("running", ["continue", "restart"])
def test_a_server_that_keeps_its_old_cache_gets_no_more_requests(make: Make, running: RunningPolicy) -> None:
    with make(running) as case:
        assert case.script is not None and isinstance(case.engine, ServerPool)
        case.script.refuses_reset = True
        with pytest.raises(EngineError):
            case.publish(1, 1)
        (server,) = case.engine.servers
        assert server.withdrawn and server.version == 0
