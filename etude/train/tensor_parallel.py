"""Tensor parallelism: the ranks that compute the same rollouts split each layer's heads and inner width.

    own tokens ──norm──► gathered ──q, k, v (own heads), attention, o──► summed, own tokens ──norm──► gathered ──►
                                          gate, up (own width), down──► summed, own tokens

Between the products of a layer, each rank has an equal part of the pack's tokens; see `split_tokens`. Nothing is
computed twice, so gradients of the norms, which every rank has whole, are sums over ranks.

    gathered ──A, whole──► r numbers ──B, own rows──► own outputs        an adapter of q, k, v, gate or up
    own inputs ──A, own columns──► summed, own tokens ──B, whole──►      an adapter of o or down

An adapter's whole factor has a part of its gradient on each rank too: from own outputs, or from own tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import linear

from etude.errors import ConfigError
from etude.models import Model
from etude.models.experts import find_experts
from etude.models.lora_layers import ADAPTER, external_name, is_adapted
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
    gather: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": own_tokens}, desired_input_kwarg_layouts={"hidden_states": all_tokens}
        ),
        "mlp": PrepareModuleInput(input_layouts=own_tokens, desired_input_layouts=all_tokens),
    }
    for layer in decoder_layers(model.module, model.num_layers):
        parts = ("self_attn",) if find_experts(layer) else ("self_attn", "mlp")  # a mixture computes own tokens
        plan = {part: gather[part] for part in parts}
        for name in SPLIT:
            if name.startswith(parts):
                _plan_linear(plan, name, layer.get_submodule(name), mesh)
        parallelize_module(layer, mesh, plan, src_data_rank=None)


def _plan_linear(plan: dict[str, ParallelStyle], name: str, part: Any, mesh: DeviceMesh) -> None:
    """Add a linear map of a layer to its plan, and split the map's adapter, if it has one."""
    sums = name.endswith(("o_proj", "down_proj"))
    style = RowwiseParallel(output_layouts=Shard(1)) if sums else ColwiseParallel()
    if not is_adapted(part):
        plan[name] = style
        return
    plan[f"{name}.base_layer"] = style
    first: nn.Linear = part.lora_A[ADAPTER]
    second: nn.Linear = part.lora_B[ADAPTER]
    if sums:
        plan[f"{name}.lora_A.{ADAPTER}"] = RowwiseParallel(output_layouts=Shard(1))
        return
    first.register_forward_pre_hook(_to_local)
    own = distribute_tensor(second.weight.detach(), mesh, [Shard(0)], src_data_rank=None)
    second.weight = nn.Parameter(own, requires_grad=second.weight.requires_grad)
    second.forward = MethodType(_compute_own_rows, second)  # type: ignore[method-assign]


def _to_local(_: nn.Module, inputs: tuple[DTensor, ...]) -> Tensor:
    """Give a whole factor the gathered tokens. Its rank's part of their gradient comes from own outputs only."""
    (gathered,) = inputs
    return gathered.to_local(grad_placements=[Partial()])


def _compute_own_rows(factor: nn.Linear, x: Tensor) -> Tensor:
    """[…, r], the same on all ranks → […, own outputs]. The gradients of the input stay parts of a sum."""
    assert isinstance(factor.weight, DTensor), "ranks split its rows"
    return linear(x, factor.weight.to_local())


def refuse_unsplittable(model: Model, tensor: int) -> None:
    """Refuse a model whose layers so many ranks cannot split. Its weights may be on the meta device."""
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

    They are those of norms, of routers, and of factors of adapters. Each rank applied them to its own tokens, or has
    the gradient from its own heads or units.
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
    named = ((external_name(name), parameter) for name, parameter in layer.named_parameters())
    shapes = {name: parameter.shape for name, parameter in named if ".lora_" not in name}
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
