"""CUDA's graphs on a CPU: a capture records operations with their tensors, and a replay runs them on the same tensors.

As on a GPU, a captured operation has no lasting effect, a replay reads what the tensors hold then, and all else that
the code did between operations is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Operation:
    """One operation of a graph."""

    func: Any
    args: Any
    kwargs: Any
    out: Any

    def run(self) -> None:
        """Compute it again, into the tensors that it returned when it was captured."""
        result = self.func(*self.args, **self.kwargs)
        held = {x.untyped_storage().data_ptr() for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)}
        for old, new in zip(tree_leaves(self.out), tree_leaves(result), strict=True):
            if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in held:
                old.copy_(new)


class RecordedGraph:
    """In place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def replay(self) -> None:
        for operation in self.operations:
            operation.run()


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.before.append((args[0], args[0].clone()))
        out = func(*args, **(kwargs or {}))
        self.graph.operations.append(Operation(func, args, kwargs or {}, out))
        return out


@dataclass
class Capture:
    """The arguments of one capture."""

    pool: object
    capture_error_mode: str
    warmed_up: bool
    """True if the stream of the capture computed something since the last capture."""


@dataclass
class RecordedCuda:
    """The captures of a test, and what the next one does."""

    captures: list[Capture] = field(default_factory=list)
    pools: int = 0
    fails: bool = False
    warmed_up: bool = False


class _Stream:
    def wait_stream(self, other: object) -> None:
        pass


@contextmanager
def recorded_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedCuda]:
    """Replace the calls of `torch.cuda` by which graphs are captured."""
    made = RecordedCuda()

    class Graph:
        """In place of the context `torch.cuda.graph`."""

        def __init__(self, graph: RecordedGraph, *, pool: object, stream: object, capture_error_mode: str) -> None:
            made.captures.append(Capture(pool, capture_error_mode, made.warmed_up))
            made.warmed_up = False
            self.mode = _Recording(graph)

        def __enter__(self) -> None:
            self.mode.__enter__()

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
        ) -> None:
            self.mode.__exit__(kind, error, where)
            for tensor, value in reversed(self.mode.before):
                tensor.copy_(value)
            if made.fails:
                raise RuntimeError("operation not permitted when stream is capturing")

    @contextmanager
    def on_stream(stream: object) -> Iterator[None]:
        made.warmed_up = True
        yield

    def new_pool() -> int:
        made.pools += 1
        return made.pools

    for name, value in {
        "CUDAGraph": RecordedGraph,
        "graph": Graph,
        "Stream": _Stream,
        "current_stream": _Stream,
        "stream": on_stream,
        "graph_pool_handle": new_pool,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield made
