"""The contract of every rollout engine, in this process or a real server of vLLM or SGLang."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.chat import Tokenizer
from etude.chat.grammar import HEADER
from etude.errors import ConfigError, DataError, EngineError, EtudeError
from etude.images import ImageSpan, PromptImages
from etude.models import Model, load
from etude.records import Completion, PromptScores, SamplingParams
from etude.rollout import ServerPool, SglangConfig, TorchEngine, TorchEngineConfig
from etude.rollout.reported_sets import Recording
from etude.rollout.server_client import HttpClient
from etude.rollout.sglang import RESERVED_TOKENS
from tests.rollout.engines import Ids, logits_of, logp_under
from tests.served import CONTEXT, bring, on

EXACT = {"embedded": 2e-4, "one step ahead": 2e-4, "vllm": 2e-3, "sglang": 2e-3}
"""The largest difference between the log-probs of a float32 engine and those of the model."""
AHEAD = {"static_steps": True, "deterministic": False}
"""The options with which the embedded engine launches a step before it reads the one before."""
SERVERS = [pytest.param("vllm", marks=on("vllm")), pytest.param("sglang", marks=on("sglang"))]
ENGINES = ["embedded", pytest.param("one step ahead", marks=pytest.mark.slow), *SERVERS]


@dataclass
class EngineCase:
    """An engine, and the two models that it is compared with."""

    kind: str
    engine: TorchEngine | ServerPool
    model: Model
    other: Model
    tokenizer: Tokenizer
    directories: tuple[Path, Path]

    def answers(self, prompts: list[Ids], sampling: SamplingParams) -> list[Completion]:
        """Return one answer to each prompt."""
        return self.engine.generate_all(prompts, [sampling] * len(prompts))

    def bring(self, place: int, version: int) -> None:
        """Have it compute with one of the two models."""
        if isinstance(self.engine, ServerPool):
            bring(self.engine, self.directories[place], version)
        else:
            weights = [(name, weight.detach()) for name, weight in (self.model, self.other)[place].named_weights()]
            asyncio.run(self.engine.update_weights(weights, version))


@pytest.fixture(params=ENGINES)
def case(request: pytest.FixtureRequest, served_models: tuple[Path, Path]) -> Iterator[EngineCase]:
    """An engine with the first model, as version 0."""
    model, other = (load(directory, dtype=torch.float32) for directory in served_models)
    tokenizer, kind = Tokenizer.load(served_models[0]), str(request.param)
    if kind in ("embedded", "one step ahead"):
        copy = load(served_models[0], dtype=torch.float32)
        more = AHEAD if kind == "one step ahead" else {}
        with TorchEngine(copy, tokenizer, TorchEngineConfig(kv_gib=0.01, max_num_seqs=32, **more)) as embedded:
            yield EngineCase(kind, embedded, model, other, tokenizer, served_models)
        return
    engine: ServerPool = request.getfixturevalue(f"{kind}_server")
    under_test = EngineCase(kind, engine, model, other, tokenizer, served_models)
    yield under_test
    if engine.version:
        under_test.bring(0, 0)


def prompts_of(count: int, length: int = 7) -> list[Ids]:
    """Return unrelated prompts."""
    draw = np.random.default_rng(count)
    return [draw.integers(2, 40, length + n % 5).astype(np.int32) for n in range(count)]


def test_greedy_answers_are_the_likeliest_up_to_ties(case: EngineCase) -> None:
    prompts = prompts_of(6)
    for prompt, answer in zip(
        prompts, case.answers(prompts, SamplingParams(max_tokens=16, temperature=0)), strict=True
    ):
        assert answer.raw_logp is not None and not answer.logp.any()
        assert np.allclose(answer.raw_logp, logp_under(case.model, prompt, answer), atol=EXACT[case.kind])
        logits = logits_of(case.model, np.concatenate([prompt, answer.ids]))[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.from_numpy(answer.ids.astype(np.int64))[:, None])[:, 0]
        assert float((logits.amax(-1) - chosen).max()) < 2 * EXACT[case.kind]
        assert set(answer.version.tolist()) == {0}


def test_log_probs_are_of_the_distribution_that_was_drawn_from(case: EngineCase) -> None:
    prompts = prompts_of(12)
    plain = case.answers(prompts, SamplingParams(max_tokens=12, seed=1))
    for prompt, answer in zip(prompts, plain, strict=True):
        assert np.allclose(answer.logp, logp_under(case.model, prompt, answer), atol=EXACT[case.kind])
    warm = case.answers(prompts, SamplingParams(max_tokens=12, seed=1, temperature=0.6, logit_bias={9: 2.5}))
    for prompt, answer in zip(prompts, warm, strict=True):
        logits = logits_of(case.model, np.concatenate([prompt, answer.ids]))[len(prompt) - 1 : -1].clone()
        logits[:, 9] += 2.5
        logp = torch.log_softmax(logits / 0.6, -1)
        wanted = logp.gather(1, torch.from_numpy(answer.ids.astype(np.int64))[:, None])[:, 0].numpy()
        assert np.allclose(answer.logp, wanted, atol=2 * EXACT[case.kind])


async def check_wide_sets(engine: TorchEngine | ServerPool) -> None:
    """Join SGLang's server for a run whose sets may have 5,000 tokens."""
    assert isinstance(engine, ServerPool)
    address = engine.servers[0].address
    client = HttpClient(address.url, key=address.key)
    try:
        await SglangConfig().create_backend(recording=Recording(5000)).check_version(client)
    finally:
        await client.close()


