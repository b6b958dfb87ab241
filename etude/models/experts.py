"""The products of a mixture's experts, for every family of transformers that has `use_experts_implementation`.

    tokens ──router──► experts and weights of each token
       └──► rows, sorted by expert ──► products of each expert ──► rows in the order of tokens ──► weighted sums

The router stays the model's own. No sum depends on the order in which threads finish, so the bits are always the same.
The gradient of an expert without a row is zero, and not missing: ranks that share the weights wait for each other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import grouped_mm
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_NAME = "etude"
"""The name of Etude's experts among transformers' implementations."""
PART = 2**26
"""The most numbers of a tensor that is computed to be summed: 256 MiB in float32."""
GROUPED_CAPABILITY = (8, 0)
"""The first generation of GPUs whose kernels multiply groups of rows."""
ComputeRows: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of rows [R, H], their experts [R], sorted, and the end of each expert's rows [E]: it returns [R, H]."""
_row_multiple: ContextVar[int] = ContextVar("row_multiple", default=1)
CountLoads: TypeAlias = Callable[[nn.Module, Tensor, Tensor], None]
"""A function of a layer's experts, the rows of each [E], and the weights of each token's experts [T, k]."""
_count_loads: ContextVar[CountLoads | None] = ContextVar("count_loads", default=None)
_planned_load: ContextVar[float] = ContextVar("planned_load", default=1.0)


class Exchange(Protocol):
    """The ranks that hold the experts of a layer together."""

    def __call__(self, tokens: Tensor, order: Tensor, counts: Tensor, compute: ComputeRows) -> Tensor:
        """[T, H] → [T · k, H]: compute the rows of all choices, by expert, on the ranks that have the experts.

        order: [T · k], of the choices. counts: [E], the rows of each expert. compute: computes rows of the experts of
        this rank.
        """
        ...


def use_own_experts(module: PreTrainedModel) -> None:
    """Compute the experts of a model here, and not in its own code. In a compiled layer they run uncompiled."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, torch.compiler.disable(compute_experts))  # type: ignore[no-untyped-call]
    for experts in find_experts(module):
        experts.exchange = None  # type: ignore[assignment]
    _choose_experts(module, EXPERTS_NAME)


@contextmanager
def use_family_experts(module: PreTrainedModel) -> Iterator[None]:
    """Let transformers' own code compute the experts of a model in this context, unless ranks divide them."""
    divided = any(experts.exchange is not None for experts in find_experts(module))
    if not divided:
        _choose_experts(module, "eager" if module.dtype == torch.float64 else "grouped_mm")
    try:
        yield
    finally:
        _choose_experts(module, EXPERTS_NAME)


def _choose_experts(module: PreTrainedModel, name: str) -> None:
    if find_experts(module):  # transformers refuses a model without experts
        module.set_experts_implementation(name)


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


@contextmanager
def count_loads(count: CountLoads | None) -> Iterator[None]:
    """Call `count` at each mixture of a forward pass in this context. Layers that are computed again are outside."""
    token = _count_loads.set(count)
    try:
        yield
    finally:
        _count_loads.reset(token)


@contextmanager
def plan_load(load: float) -> Iterator[None]:
    """Within this context, let plans send this rank so many times its even share of the rows."""
    token = _planned_load.set(load)
    try:
        yield
    finally:
        _planned_load.reset(token)


def find_experts(module: nn.Module) -> list[nn.Module]:
    """Return the experts of a layer or a model, a module for each mixture."""
    return [part for part in module.modules() if is_experts(part)]


def is_experts(module: nn.Module) -> bool:
    """Return true for the experts of one mixture."""
    return hasattr(module, "_is_expert_parallel")


