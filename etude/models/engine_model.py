"""What an engine computes with: the model's own weights, and what it keeps of them besides to be faster.

    the model ──► its weights with the adapters added in ──► laid out for the processor
                  where that is asked for                     where that gains

Both are memory that the engine pays for, gives back when it sleeps, and refreshes when the weights have changed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from etude.models.lora_layers import adapted_layers
from etude.models.model import Model
from etude.models.prepack import LinearWeight, PrepackedWeights
from etude.observe import Metrics, Sum, get_logger

__all__ = ["EngineModel"]


class EngineModel:
    """A model as an engine holds it. One thread refreshes it, and computes with it."""

    def __init__(self, source: Model, *, merge: bool, prepack: bool) -> None:
        """merge: compute with weights in which the adapters are added up, instead of adding up their products."""
        self._source, self._merge = source, merge and source.has_adapters
        self._bytes, self._seconds = 0, 0.0
        self.model = source
        """What to compute with."""
        self._merge_adapters()
        self._prepacked = PrepackedWeights(self) if prepack else None

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`."""
        return self.model.linear_weights()

    def refresh(self, *, frozen: bool = True) -> None:
        """Bring what is kept to the weights as they are; without `frozen`, those that are not trained are as they
        were. Where there is no memory for it, the model's own weights are computed with."""
        self._merge_adapters(frozen=frozen)
        if self._prepacked is not None:
            self._prepacked.refresh(frozen=frozen)

    def clear(self) -> None:
        """Give the memory back, until `refresh`."""
        self.model = self._source
        if self._prepacked is not None:
            self._prepacked.clear()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Products of this thread go through what is laid out."""
        with nullcontext() if self._prepacked is None else self._prepacked.activate():
            yield

    def pop_merge_metrics(self) -> Metrics:
        """What merging wrote, and how long it took, since this was last asked."""
        if not self._merge:
            return Metrics()
        spent = {"engine/merged_bytes": Sum.of(self._bytes), "engine/merge_seconds": Sum.of(self._seconds)}
        self._bytes, self._seconds = 0, 0.0
        return Metrics(spent)

    def _merge_adapters(self, *, frozen: bool = True) -> None:
        if not self._merge:
            return
        begun, merged = time.perf_counter(), self.model
        self.model = self._source
        try:
            if frozen or merged is self._source:
                del merged
                merged = _copy_without_adapters(self._source)
            held = dict(merged.named_weights())
            with torch.inference_mode(False), torch.no_grad():
                for name, weight in self._source.merged_weights():
                    if held[name].requires_grad:
                        held[name].copy_(weight)
                        self._bytes += weight.nbytes
            self.model = merged
        except (RuntimeError, MemoryError) as error:
            get_logger("models").warning("The adapters are not merged for the engine, which costs speed: %s", error)
        self._seconds += time.perf_counter() - begun


def _copy_without_adapters(source: Model) -> Model:
    """The same model without adapters, whose linear layers are its own; all else it shares, the head among it.

    What the adapters change is marked as what training changes, so that a layout reads it anew.
    """
    module, head = source.module, source.module.get_output_embeddings()
    layers = [part for part in module.modules() if isinstance(part, nn.Linear | Conv1D) and part is not head]
    own = {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}
    with torch.inference_mode(False):
        copied = copy.deepcopy(module, {id(weight): weight for weight in module.parameters() if id(weight) not in own})
        for name, layer in list(adapted_layers(copied)):
            copied.set_submodule(name, layer.base_layer)
            layer.base_layer.weight.requires_grad_()
        return Model(copied)