def test_a_cut_distribution_is_reported_as_it_is_or_refused(case: EngineCase) -> None:
    cut = SamplingParams(max_tokens=8, seed=2, top_k=3)
    prompts = prompts_of(4)
    if case.kind == "sglang":
        with pytest.raises(ConfigError, match="`top_p` is set, and SGLang reports the distribution"):
            case.answers(prompts, replace(cut, top_k=0, top_p=0.9))
        with pytest.raises(ConfigError, match=r"at most 4096 tokens a set.*`--sampling-mask-max-tokens 5000`"):
            asyncio.run(check_wide_sets(case.engine))
        with pytest.raises(ConfigError, match="SGLang does not report them beside `top_p`"):
            case.answers(prompts, replace(cut, top_logprobs=2))
    for prompt, answer in zip(prompts, case.answers(prompts, cut), strict=True):
        logits = logits_of(case.model, np.concatenate([prompt, answer.ids]))[len(prompt) - 1 : -1]
        best = logits.topk(3).values
        chosen = logits.gather(1, torch.from_numpy(answer.ids.astype(np.int64))[:, None])[:, 0]
        wanted = (chosen - best.logsumexp(-1)).numpy()
        assert np.allclose(answer.logp, wanted, atol=2 * EXACT[case.kind])


FORMS = [
    ("start: /[a-d]{2,3}(=[01]{1,2})?/", "[a-d]{2,3}(=[01]{1,2})?"),
    ('start: "ab" | "abc" | "b" /c+/', "ab|abc|bc+"),
    ('start: %json {"type": "integer", "minimum": 3, "maximum": 120}', "[0-9]+"),
    ('start: word (" " word){1,2}\nword: /[a-z]{1,3}/', "[a-z]{1,3}( [a-z]{1,3}){1,2}"),
    ('start: head "=" /[0-9]/\nhead[lazy]: /(?s:.*):/', "[^:]*:=[0-9]"),
]
"""Grammars, and what their answers match."""


def test_an_answer_is_held_to_its_grammar_and_has_its_sets(case: EngineCase) -> None:
    """The log-probs are over the sets, as a trainer without a grammar engine computes them."""
    prompts = prompts_of(2 * len(FORMS))
    bound = [
        SamplingParams(max_tokens=16, seed=number, grammar=f"{HEADER}{form}\n", support=True)
        for number, (form, _) in enumerate(2 * FORMS)
    ]
    answers = case.engine.generate_all(prompts, bound)
    for prompt, answer, (_, pattern) in zip(prompts, answers, 2 * FORMS, strict=True):
        if answer.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.text)
        assert answer.support is not None
        logits = logits_of(case.model, np.concatenate([prompt, answer.ids]))[len(prompt) - 1 : -1]
        allowed = np.stack([answer.support.mask(place, logits.shape[1]) for place in range(len(answer.ids))])
        logp = torch.log_softmax(logits.masked_fill(~torch.from_numpy(allowed), -torch.inf), -1)
        wanted = logp.gather(1, torch.from_numpy(answer.ids.astype(np.int64))[:, None])[:, 0].numpy()
        assert np.allclose(answer.logp, wanted, atol=2 * EXACT[case.kind])
    assert sum(answer.finish_reason == "stop" for answer in answers) > len(FORMS)


