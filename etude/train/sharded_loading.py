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

__all__ = ["create_shards", "load_sharded"]


def load_sharded(
    directory: Path,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    device: torch.device | None = None,
    head: Head = "language",
    prepare: Callable[[Model], Model] = lambda model: model,
) -> ShardedModel:
    """Load the model of a Hugging Face directory, on every rank its shards. All ranks call it together.

    It computes in `dtype`. Frozen weights are stored in it too; trained weights are stored in float32 or wider.
    prepare: attaches adapters to the model on meta, or freezes parts or all of it.
    """
    model = create_on_meta(directory, dtype=dtype, head=head)
    files = WeightFiles(directory, model.module.base_model_prefix)
    _check_files(files, model, directory, head)
    model = prepare(model)
    created = {**_take_values(model.module), **model.take_float32_weights()}
    sharded = create_shards(model, mesh, dtype, device or torch.device(mesh.device_type))
    for name, weight in model.named_weights():
        _fill(weight, name, created, files)
    if not supports_fused(model.module):
        _verify(sharded)
    return sharded


def create_shards(model: Model, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device) -> ShardedModel:
    """Shard a model on meta, and give the shards memory without values. dtype: that of forward passes."""
    _widen_trained(model.module)
    is_half = dtype != torch.promote_types(dtype, torch.float32)
    sharded = ShardedModel(model, mesh, compute_dtype=dtype if is_half else None)
    sharded.to_empty(device=device)
    restore_buffers(model.module)
    return sharded


def _check_files(files: WeightFiles, model: Model, directory: Path, head: Head) -> None:
    """Refuse files that lack a weight of the model, or hold it in another shape."""
    shapes = {name: tuple(weight.shape) for name, weight in model.named_weights()}
    if SCORE_HEAD in shapes and SCORE_HEAD not in files and allows_new_head(directory, head):
        del shapes[SCORE_HEAD]
    files.check(shapes)


def _take_values(module: nn.Module) -> dict[str, Tensor]:
    """Move new adapters to meta, as the other weights are; return their first values by external names."""
    values = {external_name(name): weight.detach() for name, weight in module.named_parameters() if not weight.is_meta}
    _replace_parameters(module, lambda weight: weight.to("meta"))
    return values


def _widen_trained(module: nn.Module) -> None:
    """Store trained weights in float32 at least, because an optimizer steps them."""
    _replace_parameters(
        module,
        lambda weight: weight.to(torch.promote_types(weight.dtype, torch.float32)) if weight.requires_grad else weight,
    )


def _replace_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter by what `change` returns for its values. Tied parameters stay tied."""
    replaced: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for leaf, weight in part._parameters.items():
            if weight is None:
                continue
            if id(weight) not in replaced:
                changed = change(weight.detach().requires_grad_(weight.requires_grad))
                replaced[id(weight)] = nn.Parameter(changed.detach(), requires_grad=weight.requires_grad)
            part._parameters[leaf] = replaced[id(weight)]


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
