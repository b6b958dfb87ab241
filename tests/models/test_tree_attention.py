"""One call for each level of a tree gives what padded blocks give, in any order of the segments."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.batch import Batch, Pack
from etude.data.pack import pack_prefix_tree
from etude.models import PackedAttention
from etude.models.blocks import Block
from etude.models.tree_attention import FLASH, LevelCall, LevelPlan, VarlenKernel
from tests.families import ATTENDING, family_model
from tests.models.attention_reference import HEADS, SCALE, PlainKernel, forests, qkv
from tests.models.packs import FOREST, pack_of

WINDOWS = [None, 1, 3, 8, 20, 100]


def breadth_first(segments: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the same forest with its segments in order of their depths, each beside its siblings."""
    order = [-1]
    for above in order:
        order.extend(segment for segment, (parent, _) in enumerate(segments) if parent == above)
    rank = {segment: place - 1 for place, segment in enumerate(order)}
    return tuple((rank[segments[segment][0]], segments[segment][1]) for segment in order[1:])


def outputs(pack: Pack, inputs: Sequence[Tensor], window: int | None, *kernel: VarlenKernel) -> list[Tensor]:
    """Return the output and the gradients of q, k, v and sinks."""
    q, k, v, sinks = inputs
    out = PackedAttention(pack, *kernel)(0, q, k, v, scale=SCALE, window=window, softcap=None, sinks=sinks)
    upward = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, inputs, upward)]


def inputs_of(pack: Pack) -> list[Tensor]:
    sinks = torch.randn(HEADS, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    return [*qkv(len(pack.ids)), sinks]


def check(segments: Sequence[tuple[int, int]], window: int | None) -> None:
    for ordered in (segments, breadth_first(segments)):
        pack = pack_of(ordered)
        kernel, inputs = PlainKernel(), inputs_of(pack)
        result, expected = outputs(pack, inputs, window, kernel), outputs(pack, inputs, window)
        torch.testing.assert_close(result, expected, atol=1e-11, rtol=1e-9)
        assert kernel.forward_calls == kernel.backward_calls and kernel.forward_calls[0].level == 0


@pytest.mark.parametrize("window", WINDOWS)
def test_levels_give_what_blocks_give(window: int | None) -> None:
    check(FOREST, window)


@settings(max_examples=60, deadline=None)
@given(forests(), st.sampled_from(WINDOWS))
def test_levels_of_any_forest_give_what_blocks_give(segments: tuple[tuple[int, int], ...], window: int | None) -> None:
    check(segments, window)


def mixed_batch() -> Batch:
    """Return three prompts of different lengths with five answers each, and a single row."""
    rows = [(prompt, answer) for prompt in (9, 4, 30) for answer in (1, 20, 7, 33, 2)] + [(3, 5)]
    lengths = torch.tensor([prompt + answer for prompt, answer in rows])
    return Batch(
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        unit=torch.arange(len(rows)),
        group=torch.tensor([0] * 5 + [1] * 5 + [2] * 5 + [3]),
        ids=torch.cat([torch.arange(int(length), dtype=torch.int32) for length in lengths]),
        action=torch.cat([torch.arange(prompt + answer) >= prompt for prompt, answer in rows]),
    )


def test_sixteen_mixed_rows_take_two_calls_and_gather_nothing() -> None:
    pack = pack_prefix_tree(mixed_batch())
    assert pack.parent.tolist() == [-1] * 4 + [0] * 5 + [1] * 5 + [2] * 5
    kernel = PlainKernel()
    outputs(pack, inputs_of(pack), None, kernel)
    assert [call.level for call in kernel.forward_calls] == [0, 1]
    assert all(isinstance(rows.tokens, slice) for call in kernel.forward_calls for rows in (call.query, call.key))


@pytest.mark.parametrize("family", ATTENDING)
def test_layers_of_all_kinds_take_levels(family: str) -> None:
    """The families have windows, sinks, latent heads, and layers of different sizes."""
    pack, kernel = pack_of(FOREST), PlainKernel()
    model = family_model(family, torch.float64)
    weights = [weight for _, weight in model.trained_weights() if weight is not model.head_weight]
    results = []
    for attention in (PackedAttention(pack, kernel), PackedAttention(pack)):
        hidden = model.hidden(pack.ids, pack.positions, attention)
        gradients = torch.autograd.grad(hidden.sin().sum(), weights, allow_unused=True)
        results.append([hidden.detach(), *(gradient for gradient in gradients if gradient is not None)])
    torch.testing.assert_close(*results, atol=1e-9, rtol=1e-7)
    assert len(kernel.forward_calls) == len(kernel.backward_calls) > 0


def test_a_plan_is_one_per_window_and_has_blocks_for_what_the_kernel_cannot_hide() -> None:
    plan = LevelPlan(pack_of([(-1, 10), (0, 3), (0, 12), (-1, 4)]))
    assert plan.calls(None) is plan.calls(None)
    assert [(type(call), call.level) for call in plan.calls(30)] == [(LevelCall, 0), (LevelCall, 1)]
    own, near, cut = plan.calls(13)
    assert isinstance(own, LevelCall) and own.window is None  # no segment is longer than the window
    assert isinstance(near, LevelCall) and near.query.ends.tolist() == [0, 3]
    assert isinstance(cut, Block) and cut.windowed and cut.query.lengths.tolist() == [12]
    (first, *others) = plan.calls(1)
    assert isinstance(first, LevelCall) and first.window == 1 and not others


def test_a_cpu_keeps_padded_blocks() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert not FLASH.supports(torch.empty(2, 2, 64, dtype=dtype), None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("ordered", [FOREST, breadth_first(FOREST)])
def test_the_flash_kernel_keeps_its_contract(
    ordered: tuple[tuple[int, int], ...], window: int | None, dtype: torch.dtype
) -> None:
    pack = pack_of(ordered)
    on_gpu = Pack(**{name: getattr(pack, name).cuda() for name in ("ids", "positions", "offsets", "parent", "source")})
    rounded = [x.detach().to(dtype).cuda().requires_grad_() for x in inputs_of(pack)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    assert FLASH.supports(rounded[0], None)
    result, expected = outputs(on_gpu, rounded, window), outputs(on_gpu, exact, window, PlainKernel())
    torch.testing.assert_close([x.double() for x in result], expected, atol=0.05, rtol=0.05)