def test_repetition_of_the_prompt_is_penalised_too_or_refused(case: EngineCase) -> None:
    prompts, penalised = prompts_of(4), SamplingParams(max_tokens=10, seed=4, repetition_penalty=1.7)
    if case.kind == "sglang":
        with pytest.raises(ConfigError, match="`repetition_penalty` is set, and SGLang penalizes"):
            case.answers(prompts, penalised)
        return
    if case.kind == "vllm":
        with pytest.raises(ConfigError, match="vLLM adds the bias before"):
            case.answers(prompts, replace(penalised, logit_bias={9: 1.0}))
    for prompt, answer in zip(prompts, case.answers(prompts, penalised), strict=True):
        whole = np.concatenate([prompt, answer.ids]).astype(np.int64)
        logits = logits_of(case.model, whole)[len(prompt) - 1 : -1].clone()
        for place, row in enumerate(logits):
            seen = torch.from_numpy(np.unique(whole[: len(prompt) + place]))
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.7, row[seen] * 1.7)
        wanted = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(whole[len(prompt) :])[:, None])[:, 0]
        assert np.allclose(answer.logp, wanted.numpy(), atol=2 * EXACT[case.kind])


def test_an_answer_ends_with_an_end_token_after_the_minimum(case: EngineCase) -> None:
    prompts = prompts_of(8)
    greedy = SamplingParams(max_tokens=12, temperature=0)
    free = case.answers(prompts, greedy)
    prompt, answer = next(
        (p, a) for p, a in zip(prompts, free, strict=True) if len(a.ids) == 12 and len(set(a.ids)) > 2
    )
    last = answer.ids.tolist()
    stop = next(token for token in last[1:] if token != last[0])
    (ended,) = case.answers([prompt], replace(greedy, stop_ids=(stop,)))
    assert ended.ids.tolist() == last[: last.index(stop) + 1] and ended.finish_reason == "stop"
    assert ended.text == case.tokenizer.decode(ended.ids[:-1])
    (later,) = case.answers([prompt], replace(greedy, stop_ids=(stop,), min_tokens=last.index(stop) + 2))
    assert len(later.ids) >= last.index(stop) + 2 and later.ids[last.index(stop)] != stop
    assert answer.finish_reason == "length" and answer.text == case.tokenizer.decode(answer.ids)


def test_a_stop_string_ends_it_and_is_not_shown(case: EngineCase) -> None:
    greedy = SamplingParams(max_tokens=14, temperature=0)
    prompts = prompts_of(8)
    texts = [answer.text for answer in case.answers(prompts, greedy)]
    prompt, text = max(zip(prompts, texts, strict=True), key=lambda pair: len(pair[1]))
    (ended,) = case.answers([prompt], replace(greedy, stop=(text[3:5],)))
    assert ended.text == text[: text.index(text[3:5])] and ended.finish_reason == "stop"
    assert case.tokenizer.decode(ended.ids).endswith(text[3:5])


def test_the_likeliest_tokens_are_reported(case: EngineCase) -> None:
    (prompt,) = prompts_of(1)
    (answer,) = case.answers([prompt], SamplingParams(max_tokens=5, seed=3, top_logprobs=3))
    assert answer.top_ids is not None and answer.top_logp is not None and answer.top_ids.shape == (len(answer.ids), 3)
    logp = torch.log_softmax(logits_of(case.model, np.concatenate([prompt, answer.ids]))[len(prompt) - 1 : -1], -1)
    assert np.allclose(answer.top_logp, logp.topk(3).values.numpy(), atol=EXACT[case.kind])
    assert np.allclose(
        logp.gather(1, torch.from_numpy(answer.top_ids.astype(np.int64))).numpy(), answer.top_logp, atol=1e-2
    )


def test_a_request_that_cannot_be_computed_is_refused_and_harms_no_other(case: EngineCase) -> None:
    (prompt,) = prompts_of(1)
    for wrong in (np.array([5, 10**6], np.int32), np.array([-1], np.int32), np.empty(0, np.int32)):
        with pytest.raises(DataError):
            case.answers([wrong], SamplingParams(max_tokens=3))
    room = CONTEXT - (RESERVED_TOKENS if case.kind == "sglang" else 0)
    with pytest.raises(DataError, match=f"context is {room}"):
        case.answers([np.full(room, 5, np.int32)], SamplingParams(max_tokens=3))
    images = PromptImages((ImageSpan("00" * 32, 0, 1),), {"00" * 32: b""})
    with pytest.raises(DataError, match="this model takes text alone"):
        asyncio.run(case.engine.generate(prompt, SamplingParams(max_tokens=3), images=images))
    (answer,) = case.answers([prompt], SamplingParams(max_tokens=3, temperature=0))
    assert len(answer.ids) == 3
    (long,) = case.answers([np.full(room - 2, 5, np.int32)], SamplingParams(max_tokens=9, temperature=0))
    assert len(long.ids) <= 2


