"""The weight-transfer backend: what vLLM calls in each process of a server.

An update is a session of vLLM's own layer-wise loading: a layer is laid out as its file has it, filled, and packed
again, one at a time, into the memory that it had. Three things vLLM leaves to its backends, or to chance:

- Loading keeps tensors of layers that are not whole yet. Those that lie in the trainer's bucket are copied before the
  bucket is given back; they are part of one layer at most.
- A session that failed half-way leaves layers laid out as files. They get their memory back before the next begins,
  which then writes all of it.
- On a processor, linear maps compute with a packed copy. An output head that is tied to the embedding is no layer of
  its own to load, so its packed copy is made again at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from etude_vllm_weights.fetching import Fetcher, Piece, described


@dataclass
class Group(WeightTransferInitInfo):
    """The process group to join."""

    group: dict[str, Any] = field(default_factory=dict)


@dataclass
class Parcel(WeightTransferUpdateInfo):
    """Some of the weights, and where they lie."""

    kind: str
    pieces: list[Piece]
    where: dict[str, Any]


class EtudeWeights(WeightTransferEngine[Group, Parcel]):
    """Takes parcels from an Etude trainer."""

    init_info_cls = Group
    update_info_cls = Parcel

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        self._fetcher = Fetcher(device, parallel.data_parallel_index * parallel.world_size + parallel.rank)

    def init_transfer_engine(self, init_info: Group) -> None:
        """Join the trainer's process group, where weights are broadcast."""
        if init_info.group:
            self._fetcher.join(init_info.group)

    def start_weight_update(self) -> None:
        """Lay the layers out as files have them."""
        self._recover()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Parcel) -> None:
        """Load a parcel."""
        told = {"kind": update_info.kind, "pieces": update_info.pieces}
        try:
            self.model.load_weights(self._fetcher.fetch(update_info.kind, update_info.pieces, update_info.where))
        except Exception as error:
            raise RuntimeError(f"The parcel {described(told)} could not be loaded: {error}") from error
        if update_info.kind in ("shm", "ipc"):
            self._keep()

    def finish_weight_update(self) -> None:
        """Give the layers their memory back, with the new weights, packed."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied()

    def shutdown(self) -> None:
        """Let go of the trainer."""
        self._fetcher.leave()

    def _keep(self) -> None:
        """Copy what loading still needs of a bucket that is about to be given back."""
        for layer in self.model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for name, value in bound.arguments.items():
                    if name != "param" and isinstance(value, torch.Tensor):
                        bound.arguments[name] = value.clone()

    def _recover(self) -> None:
        """Undo what a session that failed has left."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
                info.reset()

    def _pack_tied(self) -> None:
        """Pack anew what computes with the weight of a layer before it."""
        seen: set[int] = set()
        for layer in self.model.modules():
            weight = layer._parameters.get("weight")
            if weight is not None and id(weight) in seen and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
            seen.add(id(weight))
