"""The products of a mixture's experts, for every family of transformers that has `use_experts_implementation`.

    tokens ──router──► experts and weights of each token
       └──► rows, sorted by expert ──► products of each expert ──► rows in the order of tokens ──► weighted sums

The router stays the model's own. No sum depends on the order in which threads finish, so the bits are always the same.
The gradient of an expert without a row is zero, and not missing: ranks that share the weights wait for each other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_NAME = "etude"
"""The name of Etude's experts among transformers' implementations."""
GROUPED_CAPABILITY = (8, 0)
"""The first generation of GPUs whose kernels multiply groups of rows."""
_row_multiple: ContextVar[int] = ContextVar("row_multiple", default=1)


def use_own_experts(module: PreTrainedModel) -> None:
    """Compute the experts of a model here, and not in its own code. In a compiled layer they run uncompiled."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, torch.compiler.disable(compute_experts))  # type: ignore[no-untyped-call]
    if find_experts(module):
        module.set_experts_implementation(EXPERTS_NAME)


@contextmanager
def use_family_experts(module: PreTrainedModel) -> Iterator[None]:
    """Let transformers' own code compute the experts of a model in this context."""
    if find_experts(module):
        module.set_experts_implementation("eager" if module.dtype == torch.float64 else "grouped_mm")
    try:
        yield
    finally:
        use_own_experts(module)


@contextmanager
def pad_expert_rows(multiple: int) -> Iterator[None]:
    """In passes without gradients, let each expert multiply a multiple of so many rows within this context.

    The number of an expert's rows depends on the other tokens of a pass, and a row's bits may depend on that number.
    """
    token = _row_multiple.set(multiple)
    try:
        yield
    finally:
        _row_multiple.reset(token)


def find_experts(module: nn.Module) -> list[nn.Module]:
    """Return the experts of a layer or a model, a module for each mixture."""
    return [part for part in module.modules() if hasattr(part, "_is_expert_parallel")]


def compute_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, H], [T, k], [T, k] → [T, H]: the weighted sum of each token's experts (for transformers' ExpertsInterface).

    module: transformers' experts of one layer. chosen: the experts of each token.
    """
    expert, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = _count_up_to(expert, module.num_experts)
    rows: Tensor = _TokensToRows.apply(hidden, order, chosen.shape[1])  # type: ignore[no-untyped-call]
    multiple = 1 if torch.is_grad_enabled() else _row_multiple.get()
    compute = _compute_rows if multiple == 1 else partial(_compute_padded_rows, multiple)
    outputs = compute(module, rows, expert, ends)
    weighted = outputs * weights.reshape(-1).index_select(0, order)[:, None]
    sums: Tensor = _RowsToTokens.apply(weighted, order, chosen.shape[1])  # type: ignore[no-untyped-call]
    return sums.to(hidden.dtype)


def _count_up_to(expert: Tensor, num_experts: int) -> Tensor:
    """[R] sorted → [E]: the number of rows of each expert and of those before it, without a read of the device."""
    return torch.searchsorted(expert, torch.arange(num_experts, device=expert.device), right=True)


def _compute_rows(module: Any, rows: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """[R, H] → [R, H]: each row through its expert.

    expert: [R], sorted. ends: [E], the end of each expert's rows.
    """

    def multiply(x: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        out = grouped_product(x, weight if module.is_transposed else weight.transpose(1, 2), ends)
        # the gradient of an index is a sum in a fixed order, and that of `index_select` is not
        return out + getattr(module, f"{name}_bias")[expert] if module.has_bias else out

    if module.has_gate:
        inner = module._apply_gate(multiply(rows, "gate_up_proj"))
    else:
        inner = module.act_fn(multiply(rows, "up_proj"))
    out = multiply(inner, "down_proj")
    normed: Tensor = module.post_expert_norm(out) if module.has_post_expert_norm else out
    return normed


def _compute_padded_rows(multiple: int, module: Any, rows: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """Compute as `_compute_rows` does, with rows of zeros that make each expert's number of rows a multiple."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded_counts = (counts + multiple - 1) // multiple * multiple
    padded_ends = padded_counts.cumsum(0)
    moved = (padded_ends - padded_counts) - (ends - counts)
    places = torch.arange(len(rows), device=rows.device) + moved[expert]
    padded = rows.new_zeros(int(padded_ends[-1]), rows.shape[1]).index_copy_(0, places, rows)
    padded_expert = torch.repeat_interleave(padded_counts, output_size=len(padded))
    return _compute_rows(module, padded, padded_expert, padded_ends).index_select(0, places)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[R, I], [E, I, O] → [R, O]: the product of each row with its expert's matrix.

    ends: [E], the end of each expert's rows.
    """
    if _has_grouped_kernel(x):
        return grouped_mm(x.to(weight.dtype), weight, offs=ends.int())
    out: Tensor = _GroupedProduct.apply(x, weight, ends.tolist())  # type: ignore[no-untyped-call]
    return out


def _has_grouped_kernel(x: Tensor) -> bool:
    is_old = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < GROUPED_CAPABILITY
    return x.dtype != torch.float64 and not is_old


class _TokensToRows(torch.autograd.Function):
    """[T, H] → [T · k, H]: the row of each choice, in the order of experts. Its gradient is a sum of k rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _sum_rows(grads[0], order, ctx.k), None, None


class _RowsToTokens(torch.autograd.Function):
    """[T · k, H] → [T, H]: the sum of each token's rows, from the order of experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _sum_rows(rows, order, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order // ctx.k), None, None


def _sum_rows(rows: Tensor, order: Tensor, k: int) -> Tensor:
    """[T · k, H] in the order of experts → [T, H]. Each sum is in the order of a token's choices."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return rows.index_select(0, places).view(-1, k, rows.shape[1]).sum(1)


class _GroupedProduct(torch.autograd.Function):
    """The products one after the other, where torch has no kernel for all of them: in float64, and on old GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        out = x.new_empty(len(x), weight.shape[2])
        for matrix, rows in zip(weight, _slices(ends), strict=True):
            torch.mm(x[rows], matrix, out=out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        into_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        into_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for expert, rows in enumerate(_slices(ctx.ends)):
            if into_x is not None:
                torch.mm(grads[0][rows], weight[expert].T, out=into_x[rows])
            if into_weight is not None:
                into_weight[expert] = x[rows].T @ grads[0][rows]
        return into_x, into_weight, None


def _slices(ends: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
