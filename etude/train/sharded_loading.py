"""Loading a model in shards: each rank reads its own rows of every weight, and never holds a whole model.

config.json ──► model on meta ──► layers in FSDP groups ──► memory for own shards ──► own rows of the files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from etude.errors import ConfigError
from etude.models import Head, Model
from etude.models.fused_layers import supports_fused
from etude.models.loading import SCORE_HEAD, allows_new_head, create_on_meta, load, restore_buffers
from etude.models.lora_layers import external_name
from etude.models.model import copy_stored_buffers, stored_buffers
from etude.models.weight_files import WeightFiles
from etude.observe import get_logger
from etude.train.device_mesh import ShardMeshes
from etude.train.fsdp import ShardedModel
from etude.train.optim import local_part

LANGUAGE_HEAD = "lm_head.weight"
"""The name of a language model's head in most families."""


def load_sharded(
    directory: Path,
    meshes: ShardMeshes,
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
    weights = _open_weights(directory, model, dtype, head)
    model = prepare(model)
    created = {**_take_values(model.module), **model.take_float32_weights()}
    sharded = create_shards(model, meshes, dtype, device or torch.device(meshes.device_type))
    for name, weight in model.named_weights():
        _fill(weight, name, created, weights)
    if isinstance(weights, _WholeModel):
        weights.copy_buffers(model.module)
    else:
        for name, buffer in stored_buffers(model.module).items():
            buffer.copy_(weights.read(name, [0] * buffer.ndim, buffer.shape))
    if not supports_fused(model.module):
        _verify(sharded)
    return sharded


def create_shards(model: Model, meshes: ShardMeshes, dtype: torch.dtype, device: torch.device) -> ShardedModel:
    """Shard a model on meta, and give the shards memory without values. dtype: that of forward passes."""
    _widen_trained(model.module)
    is_half = dtype != torch.promote_types(dtype, torch.float32)
    sharded = ShardedModel(model, meshes, compute_dtype=dtype if is_half else None)
    sharded.to_empty(device=device)
    restore_buffers(model.module)
    return sharded


def _open_weights(directory: Path, model: Model, dtype: torch.dtype, head: Head) -> WeightFiles | _WholeModel:
    """Return the weights of a directory, to be read in blocks.

    Blocks need files that store the model's own weights, or its experts one by one. Transformers reads others, whole
    on every rank. Such files hold other weights that the model fuses, quantized ones, or a head besides a tied one.
    """
    shapes = {name: tuple(weight.shape) for name, weight in model.named_weights()}
    files = WeightFiles(directory, model.module)
    if SCORE_HEAD in shapes and SCORE_HEAD not in files and allows_new_head(directory, head):
        del shapes[SCORE_HEAD]
    config = model.module.config
    buffers = {name: tuple(buffer.shape) for name, buffer in stored_buffers(model.module).items()}
    has_second_head = config.tie_word_embeddings and LANGUAGE_HEAD in files
    is_quantized = getattr(config, "quantization_config", None) is not None
    if files.fit(shapes | buffers) and not (has_second_head or is_quantized):
        return files
    whole = _WholeModel(load(directory, dtype=torch.promote_types(dtype, torch.float32), head=head))
    if any(name not in shapes and name != SCORE_HEAD for name in whole.weights):
        raise ConfigError(
            f"The files in {directory} have a head of their own (`{LANGUAGE_HEAD}`), and its config.json ties the head "
            "to the embedding. Set `tie_word_embeddings` to false there."
        )
    get_logger("train").warning(
        "The weight files of this %s model are read whole on every rank, because their weights are stored in another "
        "form than the model's.",
        config.model_type,
    )
    return whole


class _WholeModel:
    """The weights of a model that was loaded whole."""

    def __init__(self, model: Model) -> None:
        self.weights = dict(model.named_weights())
        self._module = model.module

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the block of a weight that begins at `offset` and has this shape."""
        return _block(self.weights[name].detach(), offset, shape)

    def copy_buffers(self, module: nn.Module) -> None:
        """Copy the buffers that files store into the same model in shards."""
        copy_stored_buffers(self._module, module)

    def __contains__(self, name: str) -> bool:
        return name in self.weights


def _block(tensor: Tensor, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dimension, (first, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dimension, first, length)
    return tensor


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
def _fill(weight: Tensor, name: str, created: Mapping[str, Tensor], weights: WeightFiles | _WholeModel) -> None:
    """Write this rank's part of a weight: from the new adapters, from the files, or zeros for a new head."""
    local = local_part(weight)
    shape, offset = tuple(weight.shape), (0,) * weight.ndim
    if isinstance(weight, DTensor):
        shape, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    if not local.numel():
        return
    if name in created:
        local.copy_(_block(created[name], offset, shape))
    elif name in weights:
        local.copy_(weights.read(name, offset, shape))
    else:
        local.zero_()


def _verify(sharded: ShardedModel) -> None:
    """Run a family whose layers are not written here once, as it will be run, and release what that made whole."""

    def verify() -> dict[str, Tensor]:
        sharded.model.verify(sharded.meshes.tensor_size)
        return {}

    try:
        sharded(verify)
    finally:
        sharded.reset()
