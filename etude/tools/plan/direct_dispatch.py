"""Common operators on fake tensors, without the checks of torch's `FakeTensorMode`.

`FakeTensorMode` takes a quarter of a millisecond for each operator. Most of it is for cases that a dry run does not
have: symbolic sizes, constants, several devices. The operators here need their kernel for meta tensors only. It gives
the shape, the strides and the storage of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_aten = torch.ops.aten
CPU = torch.device("cpu")

VIEWS = (
    *(_aten.view.default, _aten._unsafe_view.default, _aten.alias.default, _aten.detach.default, _aten.t.default),
    *(_aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default),
    *(_aten.slice.Tensor, _aten.select.int, _aten.as_strided.default, _aten.unbind.int, _aten.split.Tensor),
    _aten.split_with_sizes.default,
)
ARITHMETIC = (
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.neg.default, _aten.rsqrt.default),
    *(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor, _aten.add_.Scalar, _aten.mul_.Scalar),
    *(_aten.pow.Tensor_Scalar, _aten.mean.dim, _aten.sum.dim_IntList, _aten.silu.default, _aten.sigmoid.default),
    *(_aten.addcmul_.default, _aten.addcdiv_.default, _aten.lerp_.Scalar, _aten.sqrt.default, _aten.exp.default),
    *(_aten._softmax.default, _aten._softmax_backward_data.default, _aten.mm.default, _aten.bmm.default),
    *(_aten.addmm.default, _aten.baddbmm.default, _aten.clone.default, _aten.copy_.default, _aten._to_copy.default),
    *(_aten.empty_like.default, _aten.zeros_like.default, _aten.zero_.default, _aten.cat.default),
    _aten.linalg_vector_norm.default,
)
DIRECT_OPS = frozenset((*VIEWS, *ARITHMETIC))
"""The operators that have no data-dependent shapes, and whose results have the device of their arguments."""


class DirectDispatch:
    """Runs operators on fake tensors of a mode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        with mode:
            self._attributes = dict(torch.empty(0).__dict__)

    def applies(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if this class can run the operator: every tensor is fake, and no device is chosen."""
        if func not in DIRECT_OPS or kwargs.get("device") is not None:
            return False
        return all(map(_is_direct, args)) and all(map(_is_direct, kwargs.values()))

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on shapes alone."""
        with in_kernel_invocation_manager(self._mode):
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return self._wrap(out)
        return type(out)(map(self._wrap, out))

    def _wrap(self, tensor: Tensor) -> Tensor:
        """Return a fake tensor with the storage of a meta tensor."""
        if isinstance(tensor, FakeTensor):  # the operator changed an argument in place
            return tensor
        fake = Tensor._make_subclass(
            FakeTensor, tensor, tensor.requires_grad, dispatch_device=True, device_for_backend_keys=CPU
        )
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes)
        return fake


def _is_direct(value: Any) -> bool:
    if isinstance(value, Tensor):
        return type(value) is FakeTensor and value.constant is None
    return all(map(_is_direct, value)) if isinstance(value, (list, tuple)) else True
