"""A reward model in the run's process: whoever asks, and however many do, each gets the score of its own sequence."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from etude.batch import Batch, Pack
from etude.data.pack import pack_prefix_tree
from etude.errors import TrainingError
from etude.models import Model, PackedAttention
from etude.protocols import Scorer
from etude.records import Rollout, Sample
from etude.train import ModelScorer
from tests.train.tasks import VOCABULARY
from tests.train.test_scoring import judge

Sequences = list[NDArray[np.int32]]


def alone(of: Model, ids: NDArray[np.int32]) -> float:
    """The score of one sequence, by itself."""
    nothing = np.zeros(len(ids), np.int32)
    row = Sample(ids, nothing.astype(bool), nothing.astype(np.float32), nothing, nothing, 0)
    pack = Pack.from_batch(Batch.from_records([row], [Rollout(0, 0, 0, 0.0)]))
    with torch.no_grad():
        hidden = of.hidden(pack.ids, pack.positions, PackedAttention(pack))
        return float(of.logits(hidden[-1:])[0, 0])


def some(seed: int, count: int = 6) -> Sequences:
    """Sequences that begin alike, some of them the beginning of others."""
    chance = np.random.default_rng(seed)
    begun = chance.integers(0, VOCABULARY, 9).astype(np.int32)
    made = [begun[: int(chance.integers(1, 9))] for _ in range(count // 2)]
    made += [np.concatenate([begun, chance.integers(0, VOCABULARY, 4).astype(np.int32)]) for _ in range(count // 2)]
    return [made[place] for place in chance.permutation(len(made))]


@given(seed=st.integers(0, 99), max_tokens_per_micro_batch=st.sampled_from([1, 12, 1000]), shared=st.booleans())
def test_a_score_is_what_it_would_be_alone(seed: int, max_tokens_per_micro_batch: int, shared: bool) -> None:
    model, sequences = judge(), some(seed)
    found = ModelScorer(
        model, max_tokens_per_micro_batch, pack=pack_prefix_tree if shared else Pack.from_batch
    ).score_now(sequences)
    assert np.allclose(found, [alone(model, ids) for ids in sequences], atol=1e-9)


class Counting(ModelScorer):
    """One that notes how many sequences it computes at a time."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, 1000)
        self.batches: list[int] = []

    def score_now(self, sequences: list[NDArray[np.int32]]) -> NDArray[np.float64]:  # type: ignore[override]
        """The same, noted; a sequence that begins with 60 cannot be scored."""
        self.batches.append(len(sequences))
        if any(ids[0] == 60 for ids in sequences):
            raise TrainingError("out of memory")
        return super().score_now(sequences)


def test_those_who_ask_at_once_are_answered_together() -> None:
    model, sequences = judge(), some(3, 12)
    scorer: Scorer = Counting(model)

    async def ask() -> list[float]:
        found = await asyncio.gather(*(scorer.score([ids]) for ids in sequences))
        more = await scorer.score(sequences[:3])
        assert np.allclose(more, [alone(model, ids) for ids in sequences[:3]], atol=1e-9)
        return [float(each[0]) for each in found]

    assert np.allclose(asyncio.run(ask()), [alone(model, ids) for ids in sequences], atol=1e-9)
    assert isinstance(scorer, Counting) and sum(scorer.batches) == 15 and len(scorer.batches) <= 3


def test_who_gave_up_is_left_out_and_nobody_waits_for_ever() -> None:
    scorer = Counting(judge())
    good, bad = np.array([1, 2], np.int32), np.array([60, 2], np.int32)

    async def ask() -> None:
        gone = asyncio.ensure_future(scorer.score([good]))
        kept = asyncio.ensure_future(scorer.score([good]))
        await asyncio.sleep(0)
        gone.cancel()
        assert len(await asyncio.wait_for(kept, 30)) == 1 and gone.cancelled()
        with pytest.raises(TrainingError, match="out of memory"):
            await asyncio.wait_for(scorer.score([bad]), 30)
        assert len(await asyncio.wait_for(scorer.score([good]), 30)) == 1, "one failure is not the next one's"

    asyncio.run(ask())
    assert sum(scorer.batches) in (3, 4)


def test_another_event_loop_is_served_too() -> None:
    scorer, ids = ModelScorer(judge(), 1000), np.array([1, 2, 3], np.int32)
    one, other = (asyncio.run(scorer.score([ids]))[0] for _ in range(2))
    assert one == other == pytest.approx(alone(judge(), ids), abs=1e-9)
