"""The launch of a static step: operation by operation, or as a CUDA graph with one call.

A graph holds the operations of a step with the addresses of all tensors. It is captured when its shapes come for the
first time, and reads whatever the buffers hold when it is replayed. So weights that are changed in place need nothing,
and weights that moved, as `check_addresses` finds, need new graphs.
"""

from __future__ import annotations

from typing import Protocol

import torch

from etude.observe import get_logger
from etude.rollout.static_step import StaticStep, StepKey


class StepLauncher(Protocol):
    """The launch of the steps of one `StaticStep`."""

    @property
    def graphs(self) -> int:
        """The number of graphs that it holds."""
        ...

    def run(self, key: StepKey) -> None:
        """Launch a step of these shapes; see `StaticStep.compute`."""
        ...

    def check_addresses(self) -> None:
        """Adapt to weights that may have moved."""
        ...


def create_launcher(step: StaticStep) -> StepLauncher:
    """Return graphs on a GPU, and operations elsewhere."""
    return GraphSteps(step) if step.model.device.type == "cuda" else EagerSteps(step)


class EagerSteps(StepLauncher):
    """Steps launched operation by operation."""

    def __init__(self, step: StaticStep) -> None:
        self._step = step

    @property
    def graphs(self) -> int:
        return 0

    def run(self, key: StepKey) -> None:
        self._step.compute(key)

    def check_addresses(self) -> None:
        pass


class GraphSteps(StepLauncher):
    """Steps launched as graphs, which share one pool of memory: no two of them run at once."""

    def __init__(self, step: StaticStep) -> None:
        self._step = step
        self._graphs: dict[StepKey, torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._is_refused = False
        self.clear()

    @property
    def graphs(self) -> int:
        return len(self._graphs)

    def run(self, key: StepKey) -> None:
        graph = self._graphs.get(key) or self._capture(key)
        if graph is None:
            self._step.compute(key)
        else:
            graph.replay()

    def check_addresses(self) -> None:
        if self._graphs and self._find_addresses() != self._addresses:
            self.clear()

    def clear(self) -> None:
        """Drop all graphs, and their memory."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._addresses: list[int] = []

    def _capture(self, key: StepKey) -> torch.cuda.CUDAGraph | None:
        """Return a new graph of a step; None if the device captures none, which is logged once.

        Nothing of a captured step is computed. Other threads may use the device meanwhile.
        """
        if self._is_refused:
            return None
        self._warm_up(key)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._step.compute(key)
        except RuntimeError as error:
            get_logger("rollout").warning("The device captures no step, so each operation is launched: %s", error)
            self._is_refused = True
            self.clear()
            return None
        self._addresses = self._addresses or self._find_addresses()
        self._graphs[key] = graph
        return graph

    def _warm_up(self, key: StepKey) -> None:
        """Compute a step of scratch rows on the stream of captures, so that libraries have begun there."""
        state = self._step.state
        rows = state.row_slots.clone()
        state.row_slots.fill_(state.scratch)
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step.compute(key)
        current.wait_stream(self._stream)
        state.row_slots.copy_(rows)

    def _find_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._step.tensors()]