def test_a_stream_is_the_same_answer_in_pieces(case: EngineCase) -> None:
    (prompt,) = prompts_of(1)
    sampling = SamplingParams(max_tokens=CONTEXT - 20, temperature=0, logit_bias={1: -100.0})

    async def pieces() -> list[tuple[list[int], str, Completion | None]]:
        stream = case.engine.stream(prompt, sampling)
        return [(delta.ids.tolist(), delta.text, delta.completion) async for delta in stream]

    deltas = asyncio.run(pieces())
    for _ in range(3):  # a server joins tokens that arrived while the client was busy
        deltas = asyncio.run(pieces()) if len(deltas) == 1 else deltas
    whole = deltas[-1][2]
    (direct,) = case.answers([prompt], sampling)
    assert whole is not None and len(deltas) > 1
    assert [id for ids, _, _ in deltas for id in ids] == whole.ids.tolist() == direct.ids.tolist()
    assert "".join(text for _, text, _ in deltas) == whole.text == direct.text


def _tell(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    loop.call_soon_threadsafe(event.set)


@asynccontextmanager
async def long_answers(case: EngineCase, count: int = 3) -> AsyncIterator[list[asyncio.Task[Completion]]]:
    """Start answers that take a while; yield their tasks."""
    sampling = SamplingParams(max_tokens=CONTEXT - 20, temperature=0, logit_bias={1: -100.0})
    started = [asyncio.Event() for _ in range(count)]
    loop = asyncio.get_running_loop()

    async def answer(prompt: Ids, event: asyncio.Event) -> Completion:
        return await case.engine.generate(prompt, sampling, on_start=partial(_tell, loop, event))

    tasks = [asyncio.create_task(answer(*each)) for each in zip(prompts_of(count), started, strict=True)]
    async with asyncio.timeout(60):
        for event in started:
            await event.wait()
    yield tasks
    await asyncio.wait(tasks, timeout=60)


def test_a_wait_that_is_cancelled_ends_the_request_alone(case: EngineCase) -> None:
    async def scenario() -> bool:
        async with long_answers(case) as tasks:
            in_time = tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            for task in tasks[1:]:
                assert len((await task).ids) > 50
            return in_time and tasks[0].cancelled()

    assert any(asyncio.run(scenario()) for _ in range(10)), "it may have ended before"


def test_an_abort_returns_partial_answers(case: EngineCase) -> None:
    async def scenario() -> list[Completion]:
        async with long_answers(case) as tasks:
            await case.engine.abort()
            return [answer for task in tasks if (answer := await task).finish_reason == "abort"]

    cut: list[Completion] = []
    for _ in range(10):  # all may have ended before the abort arrives
        cut = cut or asyncio.run(scenario())
    assert cut and all(len(answer.ids) == len(answer.logp) < CONTEXT - 20 for answer in cut)


def test_paused_requests_wait_and_continue(case: EngineCase) -> None:
    async def scenario() -> int:
        async with long_answers(case) as tasks:
            await case.engine.pause()
            await asyncio.sleep(0.3)  # tokens on the way arrive
            held = [task for task in tasks if not task.done()]
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in held)
            await case.engine.resume()
            for task in tasks:
                assert len((await task).ids) == CONTEXT - 20
            return len(held)

    assert any(asyncio.run(scenario()) for _ in range(10)), "each time all had ended before it was heard"


def test_new_weights_are_used_and_their_version_reported(case: EngineCase) -> None:
    """With the second model's weights it samples like that model, and with the first one's as before."""
    prompts = prompts_of(4)
    case.bring(1, 1)
    assert case.engine.version == 1
    drawn = case.answers(prompts, SamplingParams(max_tokens=10, seed=4))
    for prompt, answer in zip(prompts, drawn, strict=True):
        assert set(answer.version.tolist()) == {1}
        assert np.allclose(answer.logp, logp_under(case.other, prompt, answer), atol=EXACT[case.kind])
        assert not np.allclose(answer.logp, logp_under(case.model, prompt, answer), atol=0.05)
    case.bring(0, 2)
    for prompt, answer in zip(prompts, case.answers(prompts, SamplingParams(max_tokens=10, seed=4)), strict=True):
        assert set(answer.version.tolist()) == {2}
        assert np.allclose(answer.logp, logp_under(case.model, prompt, answer), atol=EXACT[case.kind])


