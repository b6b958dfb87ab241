"""The engine as callers use it: parameters, streams, aborts, pauses, weights, errors, metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import ConfigError, DataError, EngineError
from etude.records import Completion, SamplingParams
from etude.rollout import batch_invariance, engine_steps, torch_engine
from etude.rollout.request import Delta
from etude.rollout.torch_engine import TorchEngine, TorchEngineConfig
from tests.rollout.engines import V, during_step, engine_of, logp_under, model_of, prompt_of, same, words
from tests.waits import until

LONG = SamplingParams(max_tokens=1500, seed=1)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a test with a time limit: a hang is a failure."""
    return asyncio.run(asyncio.wait_for(work, 60))


# -- parameters -------------------------------------------------------------------------------------------------------


def test_a_completion_has_the_requested_data() -> None:
    with engine_of() as engine:
        sampling = SamplingParams(max_tokens=7, seed=1, top_logprobs=4, temperature=0.5)
        done = engine.generate_all([prompt_of(20)], [sampling])[0]
    assert (done.ids.shape, done.finish_reason, done.text) == ((7,), "length", "")
    assert done.top_ids is not None and done.top_ids.shape == (7, 4)
    assert done.top_logp is not None and np.all(np.diff(done.top_logp) <= 0)
    assert np.all(done.version == 0)
    at = [list(row).index(token) if token in row else None for row, token in zip(done.top_ids, done.ids, strict=True)]
    for row, place in enumerate(at):
        if place is not None:
            assert done.top_logp[row, place] == pytest.approx(done.logp[row], abs=1e-5)


def test_a_seed_repeats_itself_and_its_absence_does_not() -> None:
    with engine_of() as engine:
        ask = [SamplingParams(max_tokens=12, seed=5)] * 2 + [SamplingParams(max_tokens=12)] * 2
        one, two, three, four = engine.generate_all([prompt_of(9)] * 4, ask)
    assert same(one, two)
    assert three.ids.tolist() != four.ids.tolist()


def test_a_large_vocabulary_is_sampled_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [prompt_of(5 + n) for n in range(40)], [SamplingParams(max_tokens=3, seed=n) for n in range(40)]
    with engine_of() as engine:
        at_once = engine.generate_all(*requests)
        seen, logits = [], engine.model.logits
        monkeypatch.setattr(engine.model, "logits", lambda hidden: seen.append(len(hidden)) or logits(hidden))
        monkeypatch.setattr(batch_invariance, "MAX_LOGITS", 16 * V)
        in_pieces = engine.generate_all(*requests)
    assert len(seen) > 3 and max(seen) <= 16
    assert all(same(one, other) for one, other in zip(at_once, in_pieces, strict=True))


def test_end_tokens_end_it_but_not_before_min_tokens() -> None:
    with engine_of() as engine:
        greedy = engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=30, temperature=0.0)])[0]
        stop = int(greedy.ids[4])
        first = greedy.ids.tolist().index(stop)
        ask = SamplingParams(max_tokens=30, temperature=0.0, stop_ids=(stop,))
        done = engine.generate_all([prompt_of(9)], [ask])[0]
        assert (done.finish_reason, done.ids.tolist()) == ("stop", greedy.ids[: first + 1].tolist())
        ask = SamplingParams(max_tokens=30, min_tokens=20, seed=1, stop_ids=tuple(range(0, V, 2)))
        done = engine.generate_all([prompt_of(9)], [ask])[0]
        assert len(done.ids) > 20 or done.finish_reason == "length"
        assert np.all(done.ids[:20] % 2 == 1)


def test_generation_ends_where_the_context_does() -> None:
    with engine_of(model_of(context=64)) as engine:
        done = engine.generate_all([prompt_of(60)], [SamplingParams(max_tokens=1000)])[0]
    assert (len(done.ids), done.finish_reason) == (4, "length")