def compute_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[T, H], [T, k], [T, k] → [T, H]: the weighted sum of each token's experts (for transformers' ExpertsInterface).

    module: transformers' experts of one layer. chosen: the experts of each token.
    """
    expert, order = torch.sort(chosen.reshape(-1), stable=True)
    ends = _count_up_to(expert, module.num_experts)
    if (count := _count_loads.get()) is not None:
        count(module, _count_rows(ends), weights)
    multiple = 1 if torch.is_grad_enabled() else _row_multiple.get()
    compute = partial(_compute_rows, module) if multiple == 1 else partial(_compute_padded_rows, multiple, module)
    if module.exchange is None:
        outputs = compute(to_expert_order(hidden, order, chosen.shape[1]), expert, ends)
    else:
        outputs = module.exchange(hidden, order, _count_rows(ends), compute)
    return _sum_weighted(outputs, weights, order).to(hidden.dtype)


def _count_up_to(expert: Tensor, num_experts: int) -> Tensor:
    """[R] sorted → [E]: the number of rows of each expert and of those before it, without a read of the device."""
    return torch.searchsorted(expert, torch.arange(num_experts, device=expert.device), right=True)


def _count_rows(ends: Tensor) -> Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def host_counts(sent: Tensor, received: Tensor, total: int) -> tuple[list[int], list[int]]:
    """Return the numbers of rows that go to each rank and come from it as integers, by one read of the device.

    total: the sum of `sent`, where it has no values, as in a plan. It is then divided evenly, and `plan_load` times as
    many rows come.
    """
    if not isinstance(sent, FakeTensor):
        numbers: list[list[int]] = torch.stack([sent, received]).tolist()
        return numbers[0], numbers[1]
    ranks = len(sent)
    return _even_counts(total, ranks), _even_counts(int(total * min(_planned_load.get(), ranks)), ranks)


def _even_counts(total: int, parts: int) -> list[int]:
    share, more = divmod(total, parts)
    return [share + (index < more) for index in range(parts)]


def _compute_rows(module: Any, rows: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """[R, H] → [R, H]: each row through its expert.

    expert: [R], sorted. ends: [E], the end of each expert's rows.
    """

    def multiply(x: Tensor, name: str) -> Tensor:
        weight = _own_part(getattr(module, name))
        out = grouped_product(x, weight if module.is_transposed else weight.transpose(1, 2), ends)
        # the gradient of an index is a sum in a fixed order, and that of `index_select` is not
        return out + _own_part(getattr(module, f"{name}_bias"))[expert] if module.has_bias else out

    if module.has_gate:
        inner = module._apply_gate(multiply(rows, "gate_up_proj"))
    else:
        inner = module.act_fn(multiply(rows, "up_proj"))
    out = multiply(inner, "down_proj")
    normed: Tensor = module.post_expert_norm(out) if module.has_post_expert_norm else out
    return normed


def _compute_padded_rows(multiple: int, module: Any, rows: Tensor, expert: Tensor, ends: Tensor) -> Tensor:
    """Compute as `_compute_rows` does, with rows of zeros that make each expert's number of rows a multiple."""
    counts = _count_rows(ends)
    padded_counts = (counts + multiple - 1) // multiple * multiple
    padded_ends = padded_counts.cumsum(0)
    moved = (padded_ends - padded_counts) - (ends - counts)
    places = torch.arange(len(rows), device=rows.device) + moved[expert]
    padded = rows.new_zeros(int(padded_ends[-1]), rows.shape[1]).index_copy_(0, places, rows)
    padded_expert = torch.repeat_interleave(padded_counts, output_size=len(padded))
    return _compute_rows(module, padded, padded_expert, padded_ends).index_select(0, places)


def _own_part(weight: Tensor) -> Tensor:
    """Return the experts of this rank."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


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


def to_expert_order(tokens: Tensor, order: Tensor, k: int) -> Tensor:
    """[T, H] → [T · k, H]: the row of each choice, in the order of experts. order: [T · k], of the choices."""
    rows: Tensor = _TokensToRows.apply(tokens, order, k)  # type: ignore[no-untyped-call]
    return rows


def restore_order(rows: Tensor, order: Tensor) -> Tensor:
    """[R, H] → [R, H]: the rows as they were before they were put into this order."""
    restored: Tensor = _RestoredOrder.apply(rows, order)  # type: ignore[no-untyped-call]
    return restored


def _sum_weighted(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """[T · k, H] in the order of experts, [T, k] → [T, H]: the weighted sum of each token's rows."""
    out: Tensor = _WeightedSum.apply(rows, weights, order)  # type: ignore[no-untyped-call]
    return out


class _TokensToRows(torch.autograd.Function):
    """A copy of rows, whose gradient is a sum of k rows, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return _sum_rows(grads[0], order, ctx.k), None, None


class _RestoredOrder(torch.autograd.Function):
    """A permutation of rows, whose gradient is a copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, _places(order))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None


class _WeightedSum(torch.autograd.Function):
    """A weighted sum of k rows for each token.

    The weights of many routers are in float32. All products in float32 at once would be the largest tensors of a layer,
    three of them in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        return _sum_rows(rows, order, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, order = ctx.saved_tensors
        k = weights.shape[1]
        flat = weights.reshape(-1)
        into_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        into_weights = torch.empty_like(flat) if ctx.needs_input_grad[1] else None
        for part in _parts(len(rows), rows.shape[1]):
            choices = order[part]
            of_rows = grads[0].index_select(0, choices // k).to(torch.promote_types(rows.dtype, flat.dtype))
            if into_weights is not None:
                into_weights[choices] = (of_rows * rows[part]).sum(1).to(flat.dtype)
            if into_rows is not None:
                into_rows[part] = of_rows * flat[choices, None]
        return into_rows, None if into_weights is None else into_weights.view_as(weights), None


def _sum_rows(rows: Tensor, order: Tensor, k: int, weights: Tensor | None = None) -> Tensor:
    """[T · k, H] in the order of experts → [T, H]. Each sum is in the order of a token's choices.

    weights: [T, k].
    """
    width = rows.shape[1]
    places = _places(order).view(-1, k)
    out = rows.new_empty(len(places), width)
    for part in _parts(len(places), k * width):
        chosen = rows.index_select(0, places[part].reshape(-1)).view(-1, k, width)
        out[part] = (chosen if weights is None else chosen * weights[part, :, None]).sum(1)
    return out


def _places(order: Tensor) -> Tensor:
    """[R] → [R]: the place of each choice in this order."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _parts(length: int, width: int) -> list[slice]:
    """Return slices of a length, each with about `PART` numbers if one has `width`."""
    step = max(1, PART // width)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


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
