"""Fake tensors: shapes, dtypes and lifetimes without values or memory, so that a computation's memory can be measured.

Floating-point tensors derived from weights are fake. Integers and bools stay real: row ends, action masks and prefix
sharing have their true values, so that the code takes the same branches as in a real run.

    MemoryTrackingMode   records the memory of every tensor that is computed
    FakeFloatMode        makes floating-point tensors fake; reading a value gives a placeholder
    FakeDeviceMode       makes fake tensors report a GPU as their device, so that the code takes its GPU paths
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.autograd.graph import _engine_run_backward
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns as _recomputation_checks

from etude.tools.plan.memory_tracker import MemoryTracker

_aten = torch.ops.aten
_device_of = torch.ops.prim.device.default

CPU = torch.device("cpu")
"""The real device of fake tensors."""
STREAM = {"stream_id": 0, "device_index": 0, "device_type": 0}
"""The attributes of a GPU's stream that FSDP reads from torch 2.15 on, and that the CPU's streams do not have."""
CAPABILITY = (9, 0)
"""The generation of the planned GPU: one whose kernels multiply all experts of a mixture at once."""
HOST = "host"
"""The kind of tensors in pinned CPU memory, beside a GPU."""
FACTORY_OPS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.zeros.default,
        _aten.ones.default,
        _aten.full.default,
        _aten.rand.default,
        _aten.randn.default,
    )
)
"""The operators that create a tensor without reading one."""
INDEXED_OPS = frozenset((_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default))
"""The operators whose second argument may have masks, which select any number of elements."""
DIRECT_OPS = frozenset(
    (
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.as_strided.default,
        _aten.unbind.int,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.mul.Tensor,
        _aten.div.Tensor,
        _aten.neg.default,
        _aten.add_.Tensor,
        _aten.sub_.Tensor,
        _aten.mul_.Tensor,
        _aten.div_.Tensor,
        _aten.rsqrt.default,
        _aten.add_.Scalar,
        _aten.mul_.Scalar,
        _aten.pow.Tensor_Scalar,
        _aten.mean.dim,
        _aten.sum.dim_IntList,
        _aten.silu.default,
        _aten.sigmoid.default,
        _aten.addcmul_.default,
        _aten.addcdiv_.default,
        _aten.lerp_.Scalar,
        _aten.sqrt.default,
        _aten.exp.default,
        _aten._softmax.default,
        _aten._softmax_backward_data.default,
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.clone.default,
        _aten.copy_.default,
        _aten._to_copy.default,
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.zero_.default,
        _aten.cat.default,
        _aten.linalg_vector_norm.default,
    )
)
"""The operators that have no data-dependent shapes, and whose results have the device of their arguments."""


def _promotion_bytes(first: Tensor, second: Any, *_: Any, **__: Any) -> int:
    """Return the bytes of converted operands: a CPU kernel converts operands of two dtypes to one first."""
    if not isinstance(second, Tensor) or first.device.type != "cpu" or not (first.ndim and second.ndim):
        return 0
    promoted = torch.promote_types(first.dtype, second.dtype)
    return sum(tensor.numel() * promoted.itemsize for tensor in (first, second) if tensor.dtype != promoted)


def _expert_products(first: Tensor, second: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the results of the experts of a mixture, each for its own tokens: in all as many rows as tokens chose.

    Their shapes do not depend on the choice. torch's own function for shapes refuses all precisions but bf16.
    """
    if first.dtype == torch.float64:
        raise RuntimeError("torch has no product of experts in float64")
    rows = (len(offsets), len(first)) if second.ndim == 2 else (len(first),)
    return torch.empty(*rows, second.shape[-1], dtype=first.dtype)


def _count_choices(choices: Tensor, bins: int, *_: Any, **__: Any) -> Tensor:
    """Return how many tokens chose each expert. On a GPU these are integers, which the CPU's function refuses."""
    return torch.empty(bins, dtype=choices.dtype)


SHAPES: Mapping[Any, Callable[..., Tensor]] = {
    _aten._grouped_mm.default: _expert_products,
    _aten.histc.default: _count_choices,
}
"""Functions that return a result's shape, for operators whose own function for shapes refuses what a GPU takes."""
TEMPORARY_BYTES: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _promotion_bytes),
    **dict.fromkeys((_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor), _promotion_bytes),
    _aten.logsumexp.default: lambda tensor, *_, **__: tensor.nbytes,
    # the result arrives in one buffer, and is copied out of it
    torch.ops.c10d.allgather_.default: lambda gathered, *_, **__: sum(tensor.nbytes for tensor in gathered[0]),
}
"""Functions of a kernel's arguments that return the bytes of its temporary memory."""


class MemoryTrackingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records every tensor computed inside it, real or fake, with a memory tracker."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker
        self.dispatch_depth = 0
        """The depth is above 0 while torch runs an operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would wrap each call to turn off its compiler, which does not run in a mode anyway."""
        return False

    def __enter__(self) -> Self:
        """Patch the resize of storages: no kernel does it, so the dispatcher does not see it."""
        original, tracker = torch.UntypedStorage.resize_, self.tracker

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            tracker.record_resize(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        self._original_resize = original
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.UntypedStorage.resize_ = self._original_resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record its results. That of a DTensor is recorded as the operators on its shard."""
        if func is _device_of:  # half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, DTensor):
                return NotImplemented
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            with self.dispatching():
                return func(*args, **kwargs)  # a DTensor infers the shape of a result
        if func in TEMPORARY_BYTES:
            self.tracker.record_temporary(TEMPORARY_BYTES[func](*args, **kwargs))
        in_host_memory = bool(kwargs.get("pin_memory"))
        out = self.run(func, args, {**kwargs, "pin_memory": False} if in_host_memory else kwargs)
        for value in (out,) if isinstance(out, Tensor) else tree_flatten(out)[0]:
            if isinstance(value, Tensor) and not value.is_meta:
                self.tracker.record(value, HOST if in_host_memory else None, func.name())
        return out

    @contextmanager
    def dispatching(self) -> Iterator[None]:
        """Within the block, torch runs an operator."""
        self.dispatch_depth += 1
        try:
            yield
        finally:
            self.dispatch_depth -= 1

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator as torch does."""
        return func(*args, **kwargs)


class DirectDispatch:
    """Runs common operators on fake tensors of a mode, without the checks of torch's `FakeTensorMode`.

    `FakeTensorMode` takes a quarter of a millisecond for each operator. Most of it is for cases that a dry run does not
    have: symbolic sizes, constants, several devices. The operators here need their kernel for meta tensors only. It
    gives the shape, the strides and the storage of the result.
    """

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


class FakeFloatMode(MemoryTrackingMode):  # type: ignore[no-untyped-call]
    """A mode in which new floating-point tensors are fake, and so is every result computed from them.

    Integers and bools keep their values, and so do results computed from them alone. A value read from a fake tensor is
    1; `all` of it is true, `any` is false, and no two fake tensors are equal.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__(tracker)
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._direct = DirectDispatch(self._fake_mode)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on shapes alone, if an argument is fake."""
        self.dispatch_depth += 1
        try:
            if self._direct.applies(func, args, kwargs):
                return self._direct.run(func, args, kwargs)
            return self._run(func, args, kwargs)
        finally:
            self.dispatch_depth -= 1
            self._fake_mode.fake_tensor_converter.tensor_memo.clear()  # a memoized tensor could not change its dtype

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        has_fake = any(isinstance(value, FakeTensor) for value in tree_flatten((args, kwargs))[0])
        if func.namespace == "c10d":
            return _run_collective(func, args, kwargs, has_fake)
        if not has_fake:
            dtype = _factory_dtype(func, args, kwargs)
            on_meta = torch.device(kwargs.get("device") or CPU).type == "meta"  # it has no memory to count
            if func in FACTORY_OPS and dtype.is_floating_point and not on_meta:
                with self._fake_mode:
                    return func(*args, **kwargs)
            if func is _aten.empty_like.default and args[0].is_meta and args[0].is_floating_point():
                with self._fake_mode:  # memory for a tensor that had none
                    return torch.empty(args[0].shape, dtype=args[0].dtype, device=kwargs.get("device", args[0].device))
            return func(*args, **kwargs)
        if func in SHAPES:
            with self._fake_mode:
                return SHAPES[func](*args, **kwargs)
        if func in INDEXED_OPS:
            return func(args[0], _without_masks(args[1]), *args[2:], **kwargs)
        if func is _aten._local_scalar_dense.default:
            return _placeholder_value(args[0])
        if func is _aten.equal.default:
            return False
        if func is _aten.allclose.default:
            return True
        out = func(*args, **kwargs)
        if func is _aten.any.default:
            out.truth_value = False
        return out


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return indices with the places of a mask instead of the mask, whose values are real."""
    found: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype is torch.bool and not isinstance(index, FakeTensor)
        found += index.nonzero().unbind(1) if is_mask and index is not None else [index]
    return found


def _factory_dtype(func: Any, args: Any, kwargs: Any) -> torch.dtype:
    """Return the dtype of a tensor that an operator creates: the one that is asked for, or that of its value."""
    given: torch.dtype | None = kwargs.get("dtype")
    if given is None and func is _aten.full.default and not isinstance(args[1], float):
        return torch.int64  # or bool: it keeps its values, as whole numbers do
    return given or torch.get_default_dtype()


def _placeholder_value(tensor: Any) -> float | bool:
    """Return the value that a read of a fake tensor gets, such that checks pass: `all` is true, `any` is false."""
    if tensor.dtype is torch.bool:
        return bool(getattr(tensor, "truth_value", True))
    return 1.0 if tensor.is_floating_point() else 1


class FakeDeviceMode(TorchFunctionMode):
    """A mode in which fake tensors report another device, and moves to that device do nothing.

    torch's own operators see the real device, because this machine need not have the other one. So a checkpointed layer
    may save a tensor under one device and compute it again under the other; torch then compares all but the device.
    """

    def __init__(self, mode: FakeFloatMode, device: torch.device) -> None:
        super().__init__()
        self._mode = mode
        self._device = device
        self._real_device: Any = None

    def __enter__(self) -> FakeDeviceMode:
        self._real_device = FakeTensor.device
        FakeTensor.device = property(self._shown_device)  # type: ignore[method-assign,assignment]
        for name, value in STREAM.items():
            setattr(torch.cpu.Stream, name, value)
        self._real_capability = torch.cuda.get_device_capability
        torch.cuda.get_device_capability = lambda *_: CAPABILITY
        self._real_metadata = _recomputation_checks["default"]
        _recomputation_checks["default"] = lambda tensor: (tensor.shape, tensor.dtype)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        FakeTensor.device = self._real_device  # type: ignore[method-assign]
        torch.cuda.get_device_capability = self._real_capability
        _recomputation_checks["default"] = self._real_metadata
        for name in STREAM:
            delattr(torch.cpu.Stream, name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function as if the device existed."""
        kwargs = kwargs or {}
        if self._mode.dispatch_depth:
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:
            return self._device
        if func is torch.Tensor.backward:  # backward runs Python code that needs this mode
            loss = args[0]
            gradient = kwargs.get("gradient")
            create_graph = bool(kwargs.get("create_graph"))
            gradient = torch.ones_like(loss) if gradient is None else gradient
            retain_graph = bool(kwargs.get("retain_graph")) or create_graph
            with self._reenter():  # call the engine directly: `Tensor.backward` would leave this mode again
                return _engine_run_backward(
                    (loss,), (gradient,), retain_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
                )
        return func(*map(_to_cpu, args), **{name: _to_cpu(value) for name, value in kwargs.items()})

    @contextmanager
    def _reenter(self) -> Iterator[None]:
        """Enter this mode again, inside its own handler."""
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    def _shown_device(self, tensor: Any) -> torch.device:
        real_device: torch.device = self._real_device.fget(tensor)
        return real_device if self._mode.dispatch_depth else self._device


def _to_cpu(value: Any) -> Any:
    """Replace a device by the real one; leave any other value."""
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    return CPU if is_device else value


def _run_collective(func: Any, args: Any, kwargs: Any, has_fake: bool) -> Any:
    """Run a collective without other ranks: a gather copies this rank's tensors; fake tensors are not read."""
    if has_fake:
        args, kwargs = tree_map_only(Tensor, lambda _: torch.zeros(0, dtype=torch.int64), (args, kwargs))
        if func is torch.ops.c10d.alltoall_base_.default:
            args = (*args[:3], [], [], *args[5:])  # the parts that ranks send are empty too
    out = func(*args, **kwargs)
    if func is torch.ops.c10d.allgather_.default:
        for gathered, local in zip(args[0], args[1], strict=True):
            for tensor in gathered:
                tensor.copy_(local)
    return out


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Make this process the first of `ranks` ranks, with a process group that does not communicate."""
    dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def use_fake_tensors(tracker: MemoryTracker) -> Iterator[FakeFloatMode]:
    """Make floating-point tensors fake inside the block, and record them with the tracker."""
    with warnings.catch_warnings(), FakeFloatMode(tracker) as fake_mode:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", message=".*CUDA is not available")
        yield fake_mode