def test_text_ends_at_stop_strings_and_the_tokenizers_end(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    model = model_of(vocabulary=tokenizer.vocab_size)
    prompt = tokenizer.encode("What is 2 + 2?")
    with engine_of(model, tokenizer) as engine:
        free = engine.generate_all([prompt], [SamplingParams(max_tokens=60, seed=3)])[0]
        assert free.text == tokenizer.decode([token for token in free.ids if token not in tokenizer.eos_ids])
        stop = free.text[8:11]
        done = engine.generate_all([prompt], [SamplingParams(max_tokens=60, seed=3, stop=(stop, "never"))])[0]
        assert done.finish_reason == "stop"
        assert done.text == free.text[: free.text.index(stop)]
        assert done.ids.tolist() == free.ids[: len(done.ids)].tolist()
        assert stop in tokenizer.decode(done.ids) and stop not in tokenizer.decode(done.ids[:-1])
        late = SamplingParams(max_tokens=60, seed=3, stop=(stop,), min_tokens=len(done.ids) + 3)
        assert len(engine.generate_all([prompt], [late])[0].ids) > len(done.ids)
        ended = SamplingParams(max_tokens=60, seed=3, logit_bias={tokenizer.eos_ids[0]: 100.0})
        done = engine.generate_all([prompt], [ended])[0]
        assert (done.finish_reason, done.ids.tolist(), done.text) == ("stop", [tokenizer.eos_ids[0]], "")


def test_a_stop_string_over_the_end_of_min_tokens_is_found(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    prompt = tokenizer.encode("What is 2 + 2?")
    with engine_of(model_of(vocabulary=tokenizer.vocab_size), tokenizer) as engine:
        asks = SamplingParams(max_tokens=20, seed=3, logit_bias=dict.fromkeys(tokenizer.eos_ids, -float("inf")))
        free = engine.generate_all([prompt], [asks])[0]
        texts = [tokenizer.decode(free.ids[:count]) for count in range(10)]
        stop = texts[7][len(texts[5]) :]  # the text of the sixth and the seventh token
        assert texts[7] == texts[5] + stop and len(stop) == 2 and free.text.index(stop) == len(texts[5])

        def generate(least: int) -> Completion:
            return engine.generate_all([prompt], [replace(asks, stop=(stop,), min_tokens=least)])[0]

        for least in (0, 5, 6):
            done = generate(least)
            assert (done.finish_reason, len(done.ids), done.text) == ("stop", 7, texts[5])
        assert same(generate(7), free)  # it ended within them


# -- streams and aborts -----------------------------------------------------------------------------------------------


def test_a_stream_is_the_completion_in_pieces(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    prompt = tokenizer.encode("The weather in Paris")
    with engine_of(model_of(vocabulary=tokenizer.vocab_size), tokenizer) as engine:
        plain = engine.generate_all([prompt], [SamplingParams(max_tokens=40, seed=2)])[0]
        for stop in ((), (plain.text[10:13],)):
            sampling = SamplingParams(max_tokens=40, seed=2, stop=stop)
            whole = engine.generate_all([prompt], [sampling])[0]

            async def collected(sampling: SamplingParams = sampling) -> list[Delta]:
                return [delta async for delta in engine.stream(prompt, sampling)]

            deltas = run(collected())
            assert np.array_equal(np.concatenate([delta.ids for delta in deltas]), whole.ids)
            assert np.array_equal(np.concatenate([delta.logp for delta in deltas]), whole.logp)
            assert "".join(delta.text for delta in deltas) == whole.text
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert (
                len(deltas) > 5
                and deltas[-1].finish_reason == whole.finish_reason
                and same(deltas[-1].completion, whole)
            )


def test_cancelling_a_wait_or_leaving_a_stream_frees_the_request() -> None:
    with engine_of(kv_gib=0.05) as engine:

        async def main() -> None:
            task = asyncio.create_task(engine.generate(prompt_of(5), LONG))
            stream = engine.stream(prompt_of(6), LONG)
            await anext(stream)
            await until(lambda: engine.stats().reduce()["engine/running"] == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stream.aclose()

        run(main())
        left = engine.stats().reduce()
        assert (left["engine/running"], left["engine/waiting"]) == (0, 0)
        assert engine.generate_all([prompt_of(5)], [SamplingParams(max_tokens=3)])[0].finish_reason == "length"


def test_abort_returns_partial_answers() -> None:
    with engine_of(max_num_seqs=1) as engine:

        async def main() -> list[Completion]:
            tasks = [asyncio.create_task(engine.generate(prompt_of(5, seed), LONG)) for seed in range(2)]
            await during_step(engine, 3, engine.abort())
            return list(await asyncio.gather(*tasks))

        running, waiting = run(main())
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert len(running.ids) > 0 and len(waiting.ids) == 0


def test_coroutines_on_several_loops_and_threads_share_one_engine() -> None:
    completions: dict[int, Completion] = {}
    with engine_of() as engine:

        def one(row: int) -> None:
            completions[row] = run(engine.generate(prompt_of(5 + row), SamplingParams(max_tokens=20, seed=row)))

        threads = [threading.Thread(target=one, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for row in range(4):
            alone = engine.generate_all([prompt_of(5 + row)], [SamplingParams(max_tokens=20, seed=row)])[0]
            assert same(completions[row], alone)


# -- pausing, sleeping, weights ---------------------------------------------------------------------------------------


def test_pause_stops_between_two_tokens_and_resume_goes_on() -> None:
    sampling = SamplingParams(max_tokens=300, seed=3)
    with engine_of() as engine:
        whole = engine.generate_all([prompt_of(8)], [sampling])[0]

        async def main() -> Completion:
            task = asyncio.create_task(engine.generate(prompt_of(8), sampling))
            await during_step(engine, 3, engine.pause())
            engine.stats()
            await asyncio.sleep(0.05)
            assert engine.stats().reduce()["engine/new_tokens"] == 0 and not task.done()
            await engine.resume()
            return await task

        assert same(run(main()), whole)


def test_sleep_frees_the_memory_and_wake_allocates_it_again() -> None:
    with engine_of(kv_gib=0.05) as engine:
        before = engine.generate_all([prompt_of(40)], [SamplingParams(max_tokens=5, seed=1)])[0]

        async def busy() -> None:
            task = asyncio.create_task(engine.generate(prompt_of(5), LONG))
            with pytest.raises(EngineError, match="cannot sleep while 1 requests are under way"):
                await during_step(engine, 3, engine.sleep())
            task.cancel()

        run(busy())
        run(engine.sleep())
        with pytest.raises(EngineError, match="asleep: call wake"):
            engine.generate_all([prompt_of(40)], [SamplingParams(max_tokens=5)])
        run(engine.wake())
        assert same(engine.generate_all([prompt_of(40)], [SamplingParams(max_tokens=5, seed=1)])[0], before)


def test_unused_memory_is_returned_after_sleep_and_before_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server or the trainer gets what the cache took, and the cache finds room in one piece."""
    with engine_of(kv_gib=0.05) as engine:
        seen: list[tuple[str, bool]] = []
        monkeypatch.setattr(
            engine_steps, "return_unused_memory", lambda d: seen.append((d.type, engine._steps.cache is None))
        )
        run(engine.sleep())
        run(engine.wake())
        assert seen == [("cpu", True)] * 2


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="this processor does not multiply bfloat16 itself"
)
def test_prepacked_weights_follow_sleep_and_new_weights() -> None:
    """Its answers are those of weights that are not prepacked. Asleep it holds none, and awake it packs the new
    ones."""
    model, other = (model_of(seed=seed).copy(dtype=torch.bfloat16) for seed in (0, 1))
    requests = [prompt_of(40)], [SamplingParams(max_tokens=20, seed=1)]
    with engine_of(model) as engine, engine_of(other, prepack=False) as plain:
        layout = engine._resident._prepacked
        assert layout is not None and layout._packed and plain._resident._prepacked is None
        run(engine.sleep())
        assert not layout._packed
        run(engine.update_weights(other.named_weights(), 1))
        assert not layout._packed, "asleep it takes no memory"
        run(engine.wake())
        assert layout._packed
        assert engine.generate_all(*requests)[0].ids.tolist() == plain.generate_all(*requests)[0].ids.tolist()


def test_new_weights_apply_to_running_requests_and_new_requests_read_no_old_keys() -> None:
    model, other = model_of(seed=0), model_of(seed=1)
    prompt, sampling = prompt_of(40), SamplingParams(max_tokens=200, seed=1)
    with engine_of(model) as engine, engine_of(other) as reference:
        expected = reference.generate_all([prompt], [sampling])[0]

        async def main() -> tuple[Completion, Completion]:
            task = asyncio.create_task(engine.generate(prompt, sampling))
            await during_step(engine, 3, engine.update_weights(other.named_weights(), 7))
            fresh = await engine.generate(prompt, sampling)
            return await task, fresh

        old, fresh = run(main())
        assert set(old.version.tolist()) == {0, 7} and np.all(np.diff(old.version) >= 0)
        assert np.all(fresh.version == 7) and engine.version == 7
        assert np.array_equal(fresh.ids, expected.ids) and np.array_equal(fresh.logp, expected.logp)
        # requests with the same beginning do not find the tokens that the old request gained
        follow = np.concatenate([prompt, old.ids[:100]])
        again = engine.generate_all([follow], [sampling])[0]
        assert np.allclose(again.raw_logp, logp_under(other, follow, again), atol=2e-4)


def test_a_block_that_began_under_old_weights_is_never_found_again() -> None:
    """The first block of the context is full only after the change, and the keys at its beginning are the old ones."""
    model, other = model_of(seed=0), model_of(seed=7)
    prompt = prompt_of(5)
    with engine_of(model, block_size=256, kv_gib=0.05) as engine:

        async def main() -> Completion:
            task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=260, seed=1)))
            await during_step(engine, 3, engine.update_weights(other.named_weights(), 1))
            return await task

        old = run(main())
        assert 0 < int((old.version == 0).sum()) < 250
        follow = np.concatenate([prompt, old.ids])
        engine.stats()
        done = engine.generate_all([follow], [SamplingParams(max_tokens=4, seed=2)])[0]
        assert engine.stats().reduce()["engine/cache_hit_rate"] == 0
        assert np.allclose(done.raw_logp, logp_under(other, follow, done), atol=2e-4)


def test_weights_that_are_shared_need_no_copy() -> None:
    model, other = model_of(seed=0), model_of(seed=1)
    with engine_of(model) as engine:
        engine.generate_all([prompt_of(40)], [SamplingParams(max_tokens=2)])
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)
        run(engine.update_weights((), 1))
        done = engine.generate_all([prompt_of(40)], [SamplingParams(max_tokens=8, seed=1)])[0]
        assert np.all(done.version == 1)
        assert np.allclose(done.raw_logp, logp_under(other, prompt_of(40), done), atol=2e-4)


def test_a_weight_change_that_fails_half_way_puts_the_engine_out_of_service() -> None:
    model, other = model_of(seed=0), model_of(seed=1)
    with engine_of(model) as engine:
        before = engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=4, seed=1)])[0]
        with pytest.raises(EngineError, match=r"The weight nonsense \[2\] was sent"):
            run(engine.update_weights([("nonsense", torch.zeros(2))], 1))
        assert same(engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=4, seed=1)])[0], before)
        weights = list(other.named_weights())
        with pytest.raises(EngineError, match="weights were not sent"):
            run(engine.update_weights(weights[:3], 1))
        with pytest.raises(EngineError, match="publish again"):
            engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=4)])
        assert engine.version == 0
        run(engine.update_weights(weights, 1))
        assert engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=4)])[0].version[0] == 1


# -- errors -----------------------------------------------------------------------------------------------------------


def test_impossible_requests_are_refused_at_once() -> None:
    with engine_of(model_of(context=128), blocks=5) as engine:

        def refused(prompt: Any, **parameters: Any) -> str:
            with pytest.raises((DataError, ConfigError)) as error:
                engine.generate_all([np.array(prompt, dtype=np.int32)], [SamplingParams(**parameters)])
            return str(error.value)

        assert "prompt is empty" in refused([])
        assert f"token id {V}; the model knows 0 to {V - 1}" in refused([V])
        assert "context is 128" in refused(prompt_of(128))
        assert "holds 80 tokens. Raise the engine's kv_gib" in refused(prompt_of(60), max_tokens=30)
        assert "give stop_ids instead" in refused([1], stop=("x",), max_tokens=5)
        assert "logit_bias has the token id -1" in refused([1], logit_bias={-1: 1.0}, max_tokens=5)
        assert engine.generate_all([prompt_of(60)], [SamplingParams(max_tokens=20)])[0].finish_reason == "length"


def test_a_cache_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not hold one block"):
        TorchEngine(model_of(), None, TorchEngineConfig(kv_gib=1e-9))


def test_diverged_weights_fail_all_requests_and_leave_nothing_behind() -> None:
    model = model_of()
    good = [(name, weight.detach().clone()) for name, weight in model.named_weights()]
    with engine_of(model, kv_gib=0.001) as engine:
        before = engine.generate_all([prompt_of(50)], [SamplingParams(max_tokens=9, seed=1)])[0]
        run(engine.update_weights([(name, torch.full_like(weight, torch.nan)) for name, weight in good], 1))

        async def main() -> list[Any]:
            requests = [engine.generate(prompt_of(50, seed), SamplingParams(max_tokens=9)) for seed in range(3)]
            return list(await asyncio.gather(*requests, return_exceptions=True))

        for error in run(main()):
            assert isinstance(error, EngineError) and "not numbers" in str(error)
        run(engine.update_weights(good, 2))
        after = engine.generate_all([prompt_of(50)], [SamplingParams(max_tokens=9, seed=1)])[0]
        assert same(before, after)


def test_a_request_that_may_draw_nothing_fails_alone() -> None:
    nothing = dict.fromkeys(range(V), -float("inf"))
    wrong = [{"logit_bias": nothing}, {"logit_bias": nothing, "temperature": 0.0}, {"temperature": 1e-40}]
    with engine_of() as engine:

        async def main() -> list[Any]:
            requests = [
                engine.generate(prompt_of(5), SamplingParams(max_tokens=9, **parameters)) for parameters in (*wrong, {})
            ]
            return list(await asyncio.gather(*requests, return_exceptions=True))

        *failed, fine = run(main())
        assert all(isinstance(error, DataError) and "no token to draw" in str(error) for error in failed)
        assert len(fine.ids) == 9


def test_a_failed_decoding_ends_one_request_alone(tmp_path: Path) -> None:
    tokenizer = words(tmp_path)
    prompt, decode, calls = tokenizer.encode("What is 2 + 2?"), tokenizer.decode, []

    def stumbles(ids: Any, special: bool = False) -> str:
        calls.append(ids)
        if len(calls) == 1:
            raise UnicodeError("a tokenizer that stumbles once")
        return decode(ids, special)

    with engine_of(model_of(vocabulary=tokenizer.vocab_size), tokenizer, kv_gib=0.05) as engine:

        async def main(aborts: bool) -> list[Any]:
            calls.clear()
            ends = SamplingParams(max_tokens=1500 if aborts else 3, seed=1)
            rest = SamplingParams(max_tokens=1500 if aborts else 9, seed=1)
            tasks = [asyncio.create_task(engine.generate(prompt, sampling)) for sampling in (ends, rest)]
            if aborts:
                await during_step(engine, 3, engine.abort())
            return await asyncio.gather(*tasks, return_exceptions=True)

        tokenizer.decode = stumbles  # type: ignore[method-assign]
        for aborts in (False, True):
            failed, fine = run(main(aborts))
            assert isinstance(failed, UnicodeError) and isinstance(fine, Completion)
        left = engine.stats().reduce()
        assert (left["engine/running"], left["engine/waiting"]) == (0, 0)


def test_an_engine_that_cannot_recover_fails_all_requests_and_refuses_the_next() -> None:
    def lost(*arguments: Any) -> Any:
        raise RuntimeError("the device is lost")

    with engine_of() as engine:
        engine.model.hidden = engine._steps.recover = lost  # type: ignore[method-assign]

        async def main() -> list[Any]:
            requests = [engine.generate(prompt_of(5), SamplingParams(max_tokens=3)) for _ in range(2)]
            results = await asyncio.gather(*requests, return_exceptions=True)
            engine._thread.join(10)
            requests = [
                engine.generate(prompt_of(5), SamplingParams(max_tokens=3)),
                engine.pause(),
                engine.update_weights((), 1),
            ]
            return [*results, *await asyncio.gather(*requests, return_exceptions=True)]

        assert all(isinstance(error, EngineError) and "device is lost" in str(error) for error in run(main()))
        with pytest.raises(EngineError, match=r"has stopped: .*device is lost"):
            engine.stats()


def test_running_out_of_memory_names_the_options_and_the_engine_continues() -> None:
    """The allocator really refuses. The scores of one long prompt under an address-space limit would be flaky, so the
    model is asked for logits in a vocabulary of petabytes."""
    model = model_of()
    with engine_of(model) as engine:
        whole, model.logits = model.logits, lambda hidden: torch.empty(1 << 50)  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"Lower kv_gib \(now 0.01\), max_num_batched_tokens .* or max_num_seqs"):
            engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=4)])
        model.logits = whole  # type: ignore[method-assign]
        assert len(engine.generate_all([prompt_of(9)], [SamplingParams(max_tokens=4)])[0].ids) == 4


def test_close_is_bounded_and_fails_waiting_requests() -> None:
    with engine_of() as engine:

        async def main() -> None:
            task = asyncio.create_task(engine.generate(prompt_of(5), LONG))
            await until(lambda: engine.stats().reduce()["engine/running"])
            began = time.perf_counter()
            engine.close()
            assert time.perf_counter() - began < 20
            with pytest.raises(EngineError, match="closed while this request was under way"):
                await task

        run(main())
        with pytest.raises(EngineError, match="engine is closed"):
            engine.generate_all([prompt_of(5)], [SamplingParams(max_tokens=3)])


def test_a_step_that_outlasts_the_close_is_reported_and_hides_no_other_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_engine, "CLOSE_TIMEOUT", 0.02)
    model, started, go_on = model_of(), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        started.set()
        go_on.wait(30)
        raise RuntimeError("enough")

    model.hidden = slow  # type: ignore[method-assign]
    engine = TorchEngine(model, None, TorchEngineConfig(kv_gib=0.01))
    asker = threading.Thread(target=lambda: suppressed(engine))
    asker.start()
    assert started.wait(30)
    with pytest.raises(EngineError, match=r"still computing a step 0.02 s after"):
        engine.close()
    with caplog.at_level("WARNING", "etude"), pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
    assert "still computing a step" in caplog.text
    go_on.set()
    asker.join(30)
    engine.close()


def suppressed(engine: TorchEngine) -> None:
    with suppress(EngineError):
        engine.generate_all([prompt_of(5)], [SamplingParams(max_tokens=3)])


# -- the prefix cache -------------------------------------------------------------------------------------------------


def test_a_group_computes_its_prompt_once_in_the_step_it_arrives() -> None:
    for length in (16, 37, 100):
        with engine_of() as engine:
            parameters = [SamplingParams(max_tokens=6, seed=seed) for seed in range(8)]
            group = engine.generate_all([prompt_of(length)] * 8, parameters)
            seen = engine.stats().reduce()
            assert seen["engine/cache_hit_rate"] == pytest.approx(7 / 8)
            assert seen["engine/steps"] == 6
            run(engine.update_weights((), 0))
            for one, sampling in zip(group, parameters, strict=True):
                assert same(one, engine.generate_all([prompt_of(length)], [sampling])[0])
                run(engine.update_weights((), 0))


def test_the_next_turn_finds_the_earlier_ones_in_the_cache() -> None:
    with engine_of() as engine:
        prompt = prompt_of(50)
        first = engine.generate_all([prompt], [SamplingParams(max_tokens=30, seed=1)])[0]
        engine.stats()
        longer = np.concatenate([prompt, first.ids, prompt_of(5, 9)])
        second = engine.generate_all([longer], [SamplingParams(max_tokens=5, seed=2)])[0]
        assert engine.stats().reduce()["engine/cache_hit_rate"] == pytest.approx(64 / 85)
        assert np.allclose(second.raw_logp, logp_under(engine.model, longer, second), atol=2e-4)


def test_the_metrics_add_up_and_are_reset() -> None:
    with engine_of() as engine:
        engine.generate_all([prompt_of(10)] * 3, [SamplingParams(max_tokens=4)] * 3)
        metrics = engine.stats().reduce()
        assert (metrics["engine/new_tokens"], metrics["engine/finished"], metrics["engine/prompt_tokens"]) == (
            12,
            3,
            30,
        )
        assert metrics["engine/running"] == metrics["engine/waiting"] == metrics["engine/preemptions"] == 0
        assert 0 < metrics["engine/cache_used"] < 1 and metrics["engine/busy_seconds"] > 0
        assert engine.stats().reduce()["engine/new_tokens"] == 0
