"""The embedded engine records the experts of each token beside its keys and values, for a trainer to replay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.batch import Pack
from etude.data.samples import build_samples
from etude.errors import DataError
from etude.models import Model, PackedAttention
from etude.models.experts import is_experts
from etude.models.routes import Routes, use_routes
from etude.records import Completion, SamplingParams, Turn
from tests.families import family_model
from tests.rollout.engines import during_step, engine_of

Ids = NDArray[np.int32]
PROMPT = np.arange(20, dtype=np.int32)
SHORT = PROMPT[:9]


def sampling(tokens: int = 12, seed: int = 0, start: int | None = 0) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, routes_start=start)


def trainer_pass(model: Model, ids: Ids, given: NDArray[Any] | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts [T, L · k] of a row in the trainer, and the log-prob of each token after the first."""
    pack = Pack(
        ids=torch.from_numpy(ids.copy()),
        positions=torch.arange(len(ids)),
        offsets=torch.tensor([0, len(ids)]),
        parent=torch.tensor([-1]),
        source=torch.arange(-1, len(ids) - 1),
    )
    shape = model.control_routers("train.router_replay=r3")
    routes = Routes(shape, None if given is None else torch.from_numpy(given))
    with torch.no_grad(), use_routes(routes):
        hidden = model.hidden(pack.ids, pack.positions, PackedAttention(pack))
        logp = model.logits(hidden[:-1]).log_softmax(-1)
    return routes.recorded(), logp.gather(1, pack.ids[1:, None].long())[:, 0]


def row(prompt: Ids, completion: Completion) -> Ids:
    return np.concatenate([prompt, completion.ids])


def recorded(completion: Completion) -> Tensor:
    """Return the experts [N, L · k] of an answer and its prompt, each mixture's in ascending order."""
    assert completion.routes is not None
    return torch.from_numpy(np.sort(completion.routes.experts, -1).reshape(len(completion.routes.experts), -1))


def in_order(routes: Tensor, k: int = 2) -> Tensor:
    return routes.view(len(routes), -1, k).sort(-1).values.view(len(routes), -1)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
def test_recorded_experts_are_the_trainers_also_in_shared_blocks_and_after_preemptions(name: str) -> None:
    """Six requests share the blocks of two prompts, and memory for three makes them wait."""
    model = family_model(name)
    prompts = [PROMPT] * 4 + [SHORT] * 2
    with engine_of(model, blocks=12, block_size=4, max_num_seqs=6, records_routes=True) as engine:
        done = engine.generate_all(prompts, [sampling(12, seed) for seed in range(6)])
        again = engine.generate_all([PROMPT], [sampling()])
        metrics = engine.stats().reduce()
    assert metrics["engine/preemptions"] and metrics["engine/cache_hit_rate"]
    for prompt, completion in zip([*prompts, PROMPT], [*done, *again], strict=True):
        ids = row(prompt, completion)
        expected, _ = trainer_pass(model, ids)
        assert torch.equal(recorded(completion), in_order(expected[:-1]))


def test_with_kept_keys_a_token_has_the_experts_of_the_weights_that_computed_it() -> None:
    model = family_model("qwen3_moe")
    first, _ = trainer_pass(model, PROMPT)

    async def change(engine: Any) -> Completion:
        answer = asyncio.create_task(engine.generate(PROMPT, sampling()))
        weights = [(name, weight + 0.3 * torch.randn_like(weight)) for name, weight in model.named_weights()]
        await during_step(engine, 3, engine.update_weights(weights, 1))
        return await answer

    with engine_of(model, records_routes=True, kv="keep") as engine:
        completion = asyncio.run(change(engine))
    assert set(completion.version.tolist()) == {0, 1}
    later, _ = trainer_pass(model, row(PROMPT, completion))
    assert torch.equal(recorded(completion)[: len(PROMPT)], in_order(first))
    assert not torch.equal(in_order(later)[: len(PROMPT)], in_order(first))


def test_a_later_turn_has_the_experts_of_new_tokens_alone_and_the_row_those_of_all() -> None:
    model = family_model("qwen3_moe")
    with engine_of(model, records_routes=True) as engine:
        (first,) = engine.generate_all([SHORT], [sampling(5)])
        prompt = np.concatenate([row(SHORT, first), PROMPT[:3]])
        (second,) = engine.generate_all([prompt], [sampling(4, start=len(SHORT) + len(first.ids) - 1)])
    assert second.routes is not None and len(second.routes.experts) == 1 + 3 + len(second.ids) - 1
    (sample,) = build_samples([Turn(SHORT, first, 0), Turn(prompt, second, 1)], 0)
    assert sample.routes is not None
    expected, _ = trainer_pass(model, sample.ids)
    assert torch.equal(in_order(torch.from_numpy(sample.routes.copy()))[:-1], in_order(expected[:-1]))
    assert set(sample.routes[-1].tolist()) == {255}


def test_an_engine_without_records_refuses_to_report_them() -> None:
    with engine_of(family_model("qwen3_moe")) as engine:
        assert engine.generate_all([SHORT], [sampling(2, start=None)])[0].routes is None
        with pytest.raises(
            DataError,
            match=r"`routes_start`.* does not record them. An embedded engine does if .* `records_routes=True`",
        ):
            engine.generate_all([SHORT], [sampling(2)])


@contextmanager
def noisy_routers(model: Model, scale: float) -> Iterator[None]:
    """Let routers see rounded hidden states, as those of another engine's kernels are."""
    generator = torch.Generator().manual_seed(0)

    def add_noise(_router: Any, inputs: Sequence[Any]) -> Any:
        return inputs[0] * (1 + scale * torch.randn(inputs[0].shape, generator=generator)), *inputs[1:]

    blocks = [block for block in model.module.modules() if any(map(is_experts, block.children()))]
    hooks = [(getattr(block, "gate", None) or block.router).register_forward_pre_hook(add_noise) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gaps(model: Model, prompts: Sequence[Ids], completions: Sequence[Completion], *, replay: bool) -> NDArray[Any]:
    """Return the differences of the trainer's log-probs of the answers from the sampler's."""
    found = []
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.routes is not None
        ids = row(prompt, completion)
        given = completion.routes.spread(len(ids)) if replay else None
        _, logp = trainer_pass(model, ids, given)
        found.append(np.abs(logp[len(prompt) - 1 :].numpy() - completion.logp))
    return np.concatenate(found)


def test_replayed_experts_close_most_of_the_gap_that_noise_in_routers_opens() -> None:
    model = family_model("qwen3_moe")
    prompts = [PROMPT] * 4 + [SHORT] * 2
    with engine_of(model, records_routes=True) as engine, noisy_routers(model, 0.01):
        done = engine.generate_all(prompts, [sampling(30, seed) for seed in range(6)])
    without, replayed = (gaps(model, prompts, done, replay=replay) for replay in (False, True))
    assert replayed.max() < without.max() / 4 and replayed.mean() < without.mean() / 2
