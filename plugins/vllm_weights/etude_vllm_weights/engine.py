"""The weight-transfer backend that vLLM calls in each process of a server.

An update uses vLLM's layer-wise loading. One layer at a time gets the layout of its file, is filled, and is packed
again into the memory that it had. This backend adds five things:

- Loading keeps tensors of incomplete layers. Those that lie in the trainer's bucket are copied before the bucket is
  released. They belong to one layer at most.
- An update that failed half-way leaves layers in the layout of the file. The next update first restores their memory,
  and then writes all of it.
- On a CPU, linear layers compute with a packed copy. vLLM does not load an output head that is tied to the embedding,
  so its packed copy is made again at the end.
- On a CPU, experts too compute with a packed copy, which vLLM makes only together with their kernel. So an update makes
  the kernel again; without it, experts would compute with weights in the layout of the file.
- The experts of some models (gpt-oss) are copied past the layer-wise loading, and would stay as they were. Such an
  update ends with an error.
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
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

try:  # private, and needed after a failed update alone
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors
except ImportError:
    _place_kernel_tensors = None

from etude_vllm_weights.fetching import Fetcher, Piece, describe_bucket


@dataclass
class Group(WeightTransferInitInfo):
    """The process group to join."""

    group: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some of the weights, and where they lie."""

    kind: str
    pieces: list[Piece]
    where: dict[str, Any]


class EtudeWeights(WeightTransferEngine[Group, Bucket]):
    """Receives buckets of weights from an Etude trainer."""

    init_info_cls = Group
    update_info_cls = Bucket

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = self.parallel_config
        self._fetcher = Fetcher(device, parallel.data_parallel_index * parallel.world_size + parallel.rank)
        self._is_cpu = device.type == "cpu"
        self._kernels: dict[torch.nn.Module, Any] = {}
        self._experts_sent = False

    def init_transfer_engine(self, init_info: Group) -> None:
        """Join the trainer's process group, where weights are broadcast."""
        if init_info.group:
            self._fetcher.join(init_info.group)

    def start_weight_update(self) -> None:
        """Give the layers the layout of their files."""
        self._recover()
        initialize_layerwise_reload(self.model)
        self._experts_sent = False
        self._take_kernels()

    def receive_weights(self, update_info: Bucket) -> None:
        """Load a bucket."""
        self._experts_sent |= any(".experts." in name for name, *_ in update_info.pieces)
        try:
            self.model.load_weights(self._fetcher.fetch(update_info.kind, update_info.pieces, update_info.where))
        except Exception as error:
            bucket = describe_bucket(update_info.kind, update_info.pieces)
            raise RuntimeError(f"The bucket {bucket} could not be loaded: {error}") from error
        if update_info.kind in ("shm", "ipc"):
            self._keep()

    def finish_weight_update(self) -> None:
        """Pack the new weights into the memory that the layers had."""
        passed_over = self._find_passed_over()
        finalize_layerwise_reload(self.model, self.model_config)
        self._return_kernels()
        self._pack_tied()
        if passed_over:
            raise RuntimeError(
                f"vLLM did not load the new experts of {len(passed_over)} layers ({type(passed_over[0]).__name__}), "
                "and computes with the old ones. Restart the server with a model that has the new weights."
            )

    def shutdown(self) -> None:
        """Leave the trainer's process group."""
        self._fetcher.leave()

    def _keep(self) -> None:
        """Copy the tensors that loading still needs from a bucket that is about to be released."""
        for layer in self.model.modules():
            for _, bound in get_layerwise_info(layer).loaded_weights:
                for name, value in bound.arguments.items():
                    if name != "param" and isinstance(value, torch.Tensor):
                        bound.arguments[name] = value.clone()

    def _recover(self) -> None:
        """Restore the memory of layers that a failed update left in the layout of the file."""
        self._return_kernels()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                if _place_kernel_tensors is None:
                    raise RuntimeError(
                        "An update of weights failed half-way, and this vLLM has no way back. Restart the server."
                    )
                _place_kernel_tensors(layer, info)
                info.reset()

    def _take_kernels(self) -> None:
        """On a CPU, take the kernels of experts away, so that loading makes them again and packs the weights."""
        for layer in self.model.modules():
            method: Any = getattr(layer, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                self._kernels[layer] = kernel
                if self._is_cpu:
                    method.moe_kernel = None

    def _return_kernels(self) -> None:
        """Give their kernels back to experts that got no weights."""
        for layer, kernel in self._kernels.items():
            method: Any = layer.quant_method
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._kernels.clear()

    def _find_passed_over(self) -> list[torch.nn.Module]:
        """Return the layers of experts, if experts were sent and none of these layers was given a weight."""
        infos = [get_layerwise_info(layer) for layer in self._kernels]
        passed_over = all(info.can_load() and info.load_numel == 0 for info in infos)
        return list(self._kernels) if self._experts_sent and passed_over else []

    def _pack_tied(self) -> None:
        """Pack tied layers again: layers that compute with the weight of an earlier layer."""
        seen: set[int] = set()
        for layer in self.model.modules():
            weight = layer._parameters.get("weight")
            if weight is not None and id(weight) in seen and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)
            seen.add(id(weight))
