"""Modes that see each operation as it is dispatched."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):
    """A mode that refuses operations which wait for a device, sort, or have a shape that depends on data."""

    REFUSED = (
        "index",
        "index_put",
        "_local_scalar_dense",
        "item",
        "nonzero",
        "sort",
        "topk",
        "masked_select",
        "unique",
        "equal",
        "is_nonzero",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__.rstrip("_") not in self.REFUSED, func
        return func(*args, **(kwargs or {}))


class Counting(TorchDispatchMode):
    """A mode that counts the operations which a GPU would run as kernels: all but views and new memory."""

    FREE = frozenset(
        {
            *("view", "_unsafe_view", "_reshape_alias", "as_strided", "alias", "detach", "t", "transpose", "permute"),
            *("select", "slice", "split", "split_with_sizes", "chunk", "unbind", "unsqueeze", "squeeze", "expand"),
            *("flatten", "reshape", "empty", "empty_like", "new_empty", "promote_types"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        if name not in self.FREE and not (name == "to" and out is args[0]):
            self.names.append(name)
        return out
