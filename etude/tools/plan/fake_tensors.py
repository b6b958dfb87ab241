"""Tensors that have shapes and no numbers, and take no memory: what a computation would take is read off them.

What is made of weights has a shape, a type and a lifetime. What is known all the same is known: where a row ends, which
tokens are actions, how a prompt is shared are real numbers, and so every choice that the code makes of them is the one
that it would make.

    Written      what is computed is written down in a ledger

    Outline      what is made of weights has no numbers; who asks for one is told that all is well
    Pretend      tensors say that they are on a GPU, so that the code takes the paths that it would take there
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from etude.tools.plan.memory_tracker import MemoryTracker

__all__ = ["FakeDeviceMode", "FakeFloatMode", "MemoryTrackingMode", "fake_process_group", "use_fake_tensors"]

_aten = torch.ops.aten

CPU = torch.device("cpu")
"""Where tensors without numbers really are."""
FACTORY_OPS = frozenset(
    (
        *(_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default, _aten.ones.default),
        *(_aten.full.default, _aten.rand.default, _aten.randn.default),
    )
)
"""What makes a tensor without reading one."""


def _first_argument_bytes(*args: Any, **_: Any) -> int:
    size: int = args[0].nbytes
    return size


def _gathered_bytes(*args: Any, **_: Any) -> int:
    return sum(tensor.nbytes for tensor in args[0][0])


def _promotion_bytes(first: Tensor, second: Any, *_: Any, **__: Any) -> int:
    """On a processor, numbers of two types become those of one before they meet."""
    if not isinstance(second, Tensor) or first.device.type != "cpu" or not (first.ndim and second.ndim):
        return 0
    promoted = torch.promote_types(first.dtype, second.dtype)
    return sum(tensor.numel() * promoted.itemsize for tensor in (first, second) if tensor.dtype != promoted)


TEMPORARY_BYTES: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _promotion_bytes),
    **dict.fromkeys((_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor), _promotion_bytes),
    _aten.logsumexp.default: _first_argument_bytes,
    torch.ops.c10d.allgather_.default: _gathered_bytes,  # what is heard arrives end to end, and is dealt out
}
"""What kernels take for themselves while they run, in bytes, by their arguments."""


class MemoryTrackingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whatever is computed within is written down: the ledger of a real computation, or of one without memory."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker = tracker

    def __enter__(self) -> Self:
        """That a storage is given other memory is no kernel's work, and is heard of where it is asked for."""
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
        """Run it, and note what came of it."""
        kwargs = kwargs or {}
        if func in TEMPORARY_BYTES:
            self.tracker.record_temporary(TEMPORARY_BYTES[func](*args, **kwargs))
        out = self.run(func, args, kwargs)
        for value in tree_flatten(out)[0]:
            if isinstance(value, Tensor):
                self.tracker.record(value)
        return out

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """As torch would."""
        return func(*args, **kwargs)


class FakeFloatMode(MemoryTrackingMode):  # type: ignore[no-untyped-call]
    """Floating-point tensors that are made of nothing have no numbers, and what is computed from such has none.

    Whole numbers and truth values keep theirs, and so does what is computed from them alone. Of what has none, a number
    that is read is 1; that all of it holds is true, that any does is false; and no two are equal.
    """

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__(tracker)
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.dispatch_depth = 0
        """Whether torch is at work below."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """By shapes alone, where a tensor has no numbers."""
        self.dispatch_depth += 1
        try:
            return self._run(func, args, kwargs)
        finally:
            self.dispatch_depth -= 1
            self._fake_mode.fake_tensor_converter.tensor_memo.clear()  # who is remembered there cannot change its type

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        has_fake = any(isinstance(value, FakeTensor) for value in tree_flatten((args, kwargs))[0])
        if func.namespace == "c10d":
            return _run_collective(func, args, kwargs, has_fake)
        if not has_fake:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            if func in FACTORY_OPS and dtype.is_floating_point:
                with self._fake_mode:
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
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


def _placeholder_value(tensor: Any) -> float | bool:
    """What is told of a number that there is not: all is as it should be, and nothing is otherwise."""
    if tensor.dtype is torch.bool:
        return bool(getattr(tensor, "truth_value", True))
    return 1.0 if tensor.is_floating_point() else 1


class FakeDeviceMode(TorchFunctionMode):
    """Within, whoever asks a tensor where it is hears of another device, and what is asked to go there stays.

    torch itself, below the outline, is told the truth: it need not have such a device.
    """

    def __init__(self, mode: FakeFloatMode, device: torch.device) -> None:
        super().__init__()
        self._mode, self._device = mode, device
        self._real_device: Any = None

    def __enter__(self) -> FakeDeviceMode:
        self._real_device = FakeTensor.device
        FakeTensor.device = property(self._shown_device)  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        FakeTensor.device = self._real_device  # type: ignore[method-assign]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As if it were there."""
        kwargs = kwargs or {}
        if self._mode.dispatch_depth:
            return func(*args, **kwargs)
        if func == torch.Tensor.device.__get__:
            return self._device
        if func is torch.Tensor.backward:  # what it runs is ours again
            loss, gradient, create_graph = args[0], kwargs.get("gradient"), bool(kwargs.get("create_graph"))
            gradient = torch.ones_like(loss) if gradient is None else gradient
            retain_graph = bool(kwargs.get("retain_graph")) or create_graph
            with self._reenter():  # past torch's own door, at which this mode would be left once more
                return _engine_run_backward(
                    (loss,), (gradient,), retain_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True
                )
        args, kwargs = tree_map_only((torch.device, str), _to_cpu, (args, kwargs))
        return func(*args, **kwargs)

    @contextmanager
    def _reenter(self) -> Iterator[None]:
        """This mode, once more, inside of itself."""
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]

    def _shown_device(self, tensor: Any) -> torch.device:
        real_device: torch.device = self._real_device.fget(tensor)
        return real_device if self._mode.dispatch_depth else self._device


def _to_cpu(device: torch.device | str) -> torch.device | str:
    """A device becomes the one that is here; any other text is let be."""
    return CPU if isinstance(device, torch.device) or device.partition(":")[0] == "cuda" else device


def _run_collective(func: Any, args: Any, kwargs: Any, has_fake: bool) -> Any:
    """An exchange with nobody: in a gathering every rank has what this one has, and what has no numbers stays so."""
    if has_fake:
        args, kwargs = tree_map_only(Tensor, lambda _: torch.zeros(0, dtype=torch.int64), (args, kwargs))
    out = func(*args, **kwargs)
    if func is torch.ops.c10d.allgather_.default:
        for gathered, local in zip(args[0], args[1], strict=True):
            for tensor in gathered:
                tensor.copy_(local)
    return out


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Within, this process believes itself the first of so many ranks, and speaks to nobody."""
    if ranks == 1:
        yield
        return
    dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def use_fake_tensors(tracker: MemoryTracker) -> Iterator[FakeFloatMode]:
    """Within, tensors are outlines, and the ledger is written."""
    with warnings.catch_warnings(), FakeFloatMode(tracker) as fake_mode:
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", message=".*CUDA is not available")
        yield fake_mode
