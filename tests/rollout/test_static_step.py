"""A static decode step computes what a step over today's work does, and nothing in it waits for the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from etude.models import Model, StepRows, TorchStepOps, create, tiny_config
from etude.records import SamplingParams
from etude.rollout.batch_invariance import UNPADDED_SHAPES
from etude.rollout.block_pool import BlockPool
from etude.rollout.request import Request
from etude.rollout.sampling import sample_tokens
from etude.rollout.scheduler import Scheduler
from etude.rollout.slot_state import NewBlock, SlotState
from etude.rollout.static_step import StaticStep, StepKey, supports_static
from etude.rollout.step_batch import EngineCaches, StepBatch
from tests.rollout.dispatched import Counting, NoWaiting
from tests.rollout.engines import V, model_of, prompt_of

SIZE = 4
BLOCKS = 40
SLOTS = 5
WINDOWED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {},
}
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20, "logit_bias": {3: 1.0}},
    {"repetition_penalty": 1.5, "min_tokens": 4, "stop_ids": (1, 2)},
    {"temperature": 0},
]


class Stepper:
    """Requests that are computed step by step: by work of a scheduler, and by static steps over the same cache."""

    def __init__(self, model: Model, kinds: list[dict[str, Any]], prompts: tuple[int, ...] = (3, 9, 16, 21)) -> None:
        self.model = model
        self.scheduler = Scheduler(
            BlockPool(BLOCKS, SIZE), max_num_seqs=SLOTS, max_num_batched_tokens=256, max_total_tokens=BLOCKS * SIZE
        )
        self.caches = EngineCaches(model, blocks=BLOCKS + 1, size=SIZE, max_num_seqs=SLOTS)
        self.state = SlotState(model, slots=SLOTS, max_blocks=BLOCKS, scratch_block=BLOCKS)
        self.static = StaticStep(model, self.caches.kv[0], self.state)
        self.requests = [
            Request(
                prompt_of(length, seed=length, vocabulary=model.vocab_size),
                SamplingParams(max_tokens=30, seed=row, **kinds[row % len(kinds)]),
                limit=200,
                vocab_size=model.vocab_size,
                tokenizer=None,
            )
            for row, length in enumerate(prompts)
        ]
        for request in self.requests:
            self.scheduler.add(request)

    def step(self) -> Tensor:
        """Compute a step of the scheduler's work, append its tokens, and return its logits."""
        works = self.scheduler.schedule()
        batch = StepBatch(self.caches, works, self.scheduler.table, UNPADDED_SHAPES)
        logits = self.model.logits(self.model.hidden(batch.ids, batch.positions, batch)[batch.last_rows])
        self.scheduler.advance(works)
        states = [request.sampling_state for request in self.requests]
        generated = [request.generated for request in self.requests]
        self.drawn = sample_tokens(logits, states, generated, [request.length for request in self.requests])
        for request, drawn in zip(self.requests, self.drawn.tokens(), strict=True):
            request.append_token(drawn, 0)
        return logits

    def key(self, *, filtered: bool = True) -> StepKey:
        return StepKey(rows=SLOTS, blocks=16, filtered=filtered)

    def join(self) -> None:
        self.state.join(self.requests)
        self.state.set_rows([request.slot for request in self.requests], SLOTS)

    def grow(self) -> None:
        """Give each request the block of its newest token, as the next step of the scheduler would."""
        new_blocks = []
        for request in self.requests:
            before = len(request.blocks)
            assert self.scheduler.grow(request, request.length)
            new_blocks += [NewBlock(request.slot, at, request.blocks[at]) for at in range(before, len(request.blocks))]
        if new_blocks:
            self.state.grow(new_blocks)

    def static_logits(self) -> Tensor:
        """Return the logits of a static step, without its draws."""
        slots = self.state.row_slots
        rows = StepRows(slots, self.state.length[slots] - 1, blocks=16)
        layers = self.model.own_layers
        assert layers is not None
        hidden = layers.decode(self.state.last[slots], TorchStepOps(self.static.memory, rows))
        return self.model.logits(hidden)[: len(self.requests)]


