"""Activation checkpointing: a layer's activations are computed again in its backward pass, all of them or some.

none        forward keeps every activation               backward computes gradients
selective   forward keeps products and attention         backward computes norms, activations and rotations again
full        forward keeps the layer's input              backward computes the whole layer again
offload     forward copies the input to CPU memory       backward copies it back, and computes the layer again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from etude.models.config import ActivationCheckpointing

_aten = torch.ops.aten

KEPT_OPERATIONS = frozenset(
    (
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._flash_attention_forward.default,
        _aten._grouped_mm.default,
    )
)
"""Operations whose results `selective` keeps, besides linear maps: the flash kernels of attention, and the products of
experts. Other kernels have scores that grow with the square of the length, and are not kept."""
KEPT_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1}
"""Linear maps, with the position of the left factor among the arguments."""
_WIDE = 16
"""A product's result that is so many times wider than its inner width is cheap for its size, and is not kept: such is
the second factor of an adapter."""

Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
_products_kept: ContextVar[bool] = ContextVar("products_kept", default=False)


def checkpoint_layer(
    layer: Callable[..., Any],
    kind: ActivationCheckpointing,
    contexts: Callable[[], Contexts] = lambda: (nullcontext(), nullcontext()),
) -> Callable[..., Any]:
    """Return a layer that keeps for its backward pass what `kind` says.

    contexts: returns the contexts of its first and its second forward pass.
    """
    if kind == "none":
        return layer

    def both_contexts() -> Contexts:
        first, again = contexts()
        if kind != "selective":
            return first, again
        keep, reuse = create_selective_checkpoint_contexts(_choose_policy)  # type: ignore[no-untyped-call]
        return _keep_products(first, keep), _keep_products(again, reuse)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            layer, *args, use_reentrant=False, preserve_rng_state=False, context_fn=both_contexts, **kwargs
        )

    return _offload_input(run) if kind == "offload" else run


class OffloadedTensor:
    """A copy of a tensor in CPU memory, pinned beside a GPU. Copies follow the computation on its stream."""

    def __init__(self, tensor: Tensor) -> None:
        """tensor: on the device of the computation."""
        self._device = tensor.device
        self._pinned = tensor.device.type == "cuda"
        with torch.no_grad():
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
            self._copy.copy_(tensor, non_blocking=self._pinned)

    def load(self) -> Tensor:
        """Return the tensor on its own device again."""
        with torch.no_grad():
            return torch.empty_like(self._copy, device=self._device).copy_(self._copy, non_blocking=self._pinned)


def _offload_input(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a checkpointed layer whose input waits in CPU memory.

    Its first argument is the input. Other tensors stay: weights, and the rotary angles that all layers share.
    """

    def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            return OffloadedTensor(tensor) if tensor.untyped_storage()._cdata == storage else tensor

        storage = hidden.untyped_storage()._cdata
        with saved_tensors_hooks(pack, lambda kept: kept.load() if isinstance(kept, OffloadedTensor) else kept):
            return layer(hidden, *args, **kwargs)

    return run


def products_are_kept() -> bool:
    """Return true if results of products are kept now, so that no operation may write into them."""
    return _products_kept.get()


def _choose_policy(_: object, operation: Any, *args: Any, **__: object) -> CheckpointPolicy:
    """Return whether the result of an operation is kept or computed again."""
    keeps = operation in KEPT_OPERATIONS
    if operation in KEPT_PRODUCTS:
        left, right = args[KEPT_PRODUCTS[operation] :][:2]
        keeps = right.shape[1] <= _WIDE * left.shape[1]
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _keep_products(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    token = _products_kept.set(True)
    try:
        with outer, inner:
            yield
    finally:
        _products_kept.reset(token)
