"""The engine steps of a dry run: one that reads prompts, and one with every request at the end of its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.models import Model
from etude.records import SamplingParams
from etude.rollout import TorchEngineConfig
from etude.rollout.batch_invariance import ProductShapes, max_context_padding
from etude.rollout.block_pool import BlockPool, KeptStates
from etude.rollout.kv_cache import AttentionBatch, ForwardBatch, KVCache, count_slots
from etude.rollout.request import Request
from etude.rollout.sampling import DrawnToken, sample_tokens
from etude.rollout.scheduler import ScheduledWork, Scheduler
from etude.rollout.step_batch import EngineCaches, StepBatch
from etude.tools.plan.worst_images import WorstImages, pass_images


def engine_steps(
    engine: TorchEngineConfig,
    model: Model,
    params: SamplingParams,
    blocks: int,
    max_concurrency: int,
    max_length: int,
) -> Iterator[tuple[list[ScheduledWork], Any]]:
    """Iterate over the scheduled work of two engine steps: one reads prompts, one ends every answer."""
    max_length = min(max_length, blocks * engine.block_size, model.context_length)
    for is_prefill, token_budget in ((True, engine.max_num_batched_tokens), (False, max_concurrency * max_length)):
        kept = KeptStates(range(engine.max_num_seqs, count_slots(engine.max_num_seqs)))
        scheduler = Scheduler(
            BlockPool(blocks, engine.block_size, kept),
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=token_budget,
            max_total_tokens=max_length + max_context_padding(engine.block_size),
            has_states=model.state_bytes > 0,
        )
        generator = np.random.default_rng(0)
        length = max_length - 1 if is_prefill else max(max_length - 2, 1)
        for _ in range(max_concurrency):
            prompt = generator.integers(0, model.vocab_size, length).astype(np.int32)
            scheduler.add(Request(prompt, params, limit=max_length, vocab_size=model.vocab_size, tokenizer=None))
        scheduled = scheduler.schedule()
        if not is_prefill:  # the next step computes a drawn token of each request
            scheduler.advance(scheduled)
            for work in scheduled:
                work.request.append_token(DrawnToken(0, 0.0, 0.0, None, None, None), 0)
            scheduled = scheduler.schedule()
        yield scheduled, scheduler.table


class _DistinctGroups(ForwardBatch):
    """A forward pass of the engine that attends once for groups of equal shape in a row, and once more.

    The result of a group lives until that of the next one, so two of them have the peak of all.
    """

    def __init__(
        self, cache: KVCache, works: Sequence[ScheduledWork], table: NDArray[np.int64], shapes: ProductShapes
    ) -> None:
        super().__init__(cache, works, table, shapes)
        kept = list[AttentionBatch]()
        seen = set[object]()
        before = None
        self._repeated = list[AttentionBatch]()
        for group in self._batches:
            key = (group.shape, isinstance(group.rows, slice), group.real_rows is None or len(group.real_rows))
            (self._repeated if (before, key) in seen else kept).append(group)
            seen.add((before, key))
            before = key
        self._batches = kept

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend for the groups that were kept; all groups have a mask."""
        for group in self._repeated:
            group.mask(window)
        return super().__call__(layer, q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)


def run_engine_step(
    model: Model,
    caches: EngineCaches,
    scheduled: list[ScheduledWork],
    table: Any,
    shapes: ProductShapes,
    *,
    real: bool,
    images: WorstImages | None = None,
) -> None:
    """Run one step as the engine does.

    real: with real tensors, and so with every attention group. images: those that the tokens of prompts are of.
    """
    reads_prompts = any(not work.request.generated for work in scheduled)
    run = StepBatch(caches, scheduled, table, shapes, ForwardBatch if real else _DistinctGroups)
    shown = pass_images(model, images, len(run.ids)) if images is not None and reads_prompts else None
    hidden = model.hidden(run.ids, run.positions, run, shown)
    requests = [work.request for work in run.sampled]
    rows = shapes.rows.logit_rows(model.vocab_size)
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        logits = model.logits(hidden[run.last_rows[start : start + rows]])[: len(batch)]
        sample_tokens(
            logits, [r.sampling_state for r in batch], [r.generated for r in batch], [r.length for r in batch]
        )