@pytest.mark.parametrize("gathered", [1 << 24, 1], ids=["together", "row by row"])
@pytest.mark.parametrize("family", WINDOWED)
@torch.inference_mode()
def test_it_computes_the_logits_and_draws_the_tokens_of_other_steps(family: str, gathered: int) -> None:
    """Contexts pass several ends of blocks, and rows of all kinds are drawn together, beside one without a request."""
    stepper = Stepper(model_of(family, **WINDOWED[family]), KINDS)
    stepper.static.memory = replace(stepper.static.memory, fetch_bytes=gathered)
    stepper.step()
    stepper.join()
    for _ in range(7):
        stepper.grow()
        logits = stepper.static_logits()
        stepper.static.compute(stepper.key())
        torch.testing.assert_close(logits, stepper.step(), atol=1e-4, rtol=1e-4)
        ids, probability, raw_logp = stepper.static.results[:, : len(stepper.requests)]
        assert ids.tolist() == stepper.drawn.ids
        torch.testing.assert_close(probability.log().float(), torch.tensor(stepper.drawn.logp), atol=1e-4, rtol=0)
        torch.testing.assert_close(raw_logp.float(), torch.tensor(stepper.drawn.raw_logp), atol=1e-4, rtol=0)
    for request in stepper.requests:
        assert int(stepper.state.length[request.slot]) == request.length
        assert int(stepper.state.last[request.slot]) == request.tokens[request.length - 1]
    assert int(stepper.state.length[SLOTS]) == 1, "rows without a request stay at their first token"


@torch.inference_mode()
def test_a_request_that_joins_brings_its_whole_state() -> None:
    """A slot's last owner, with other parameters, leaves nothing to the next one."""
    stepper = Stepper(model_of(), KINDS, prompts=(9, 9, 9, 9))
    stepper.step()
    stepper.join()
    stepper.static.compute(stepper.key())
    successor = Stepper(stepper.model, KINDS[1:] + KINDS[:1], prompts=(7, 8, 9, 10))
    successor.state = stepper.state
    successor.static = StaticStep(stepper.model, successor.caches.kv[0], stepper.state)
    successor.step()
    successor.join()
    successor.grow()
    successor.static.compute(successor.key())
    successor.step()
    assert successor.static.results[0, :4].tolist() == successor.drawn.ids


@pytest.mark.parametrize("filtered", [False, True])
@torch.inference_mode()
def test_nothing_waits_for_the_device(filtered: bool) -> None:
    """No operation reads a value, and none has a shape that depends on one, which fake tensors do not have."""
    stepper = Stepper(model_of("mistral", sliding_window=6), KINDS)
    stepper.step()
    stepper.join()
    with NoWaiting():
        stepper.static.compute(stepper.key(filtered=filtered))
    with FakeTensorMode(allow_non_fake_inputs=True):
        stepper.static.compute(stepper.key(filtered=filtered))


def count_operations(layers: int) -> int:
    """Return the operations of an unfiltered step in bfloat16."""
    config = tiny_config(V, layers=layers)
    stepper = Stepper(create(config, seed=0, dtype=torch.bfloat16), [{}])
    stepper.step()
    stepper.join()
    with Counting() as counted:
        stepper.static.compute(stepper.key(filtered=False))
    return len(counted.names)


@torch.inference_mode()
def test_a_layer_takes_few_operations() -> None:
    """A GPU runs each of them as a kernel. The steps of `ForwardBatch` take about 60 a layer."""
    few = count_operations(2)
    more = count_operations(4)
    assert (more - few) / 2 <= 26
    assert few - (more - few) <= 150, "those for the draw, half of them for the random numbers"


def test_the_reason_why_a_model_has_no_static_steps_is_known() -> None:
    assert supports_static(model_of()) is None
    assert supports_static(model_of("gemma3")) == "a gemma3_text model runs transformers' own layers"
