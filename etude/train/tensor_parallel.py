"""Tensor parallelism: the ranks that compute the same rollouts split each layer's heads and inner width.

    own tokens ──norm──► gathered ──q, k, v (own heads), attention, o──► summed, own tokens ──norm──► gathered ──►
                                          gate, up (own width), down──► summed, own tokens

Between the products of a layer, each rank has an equal part of the pack's tokens; see `split_tokens`. Nothing is
computed twice, so gradients of the norms, which every rank has whole, are sums over ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from etude.errors import ConfigError
from etude.models import Model
from etude.models.experts import find_experts
from etude.models.transformers_backbone import decoder_layers
from etude.train.ranks import DistributedRanks

SPLIT = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The linear maps of a layer that ranks split."""
NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms over the width of one head. Not every family has them."""


def split_layers(model: Model, mesh: DeviceMesh) -> None:
    """Split the layers of a model over the `tensor` dimension of a mesh. Its weights may be on the meta device.

    Each rank keeps its part of the values that it has. The norms stay as they are: each rank applies them to its own
    tokens or its own heads, and `sum_whole_gradients` adds up their gradients.
    """
    refuse_unsplittable(model, mesh.size())
    own_tokens, all_tokens = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": own_tokens}, desired_input_kwarg_layouts={"hidden_states": all_tokens}
        ),
        "mlp": PrepareModuleInput(input_layouts=own_tokens, desired_input_layouts=all_tokens),
    }
    for name in SPLIT:
        closes = name.endswith(("o_proj", "down_proj"))
        plan[name] = RowwiseParallel(output_layouts=own_tokens) if closes else ColwiseParallel()
    attention = {name: style for name, style in plan.items() if not name.startswith("mlp")}
    for layer in decoder_layers(model.module, model.num_layers):  # a mixture computes each rank's own tokens
        parallelize_module(layer, mesh, attention if find_experts(layer) else plan, src_data_rank=None)


def refuse_unsplittable(model: Model, tensor: int) -> None:
    """Refuse a model whose layers so many ranks cannot split. Its weights may be on the meta device."""
    if model.has_adapters:
        raise ConfigError(
            f"`mesh.tensor={tensor}` splits the weights of each layer, and adapters are not split. Set "
            f"`mesh.tensor=1`: the weights are then sharded over all ranks. Or train without adapters."
        )
    kind = model.module.config.model_type
    for layer in decoder_layers(model.module, model.num_layers):
        odd = _odd_weight(layer, model.heads.width)
        if odd:
            raise ConfigError(
                f"`mesh.tensor={tensor}` splits layers like those of the Llama, Mistral, Qwen2 and Qwen3 families, and "
                f"a layer of this {kind} model {odd}. Set `mesh.tensor=1`: the weights are then sharded over all ranks."
            )
    sizes = {
        "query heads": model.heads.query_heads,
        "key heads": model.heads.key_heads,
        "units of inner width": model.module.config.get_text_config().intermediate_size,
    }
    for what, size in sizes.items():
        if size % tensor:
            fit = max(n for n in range(1, tensor) if not any(each % n for each in sizes.values()))
            raise ConfigError(
                f"`mesh.tensor={tensor}` gives each rank an equal part of every layer, and {size} {what} over {tensor} "
                f"ranks are {size / tensor:.4g} each. Choose a number that divides them, such as {fit}."
            )


def sum_whole_gradients(layers: Iterable[nn.Module], mesh: DeviceMesh, complete: Collection[int] = ()) -> None:
    """Add up, over the `tensor` ranks, the gradients of the layers' weights that each of them has whole.

    They are those of the norms and routers. Each rank applied them to its own tokens, or to its own heads.
    complete: the identities of weights whose gradients are sums over these ranks already.
    """
    gradients = [
        parameter.grad.to_local()
        for layer in layers
        for parameter in layer.parameters()
        if id(parameter) not in complete
        and isinstance(parameter.grad, DTensor)
        and "tensor" not in (parameter.grad.device_mesh.mesh_dim_names or ())
    ]
    if not sum(gradient.numel() for gradient in gradients):
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    total = DistributedRanks(mesh.get_group()).all_reduce(flat)
    parts = torch.split(total, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def whole_tensor(weight: Tensor) -> Tensor:
    """Return a copy of a weight of an unsharded group, brought together over the `tensor` ranks that split it."""
    weight = weight.detach()
    if not isinstance(weight, DTensor):
        return weight.clone()
    if all(placement.is_replicate() for placement in weight.placements):  # its `full_tensor` would be no copy
        return weight.to_local().clone()
    return weight.full_tensor()


def _odd_weight(layer: nn.Module, head_dim: int) -> str:
    """Return what a layer has besides the known weights, or lacks of them; "" if it is as expected."""
    shapes = {name: parameter.shape for name, parameter in layer.named_parameters()}
    known = {f"{name}.weight" for name in (*SPLIT, *NORMS)}
    if find_experts(layer):
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")}
        known = {name for name in known if not name.startswith("mlp.")}
    optional = {f"{name}.bias" for name in SPLIT} | {f"{name}.weight" for name in HEAD_NORMS}
    for name in sorted(shapes.keys() - known - optional):
        return f"has `{name}` besides"
    for name in sorted(known - shapes.keys()):
        return f"has no `{name}`"
    for name in HEAD_NORMS:
        shape = shapes.get(f"{name}.weight", (head_dim,))
        if tuple(shape) != (head_dim,):
            return f"has a `{name}` over {shape[0]} numbers instead of the {head_dim} of one head"
    return ""
