"""Loading a model in shards: each rank reads its own rows of every weight, and never holds a whole model.

config.json ──► model on meta ──► layers in FSDP groups ──► memory for own shards ──► own rows of the files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from etude.models import Head, Model
from etude.models.fused_layers import supports_fused
from etude.models.loading import SCORE_HEAD, allows_new_head, create_on_meta, restore_buffers
from etude.models.lora_layers import external_name
from etude.models.weight_files import WeightFiles
from etude.train.fsdp import ShardedModel

__all__ = ["load_sharded"]


def load_sharded(
    directory: Path,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    head: Head = "language",
    prepare: Callable[[Model], Model] = lambda model: model,
) -> ShardedModel:
    """Load the model of a Hugging Face directory, on every rank its shards. All ranks call it together.

    dtype: the dtype of the weights; compute_dtype: that of forward passes, if another. prepare: attaches adapters to
    the empty model, or freezes parts of it.
    """
    model = create_on_meta(directory, dtype=dtype, head=head)
    files = WeightFiles(directory, model.module.base_model_prefix)
    _check_files(files, model, directory, head)
    model = prepare(model)
    created = _take_values(model.module)
    sharded = ShardedModel(model, mesh, compute_dtype=compute_dtype)
    sharded.to_empty(device=device or torch.device(mesh.device_type))
    restore_buffers(model.module)
    for name, weight in model.named_weights():
        _fill(weight, name, created, files)
    if not supports_fused(model.module):
        _verify(sharded)
    return sharded


def _check_files(files: WeightFiles, model: Model, directory: Path, head: Head) -> None:
    """Refuse files that lack a weight of the model, or hold it in another shape."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_weights()}
    if SCORE_HEAD in shapes and SCORE_HEAD not in files and allows_new_head(directory, head):
        del shapes[SCORE_HEAD]
    files.check(shapes)


def _take_values(module: nn.Module) -> Mapping[str, Tensor]:
    """Move new adapters to meta, as the other weights are; return their first values by external names."""
    values = {external_name(name): weight.detach() for name, weight in module.named_parameters() if not weight.is_meta}
    for part in module.modules():
        for leaf, weight in part._parameters.items():
            if weight is not None and not weight.is_meta:
                part._parameters[leaf] = nn.Parameter(weight.to("meta"), requires_grad=weight.requires_grad)
    return values


@torch.no_grad()
def _fill(weight: Tensor, name: str, created: Mapping[str, Tensor], files: WeightFiles) -> None:
    """Write this rank's part of a weight: from the new adapters, from the files, or zeros for a new head."""
    assert isinstance(weight, DTensor), f"{name} is sharded"
    local = weight.to_local()
    shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    if name in created:
        for dimension, (first, length) in enumerate(zip(offset, shape, strict=True)):
            created = {name: created[name].narrow(dimension, first, length)}
        local.copy_(created[name])
    elif name in files:
        local.copy_(files.read(name, offset, shape, local.dtype))
    else:
        local.zero_()


def _verify(sharded: ShardedModel) -> None:
    """Run a family whose layers are not written here once, as it will be run, and release what that made whole."""

    def verify() -> dict[str, Tensor]:
        sharded.model.verify(sharded.meshes.ranks_per_rollout)
        return {}

    try:
        sharded(verify)
    finally:
        sharded.reset()
