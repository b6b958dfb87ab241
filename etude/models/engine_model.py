"""The weights that an engine computes with: the model's own, and further copies for speed.

    the model ──► a copy with the adapters merged ──► prepacked for the processor
                  if `merge`                           if `prepack`

Both copies cost memory. The engine frees them when it sleeps, and refreshes them when the weights change.
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


class EngineModel:
    """A model as an engine holds it. One thread refreshes it and computes with it."""

    def __init__(self, source: Model, *, merge: bool, prepack: bool) -> None:
        """merge: compute with merged weights instead of adding the adapters' products."""
        self._source = source
        self._merge = merge and source.has_adapters
        self._bytes = 0
        self._seconds = 0.0
        self.model = source
        """The model to compute with."""
        self._merge_adapters()
        self._prepacked = PrepackedWeights(self.linear_weights) if prepack else None

    def linear_weights(self) -> list[LinearWeight]:
        """See `Backbone`."""
        return self.model.linear_weights()

    def refresh(self, *, frozen: bool = True) -> None:
        """Update the copies to the current weights; `frozen=False` means that untrained weights have not changed.

        If there is not enough memory, the engine computes with the model's own weights.
        """
        self._merge_adapters(frozen=frozen)
        if self._prepacked is not None:
            self._prepacked.refresh(frozen=frozen)

    def clear(self) -> None:
        """Free the memory of the copies, until `refresh`."""
        self.model = self._source
        if self._prepacked is not None:
            self._prepacked.clear()

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Use the prepacked weights for the products of this thread."""
        with nullcontext() if self._prepacked is None else self._prepacked.activate():
            yield

    def pop_merge_metrics(self) -> Metrics:
        """Return the bytes that merging wrote and its seconds, since the last call."""
        if not self._merge:
            return Metrics()
        metrics = {"engine/merged_bytes": Sum.of(self._bytes), "engine/merge_seconds": Sum.of(self._seconds)}
        self._bytes = 0
        self._seconds = 0.0
        return Metrics(metrics)

    def _merge_adapters(self, *, frozen: bool = True) -> None:
        if not self._merge:
            return
        start, merged = time.perf_counter(), self.model
        self.model = self._source
        try:
            if frozen or merged is self._source:
                del merged
                merged = _copy_without_adapters(self._source)
            weights = dict(merged.named_weights())
            with torch.inference_mode(False), torch.no_grad():
                for name, weight in self._source.merged_weights():
                    if weights[name].requires_grad:
                        weights[name].copy_(weight)
                        self._bytes += weight.nbytes
            self.model = merged
        except (RuntimeError, MemoryError) as error:
            get_logger("models").warning("The adapters are not merged for the engine, which costs speed: %s", error)
        self._seconds += time.perf_counter() - start


def _copy_without_adapters(source: Model) -> Model:
    """Return the model without adapters: with its own copy of the linear layers, sharing all else and the head.

    Adapted weights are marked as trained, so that `PrepackedWeights.refresh` converts them again.
    """
    module, head = source.module, source.module.get_output_embeddings()
    layers = [part for part in module.modules() if isinstance(part, nn.Linear | Conv1D) and part is not head]
    own = {id(weight) for layer in layers for weight in layer.parameters(recurse=False)}
    with torch.inference_mode(False):
        copied = copy.deepcopy(module, {id(weight): weight for weight in module.parameters() if id(weight) not in own})
        for name, layer in list(adapted_layers(copied)):
            copied.set_submodule(name, layer.base_layer)
            layer.base_layer.weight.requires_grad_()
        made = Model(copied, verify=False)
        made.sizes = source.sizes
        return made
