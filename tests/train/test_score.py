"""A reward model in the run's process: concurrent callers each get the scores of their own sequences."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from etude.batch import Batch
from etude.data.pack import pack_prefix_tree
from etude.errors import TrainingError
from etude.models import Model, PackedAttention
from etude.records import Rollout, Sample
from etude.train import ModelScorer
from tests.packs import separate_rows
from tests.train.tasks import VOCABULARY
from tests.train.test_scoring import judge

Sequences = list[NDArray[np.int32]]


def score_alone(model: Model, ids: NDArray[np.int32]) -> float:
    """Return the score of one sequence, computed alone."""
    zeros = np.zeros(len(ids), np.int32)
    row = Sample(ids, zeros.astype(bool), zeros.astype(np.float32), zeros, zeros, 0)
    pack = separate_rows(Batch.from_records([row], [Rollout(0, 0, 0, 0.0)]))
    with torch.no_grad():
        hidden = model.hidden(pack.ids, pack.positions, PackedAttention(pack))
        return float(model.logits(hidden[-1:])[0, 0])


def sequences_of(seed: int, count: int = 6) -> Sequences:
    """Return sequences with a common prefix; some of them are prefixes of others."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCABULARY, 9).astype(np.int32)
    sequences = [prefix[: int(rng.integers(1, 9))] for _ in range(count // 2)]
    sequences += [np.concatenate([prefix, rng.integers(0, VOCABULARY, 4).astype(np.int32)]) for _ in range(count // 2)]
    return [sequences[index] for index in rng.permutation(len(sequences))]


@given(seed=st.integers(0, 99), max_tokens_per_micro_batch=st.sampled_from([1, 12, 1000]), shared=st.booleans())
def test_a_score_does_not_depend_on_the_batch(seed: int, max_tokens_per_micro_batch: int, shared: bool) -> None:
    model, sequences = judge(), sequences_of(seed)
    scores = ModelScorer(
        model, max_tokens_per_micro_batch, pack=pack_prefix_tree if shared else separate_rows
    ).score_now(sequences)
    assert np.allclose(scores, [score_alone(model, ids) for ids in sequences], atol=1e-9)


class CountingScorer(ModelScorer):
    """A scorer that records the size of each batch."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, 1000)
        self.batches: list[int] = []

    def score_now(self, sequences: list[NDArray[np.int32]]) -> NDArray[np.float64]:  # type: ignore[override]
        """Record the size and compute the scores; fail if a sequence starts with 60."""
        self.batches.append(len(sequences))
        if any(ids[0] == 60 for ids in sequences):
            raise TrainingError("out of memory")
        return super().score_now(sequences)


def test_concurrent_requests_are_scored_in_one_batch() -> None:
    model, sequences = judge(), sequences_of(3, 12)
    scorer = CountingScorer(model)

    async def score_all() -> list[float]:
        scores = await asyncio.gather(*(scorer.score([ids]) for ids in sequences))
        more = await scorer.score(sequences[:3])
        assert np.allclose(more, [score_alone(model, ids) for ids in sequences[:3]], atol=1e-9)
        return [float(score[0]) for score in scores]

    assert np.allclose(asyncio.run(score_all()), [score_alone(model, ids) for ids in sequences], atol=1e-9)
    assert sum(scorer.batches) == 15 and len(scorer.batches) <= 3


def test_cancelled_requests_are_left_out_and_failures_reach_their_callers() -> None:
    scorer = CountingScorer(judge())
    good, bad = np.array([1, 2], np.int32), np.array([60, 2], np.int32)

    async def score_all() -> None:
        cancelled = asyncio.ensure_future(scorer.score([good]))
        waiting = asyncio.ensure_future(scorer.score([good]))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert len(await asyncio.wait_for(waiting, 30)) == 1 and cancelled.cancelled()
        with pytest.raises(TrainingError, match="out of memory"):
            await asyncio.wait_for(scorer.score([bad]), 30)
        assert len(await asyncio.wait_for(scorer.score([good]), 30)) == 1, "a failure does not affect the next request"

    asyncio.run(score_all())
    assert sum(scorer.batches) in (3, 4)


def test_a_scorer_works_in_another_event_loop() -> None:
    scorer, ids = ModelScorer(judge(), 1000), np.array([1, 2, 3], np.int32)
    one, other = (asyncio.run(scorer.score([ids]))[0] for _ in range(2))
    assert one == other == pytest.approx(score_alone(judge(), ids), abs=1e-9)