def test_running_requests_continue_with_new_weights_and_each_token_has_its_version(case: EngineCase) -> None:
    async def scenario() -> list[Completion]:
        async with long_answers(case) as tasks:
            await asyncio.to_thread(case.bring, 1, 1)
            return [await task for task in tasks]

    for answer in asyncio.run(scenario()):
        assert len(answer.ids) == CONTEXT - 20
        assert answer.version.tolist() == sorted(answer.version.tolist()) and answer.version[0] == 0
    case.bring(0, 2)


def test_an_engine_reports_its_metrics(case: EngineCase) -> None:
    case.engine.stats()
    case.answers(prompts_of(5), SamplingParams(max_tokens=4, temperature=0, logit_bias={1: -100.0}))
    metrics = case.engine.stats().reduce()
    assert metrics["engine/new_tokens"] == 20 and metrics["engine/finished"] == 5 and metrics["engine/busy_seconds"] > 0


@pytest.mark.parametrize("case", SERVERS, indirect=True)
def test_a_server_reports_its_load(case: EngineCase) -> None:
    assert isinstance(case.engine, ServerPool)

    async def state(server: object) -> tuple[int, str]:
        assert isinstance(case.engine, ServerPool)
        one = case.engine.servers[0]
        figures = await one.backend.get_load(one)
        return figures.running, await one.backend.get_server_version(one)

    ((running, version),) = asyncio.run(case.engine.run_on_all(state))
    assert running == 0 and version.startswith({"vllm": "0.32", "sglang": "0.5.23"}[case.kind])


@pytest.mark.parametrize("case", SERVERS, indirect=True)
def test_a_server_requires_a_key_that_its_log_does_not_show(case: EngineCase) -> None:
    assert isinstance(case.engine, ServerPool)
    address, log = case.engine.servers[0].address, case.engine.replicas[0]._process.log
    log_text = log.read_text(errors="replace")
    assert log_text and len(address.key) == 64 and address.key not in log_text
    assert not list(log.parent.glob("*.yaml"))

    async def strange(path: str) -> None:
        to = HttpClient(address.url)
        try:
            with pytest.raises(EngineError, match="answered 401"):
                await to.post(path, {"input_ids": [5], "token_ids": [5], "sampling_params": {}})
        finally:
            await to.close()

    guarded = {"vllm": ("/inference/v1/generate",), "sglang": ("/generate", "/update_weights_from_disk")}
    for path in guarded[case.kind]:
        asyncio.run(strange(path))


def test_a_closed_engine_refuses_requests(served_models: tuple[Path, Path]) -> None:
    engine = TorchEngine(load(served_models[0], dtype=torch.float32), None, TorchEngineConfig(kv_gib=0.01))
    engine.close()
    with pytest.raises(EtudeError):
        engine.generate_all(prompts_of(1), [SamplingParams(max_tokens=2)])


def test_the_tokens_of_a_prompt_are_scored(case: EngineCase) -> None:
    async def score(prompt: Ids) -> PromptScores:
        return await case.engine.score(prompt, 3)

    for prompt in prompts_of(3):
        scores = asyncio.run(score(prompt))
        plain = logits_of(case.model, prompt)[:-1].log_softmax(-1)
        wanted = plain.gather(1, torch.from_numpy(prompt[1:].astype(np.int64))[:, None])[:, 0].numpy()
        assert np.allclose(scores.logp, wanted, atol=EXACT[case.kind])
        best = plain.topk(3)
        assert np.allclose(scores.top_logp, best.values.numpy(), atol=EXACT[case.kind])
        assert np.array_equal(scores.top_ids[:, 0], best.indices[:, 0].numpy())
    with pytest.raises(DataError, match="token id 10000"):
        asyncio.run(score(np.array([3, 10_000], np.int32)))
    with pytest.raises(DataError, match="this model scores 1 to"):
        asyncio.run(score(np.full(CONTEXT + 1, 3, np.int32)))
