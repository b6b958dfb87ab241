"""Decoder layers as torch.compile makes them, for training: two graphs, which all layers of a class share.

    hidden ──► norm, q, k, v, rotary positions ──► attention, as it is ──► o, residuals, norm, MLP ──► hidden
               └───────── one graph ─────────┘                             └────── one graph ─────┘

A graph serves packs of any length. Passes with a gradient have other graphs than those without one. So have layers that
differ in more than their weights' values: in their windows, or in their frozen parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from etude.models.compiled_ops import refuse_without_compiler
from etude.models.lora_layers import adapters_disabled
from etude.observe import get_logger

BACKEND = "inductor"
"""torch's name of the compiler."""
MAX_GRAPHS = 32
"""The largest number of graphs of a model. Most models have 4, and those with windows in some of their layers 6."""
DYNAMO_CONFIG = {"nested_graph_breaks": True, "specialize_float": True, "recompile_limit": 2 * MAX_GRAPHS}
"""dynamo's options in a forward pass. The first makes one graph of each half of a layer, where there would be two. With
the second, numbers such as a norm's epsilon are constants; else each graph is compiled twice."""

LayerForward = Callable[..., Any]
_active: ContextVar[CompiledLayers | None] = ContextVar("compiled_layers", default=None)


class CompiledLayers:
    """The compiled forward passes of a model's layer classes, and the number of their graphs."""

    def __init__(self, device: torch.device) -> None:
        """device: the device of the layers; refused if torch cannot compile for it."""
        refuse_without_compiler(device, BACKEND)
        self.graphs = 0
        """The graphs compiled so far."""
        self._backend = torch._dynamo.lookup_backend(BACKEND)
        config = torch._dynamo.config
        self._config = {name: value for name, value in DYNAMO_CONFIG.items() if hasattr(config, name)}
        self._compiled: dict[LayerForward, LayerForward] = {}
        self._warned = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the compiled layers within this context."""
        token = _active.set(self)
        try:
            with torch._dynamo.config.patch(self._config):
                yield
        finally:
            _active.reset(token)

    def choose_forward(self, forward: LayerForward, hidden_states: Tensor) -> LayerForward:
        """Return the compiled function in place of a layer class's `forward`; beyond `MAX_GRAPHS`, `forward` itself.

        hidden_states: [1, P, H]. A single token runs uncompiled, because it would need separate graphs. So do passes
        without adapters: a context variable switches them, and a graph cannot read it.
        """
        if hidden_states.shape[1] == 1 or adapters_disabled() or self._reached_limit():
            return forward
        if forward not in self._compiled:
            self._compiled[forward] = torch.compile(forward, dynamic=True, backend=self._compile_graph)
        return self._compiled[forward]

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> LayerForward:
        compiled: LayerForward = self._backend(graph, inputs)
        self.graphs += 1
        return compiled

    def _reached_limit(self) -> bool:
        if self.graphs < MAX_GRAPHS:
            return False
        if not self._warned:
            self._warned = True
            get_logger("models").warning(
                "torch compiled %d graphs for the layers of this model, because its passes differ too much from each "
                "other. The layers now run uncompiled. Set `train.compile=false`.",
                self.graphs,
            )
        return True


def choose_forward(layer: nn.Module, hidden_states: Tensor) -> LayerForward:
    """Return the function of a layer and its inputs that computes it: its own, or a compiled one if they are active."""
    compiled, forward = _active.get(), type(layer).forward
    return forward if compiled is None else compiled.choose_forward(forward, hidden_states)
