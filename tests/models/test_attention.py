"""Attention over packs equals attention under the pack's mask, and computes no score that the mask hides."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from etude.batch import Pack
from etude.models import PackedAttention
from etude.models.blocks import Plan
from tests.models.attention_reference import HEADS, KEY_HEADS, SCALE, WIDTH, forests, masked_attention, qkv
from tests.models.packs import FOREST, pack_of, unshared


def attend(pack: Pack, q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> Tensor:
    return PackedAttention(pack)(0, q, k, v, scale=SCALE, window=window, softcap=softcap)


def check(pack: Pack, window: int | None, softcap: float | None, heads: tuple[int, int] = (HEADS, KEY_HEADS)) -> None:
    inputs = qkv(len(pack.ids), heads=heads)
    weights = torch.randn(inputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    result, expected = attend(pack, *inputs, window, softcap), masked_attention(pack, *inputs, window, softcap)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad((result * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        atol=1e-11,
        rtol=1e-9,
    )


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 100, 6, 2, 1])
def test_attention_over_a_forest_follows_its_mask(window: int | None, softcap: float | None) -> None:
    check(pack_of(FOREST), window, softcap)
    check(unshared(pack_of(FOREST)), window, softcap)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_query_heads_share_key_heads_in_order(heads: tuple[int, int], softcap: float | None) -> None:
    check(pack_of(FOREST), None, softcap, heads)


@settings(max_examples=60, deadline=None)
@given(forests(), st.sampled_from([None, 1, 3, 20]), st.sampled_from([None, 0.8]))
def test_attention_over_any_forest_follows_its_mask(
    segments: tuple[tuple[int, int], ...], window: int | None, softcap: float | None
) -> None:
    check(pack_of(segments), window, softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_close(dtype: torch.dtype) -> None:
    pack = pack_of(FOREST)
    rounded = qkv(len(pack.ids), dtype)
    exact = [x.detach().double().requires_grad_() for x in rounded]
    result, expected = attend(pack, *rounded, None, None), masked_attention(pack, *exact, None, None)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    rounded_gradients = torch.autograd.grad(result.double().sin().sum(), rounded)
    exact_gradients = torch.autograd.grad(expected.sin().sum(), exact)
    torch.testing.assert_close(
        [g.double() for g in rounded_gradients], list(exact_gradients), atol=3 * tolerance, rtol=3 * tolerance
    )


def test_tokens_of_unrelated_segments_change_nothing() -> None:
    pack = pack_of(FOREST)
    q, k, v = (x.detach() for x in qkv(len(pack.ids)))
    before = attend(pack, q, k, v, None, None)
    last = slice(int(pack.offsets[-2]), None)
    k[last], v[last] = torch.nan, torch.nan
    after = attend(pack, q, k, v, None, None)
    assert torch.equal(before[: last.start], after[: last.start]) and bool(after[last].isnan().any())


def pairs(pack: Pack) -> int:
    """Return the number of computed scores, with padding and with those that causality hides."""
    return sum(b.query.index.shape[0] * b.query.index.shape[1] * b.key.index.shape[1] for b in Plan(pack).blocks(None))


def test_shared_prompts_are_computed_once_and_unrelated_pairs_never() -> None:
    shared = pack_of([(-1, 512), *[(0, 32)] * 8] * 1)
    assert pairs(shared) == 512 * 512 + 8 * 32 * 32 + (8 * 32) * 512
    assert pairs(unshared(shared)) == 8 * 544 * 544
    many = pack_of([(-1, 40)] * 20)
    assert pairs(many) == 20 * 40 * 40


def test_the_flops_are_those_of_the_pairs() -> None:
    pack = pack_of([(-1, 64), *[(0, 16)] * 4])
    q, k, v = (x.detach() for x in qkv(len(pack.ids)))
    with FlopCounterMode(display=False) as counter:
        attend(pack, q, k, v, None, 5.0)  # the plain products, which the counter knows
    assert counter.get_total_flops() == 4 * HEADS * WIDTH * pairs(pack)


def test_rows_of_similar_lengths_share_few_calls() -> None:
    lengths = torch.randint(16, 129, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    pack = pack_of([(-1, n) for n in lengths])
    assert len(Plan(pack).blocks(None)) <= 10
    exact = sum(n * n for n in lengths)
    assert pairs(pack) < 1.35 * exact


def test_blocks_outside_every_window_are_left_out() -> None:
    pack = pack_of([(-1, 40), (0, 20), (1, 5)])
    assert [b.level for b in Plan(pack).blocks(None)] == [0, 0, 0, 1, 1, 2]
    assert [b.level for b in Plan(pack).blocks(8)] == [0, 0, 0, 1, 1]


def test_a_plan_is_freed_with_its_attention() -> None:
    """A reference cycle would keep the masks of many micro-batches until the next garbage collection."""
    pack, inputs = pack_of(FOREST), qkv(len(pack_of(FOREST).ids))
    gc.disable()
    try:
        attention = PackedAttention(pack)
        attention(0, *inputs, scale=SCALE, window=6, softcap=None)
        plan = weakref.ref(attention.plan)
        del attention
        assert plan() is None
    finally:
        gc.enable()


def test_a_window_is_planned_once() -> None:
    plan = Plan(pack_of(FOREST))
    assert plan.blocks(6) is plan.blocks(6) and plan.blocks(6) is not plan.blocks(None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 6])
def test_attention_on_a_gpu_follows_the_mask(dtype: torch.dtype, window: int | None) -> None:
    pack = pack_of(FOREST)
    rounded = qkv(len(pack.ids), dtype)
    exact = [x.detach().double().requires_grad_() for x in rounded]
    on_gpu = Pack(**{name: getattr(pack, name).cuda() for name in ("ids", "positions", "offsets", "parent", "source")})
    result = attend(on_gpu, *(x.cuda() for x in rounded), window, None)
    expected = masked_attention(pack, *exact, window, None)
    torch.testing.assert_close(result.double().cpu(), expected, atol=0.05, rtol=0.05)
    rounded_gradients = torch.autograd.grad(result.double().sin().sum(), rounded)
    exact_gradients = torch.autograd.grad(expected.sin().sum(), exact)
    torch.testing.assert_close([g.double() for g in rounded_gradients], list(exact_gradients), atol=0.15, rtol=0.15)
