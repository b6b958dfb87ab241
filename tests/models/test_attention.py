"""Attention over packs equals attention under the pack's own mask, and does no work that the mask forbids."""

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
from tests.models.packs import FOREST, apart, pack_of

HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3


def qkv(tokens: int, dtype: torch.dtype = torch.float64, heads: tuple[int, int] = (HEADS, KEY_HEADS)) -> list[Tensor]:
    chance = torch.Generator().manual_seed(7)
    shapes = [(tokens, n, WIDTH) for n in (heads[0], heads[1], heads[1])]
    return [torch.randn(s, generator=chance, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def plain(pack: Pack, q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """What is meant, with every score of every pair."""
    seen = pack.attention_mask()
    if window is not None:
        seen = seen & (pack.positions[:, None] - pack.positions < window)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def attend(pack: Pack, q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> Tensor:
    return PackedAttention(pack)(0, q, k, v, scale=SCALE, window=window, softcap=softcap)


def check(pack: Pack, window: int | None, softcap: float | None, heads: tuple[int, int] = (HEADS, KEY_HEADS)) -> None:
    inputs = qkv(len(pack.ids), heads=heads)
    weights = torch.randn(inputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, wanted = attend(pack, *inputs, window, softcap), plain(pack, *inputs, window, softcap)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), inputs),
        torch.autograd.grad((wanted * weights).sum(), inputs),
        atol=1e-11,
        rtol=1e-9,
    )


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 100, 6, 2, 1])
def test_a_forest_attends_as_its_mask_says(window: int | None, softcap: float | None) -> None:
    check(pack_of(FOREST), window, softcap)
    check(apart(pack_of(FOREST)), window, softcap)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_query_heads_share_key_heads_in_order(heads: tuple[int, int], softcap: float | None) -> None:
    check(pack_of(FOREST), None, softcap, heads)


@st.composite
def forests(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Any forest, empty segments included; the first token of a path must be somewhere, so roots have one."""
    segments: list[tuple[int, int]] = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.integers(-1, index - 1))
        segments.append((parent, draw(st.integers(1 if parent < 0 else 0, 24))))
    return tuple(segments)


@settings(max_examples=60, deadline=None)
@given(forests(), st.sampled_from([None, 1, 3, 20]), st.sampled_from([None, 0.8]))
def test_any_forest_attends_as_its_mask_says(
    segments: tuple[tuple[int, int], ...], window: int | None, softcap: float | None
) -> None:
    check(pack_of(segments), window, softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_near(dtype: torch.dtype) -> None:
    pack = pack_of(FOREST)
    low = qkv(len(pack.ids), dtype)
    high = [x.detach().double().requires_grad_() for x in low]
    found, wanted = attend(pack, *low, None, None), plain(pack, *high, None, None)
    assert found.dtype == dtype
    close = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double(), wanted, atol=close, rtol=close)
    of_low = torch.autograd.grad(found.double().sin().sum(), low)
    of_high = torch.autograd.grad(wanted.sin().sum(), high)
    torch.testing.assert_close([g.double() for g in of_low], list(of_high), atol=3 * close, rtol=3 * close)


def test_a_token_of_a_segment_that_is_no_relative_changes_nothing() -> None:
    pack = pack_of(FOREST)
    q, k, v = (x.detach() for x in qkv(len(pack.ids)))
    before = attend(pack, q, k, v, None, None)
    last = slice(int(pack.offsets[-2]), None)
    k[last], v[last] = torch.nan, torch.nan
    after = attend(pack, q, k, v, None, None)
    assert torch.equal(before[: last.start], after[: last.start]) and bool(after[last].isnan().any())


def pairs(pack: Pack) -> int:
    """Scores that are computed, padding and what causality hides included."""
    return sum(b.query.index.shape[0] * b.query.index.shape[1] * b.key.index.shape[1] for b in Plan(pack).blocks(None))


def test_shared_prompts_are_met_once_and_strangers_never() -> None:
    shared = pack_of([(-1, 512), *[(0, 32)] * 8] * 1)
    assert pairs(shared) == 512 * 512 + 8 * 32 * 32 + (8 * 32) * 512
    assert pairs(apart(shared)) == 8 * 544 * 544
    many = pack_of([(-1, 40)] * 20)
    assert pairs(many) == 20 * 40 * 40


def test_the_floating_point_work_is_that_of_the_pairs() -> None:
    pack = pack_of([(-1, 64), *[(0, 16)] * 4])
    q, k, v = (x.detach() for x in qkv(len(pack.ids)))
    with FlopCounterMode(display=False) as counted:
        attend(pack, q, k, v, None, 5.0)  # the plain products, which the counter knows
    assert counted.get_total_flops() == 4 * HEADS * WIDTH * pairs(pack)


def test_rows_of_about_one_length_go_together_and_calls_stay_few() -> None:
    lengths = torch.randint(16, 129, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    pack = pack_of([(-1, n) for n in lengths])
    assert len(Plan(pack).blocks(None)) <= 10
    exact = sum(n * n for n in lengths)
    assert pairs(pack) < 1.35 * exact


def test_what_is_outside_every_window_is_left_out() -> None:
    pack = pack_of([(-1, 40), (0, 20), (1, 5)])
    assert [b.level for b in Plan(pack).blocks(None)] == [0, 0, 0, 1, 1, 2]
    assert [b.level for b in Plan(pack).blocks(8)] == [0, 0, 0, 1, 1]


def test_a_plan_is_gone_with_its_attention() -> None:
    """A cycle would keep the masks of many micro-batches until the collector comes by."""
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
def test_a_gpu_attends_as_the_mask_says(dtype: torch.dtype, window: int | None) -> None:
    pack = pack_of(FOREST)
    low = qkv(len(pack.ids), dtype)
    high = [x.detach().double().requires_grad_() for x in low]
    there = Pack(**{name: getattr(pack, name).cuda() for name in ("ids", "positions", "offsets", "parent", "source")})
    found = attend(there, *(x.cuda() for x in low), window, None)
    wanted = plain(pack, *high, window, None)
    torch.testing.assert_close(found.double().cpu(), wanted, atol=0.05, rtol=0.05)
    of_low = torch.autograd.grad(found.double().sin().sum(), low)
    of_high = torch.autograd.grad(wanted.sin().sum(), high)
    torch.testing.assert_close([g.double() for g in of_low], list(of_high), atol=0.15, rtol=0.15)
