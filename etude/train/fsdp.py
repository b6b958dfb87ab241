"""The engine of many ranks: weights, gradients and optimizer in shards, by PyTorch's FSDP2.

    ShardedModel (root)                 embedding, final norm, head     whole for a micro-batch
    └─ each decoder layer               one FSDP group each             whole while it computes
       └─ experts, on other ranks       another one, if ranks divide experts or layers
    └─ each block of a trained tower    one FSDP group each; a frozen tower is the root's
                                        │
    AdamW over the DTensors  ◄──────────┘  gradients: sums over ranks, in float32

All computation with weights runs inside the root's forward pass, where the root's weights are whole and each layer's
hooks fire. Every rank makes the same passes: one without a micro-batch computes a single token and adds nothing. One
without images, where others have some, passes a small one through a trained tower, and adds nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from etude.batch import Batch, Pack
from etude.errors import ConfigError
from etude.images.pixel_cache import PixelCache
from etude.models import Model
from etude.models.experts import find_experts
from etude.models.float32_weights import find_float32_weights
from etude.models.lora_layers import external_name
from etude.models.mixers import AloneMixer
from etude.models.published_names import expert_name
from etude.models.routes import RouteShape
from etude.models.transformers_backbone import decoder_layers
from etude.models.vision import tower_blocks
from etude.train.config import TrainConfig
from etude.train.context_parallel import refuse_undivided_heads
from etude.train.device_mesh import ShardMeshes
from etude.train.expert_parallel import choose_sharded_dimension, gather_experts, split_experts
from etude.train.forward import ComputeFn, ForwardPass, ReferenceModel
from etude.train.images import small_image, use_small_image
from etude.train.optim import PRECISIONS, ShardedOptimizer
from etude.train.split_tokens import SplitTokens
from etude.train.tensor_parallel import split_layers, sum_whole_gradients, whole_tensor


class ShardedModel(nn.Module):
    """A model whose weights each rank holds a shard of. To call it is to compute with whole weights.

    The root group holds the embedding, the final norm and the head; each decoder layer is another group. Gradients
    are summed over ranks, because losses are divided by the counts of the whole update batch already.

    Frozen weights are held in the dtype of forward passes: no optimizer step needs more of them.

    FSDP2 gives all weights of a group one dtype. So the few weights that stay in float32 in half precision are in no
    group: each rank has them whole, and `sum_gradients` adds up their gradients.
    """

    def __init__(self, model: Model, meshes: ShardMeshes, *, compute_dtype: torch.dtype | None = None) -> None:
        """meshes: of `build_mesh`. compute_dtype: the dtype of forward passes; None is that of the weights."""
        super().__init__()
        self.module: nn.Module = model.module
        self.model = model
        self.meshes = meshes
        self.compute_dtype = compute_dtype
        """The model over the same modules, the ranks that hold the shards, and the dtype of forward passes."""
        if self.meshes.tensor is not None:
            split_layers(model, self.meshes.tensor)
        if self.meshes.context is not None:
            refuse_undivided_heads(model.module.config, self.meshes.context.size(), self.meshes.tensor_size)
        self.split_tokens = None if self.meshes.tokens is None else SplitTokens(model, self.meshes)
        """The model as this rank computes it together with others that have the same rollouts."""
        if self.meshes.expert is not None:
            split_experts(model, self.meshes.expert)
        self.ranks = self.meshes.rollout_ranks
        """The ranks that hold other rollouts."""
        self._running = False
        self._computed = False
        """True once the current micro-batch has run the model."""
        self._outputs: list[Tensor] | None = None
        """The outputs of the current micro-batch whose backward pass is not made yet."""
        self.layers = decoder_layers(model.module, model.num_layers)
        self.tower = tower_blocks(model.module) if model.trains_tower else []
        """The blocks of a tower that is trained."""
        self._shows_images = False
        """True if any rank has images in the current frame."""
        self.experts = [] if self.meshes.experts is None else find_experts(model.module)
        """The experts that other ranks share than the rest of their layers."""
        self._shard()

    def _shard(self) -> None:
        """Make the FSDP groups, from the innermost to the root."""
        dtype, unsharded = self.compute_dtype, set(self._float32_weights())
        if dtype is not None:
            for weight in self.model.parameters():
                if not weight.requires_grad and weight not in unsharded:
                    weight.data = weight.data.to(dtype)
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False
        )
        for experts in self.experts:
            placement = choose_sharded_dimension(experts, self.meshes)
            fully_shard(experts, mesh=self.meshes.experts, mp_policy=policy, shard_placement_fn=placement)
        for layer in self.layers:
            fully_shard(layer, mesh=self.meshes.layers, mp_policy=policy, ignored_params=unsharded)
        for block in self.tower:
            fully_shard(block, mesh=self.meshes.layers, mp_policy=policy, ignored_params=unsharded)
        fully_shard(self, mesh=self.meshes.root, mp_policy=policy, ignored_params=unsharded)
        for group in self.groups():
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        groups = [cast(FSDPModule, group) for layer in self.layers for group in (layer, *self._experts_of(layer))]
        for group, following in pairwise(groups):  # a layer is gathered while the one before it computes
            group.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([group])

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Run `compute` while the root's weights are whole. It returns tensors, in a list or a dict."""
        return compute()

    def run(self, compute: ComputeFn) -> dict[str, Tensor]:
        """Return these outputs of the current micro-batch, computed with whole weights. Calls may be nested."""
        if self._running:
            return compute()
        self._running = True
        try:
            with use_small_image(bool(self.tower) and self._shows_images):
                outputs: dict[str, Tensor] = self(compute)
        finally:
            self._running = False
        self._computed = True
        self._outputs = list(outputs.values())
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Make the backward pass of the current micro-batch."""
        loss.backward()  # type: ignore[no-untyped-call]
        self._outputs = None

    @contextmanager
    def micro_pass(
        self, shows_images: bool = False, *, backward: bool, reference: ReferenceModel | None = None
    ) -> Iterator[None]:
        """Frame one micro-batch, and complete what this rank did not compute of it. Frames without a backward pass may
        be nested. shows_images: any rank has images in it. reference: the model that passes over the same
        micro-batch."""
        before, completed = (self._computed, self._outputs, self._shows_images), False
        self._computed = False
        self._shows_images = shows_images
        self._outputs = None
        try:
            yield
            if not self._computed:
                with torch.set_grad_enabled(backward):
                    self.run_empty(reference)
            if backward and self._outputs is not None:
                self.backward(_zero(self._outputs))
            completed = backward
        finally:
            if not completed:
                self.reset()
            if reference is not None:
                reference.release()
            self._computed, self._outputs, self._shows_images = before

    def run_empty(self, reference: ReferenceModel | None = None) -> None:
        """Run one token of each rank through the model and its head, for the exchanges of ranks that have more."""
        positions = torch.zeros(self.meshes.tensor_size, dtype=torch.int64, device=self.model.device)

        def compute() -> dict[str, Tensor]:
            hidden = self.model.hidden(positions[:1], positions, _ZeroGradients(), small_image(self.model))
            if reference is not None:
                reference.run_empty()
            return {"logits": self.model.raw_logits(hidden).sum()}

        self.run(compute)

    def _experts_of(self, layer: nn.Module) -> list[nn.Module]:
        """Return the FSDP groups within a layer."""
        return find_experts(layer) if self.experts else []

    def groups(self) -> Iterator[FSDPModule]:
        """The FSDP groups: the root, each layer, and the experts within layers."""
        return (each for each in self.modules() if isinstance(each, FSDPModule))

    def reset(self) -> None:
        """Release all whole weights and their gradients, after a pass without a gradient, or one that failed."""
        self._outputs = None
        if not cast(FSDPModule, self)._get_fsdp_state()._is_root:  # no pass was made yet
            return
        cast(FSDPModule, self).reset_iter_state()
        for group in self.groups():
            for parameters in group._get_fsdp_state()._fsdp_param_groups:
                for parameter in parameters.fsdp_params:
                    # From torch 2.15 on this is no sum of its own: it shows the gradient below.
                    if "unsharded_accumulated_grad" in vars(parameter):
                        parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None

    def sum_gradients(self) -> None:
        """Complete the gradients of all micro-batches, of which this rank may have a part."""
        if self.meshes.tensor is not None:
            complete = {id(weight) for experts in self.experts for weight in experts.parameters()}
            sum_whole_gradients(self.layers, self.meshes.tensor, complete)
        weights = [weight for weight in self._float32_weights() if weight.requires_grad]
        if not weights:
            return
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        total = self.meshes.all_ranks.all_reduce(flat)  # those of one rollout have other tokens of it
        parts = torch.split(total, [weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.view_as(weight)

    def _float32_weights(self) -> list[nn.Parameter]:
        """The weights that stay in float32 in a model of half precision."""
        if self.compute_dtype is None:
            return []
        return list(find_float32_weights(self.module, self.compute_dtype).values())

    def whole_weights(self, *, by_expert: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield a copy of every weight, whole, by its external name. Every rank consumes all of them.

        by_expert: yield experts that ranks divide one at a time, by their `expert_name`.
        """
        groups = {id(group) for group in (*self.layers, *self.experts, *self.tower)}
        names = {id(part): f"{name}." for name, part in self.module.named_modules() if id(part) in groups}
        yield from self._group_weights(cast(FSDPModule, self), self.module, "", skip=groups)
        for block in self.tower:
            yield from self._group_weights(cast(FSDPModule, block), block, names[id(block)], skip=groups)
        for layer in self.layers:
            for group in (layer, *self._experts_of(layer)):
                divided = self.meshes.expert if by_expert and group is not layer else None
                yield from self._group_weights(
                    cast(FSDPModule, group), group, names[id(group)], skip=groups, divided=divided
                )

    def whole_adapters(self) -> dict[str, Tensor]:
        """Return the adapters' weights, whole, in the dtype of forward passes. All ranks call it together."""
        adapters = dict[str, Tensor]()
        for name, weight in self.model.adapter_weights().items():
            rounded = weight.detach().to(self.compute_dtype or weight.dtype)
            assert isinstance(rounded, DTensor), "all weights are sharded between passes"
            adapters[name] = rounded.full_tensor()
        return adapters

    def _group_weights(
        self, group: FSDPModule, module: nn.Module, prefix: str, *, skip: set[int], divided: DeviceMesh | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a group. divided: the ranks that divide its experts, to yield them one at a time."""
        group.unshard()
        try:
            for name, weight in _named_parameters(module, prefix, skip):
                if divided is None:
                    yield external_name(name), whole_tensor(weight)
                    continue
                for expert, part in enumerate(gather_experts(weight, divided)):
                    yield expert_name(external_name(name), expert), part
        finally:
            group.reshard()


def _named_parameters(module: nn.Module, prefix: str, skip: set[int]) -> list[tuple[str, nn.Parameter]]:
    """The parameters of a module and its submodules without those in `skip`, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}

    def visit(part: nn.Module, name: str) -> None:
        for leaf, parameter in part._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (name + leaf, parameter))
        for child, inner in part.named_children():
            if id(inner) not in skip:
                visit(inner, f"{name}{child}.")

    visit(module, prefix)
    return list(found.values())


class FsdpBackend:
    """A `Backend` over a `ShardedModel`."""

    is_sharded = True

    def __init__(
        self,
        sharded: ShardedModel,
        config: TrainConfig,
        *,
        temperature: float,
        pack: Callable[[Batch], Pack],
        reference: ReferenceModel | None = None,
        option: str = "train",
        routes: RouteShape | None = None,
        pixels: PixelCache | None = None,
    ) -> None:
        _check_options(sharded, config, option)
        self._sharded = sharded
        self._reference = reference
        self.model = sharded.model
        self.ranks = sharded.ranks
        self.all_ranks = sharded.meshes.all_ranks
        self.ranks_per_rollout = sharded.meshes.ranks_per_rollout
        self.model.activation_checkpointing = config.activation_checkpointing
        self.dtype = PRECISIONS[config.precision]
        if config.compile is True:
            self.model.compile_layers()
        self.forward = ForwardPass(
            self.model, pack, temperature, reference, sharded.split_tokens, sharded.run, routes, pixels
        )
        self.optimizer = ShardedOptimizer(
            dict(self.model.trained_weights()),
            config,
            self.all_ranks,
            rollout_ranks=self.ranks,
            sum_gradients=sharded.sum_gradients,
            option=option,
        )

    def micro_pass(
        self, wanted: frozenset[str], shows_images: bool = False, *, backward: bool
    ) -> AbstractContextManager[None]:
        """Frame one micro-batch, and complete what this rank did not compute of it."""
        reference = self._reference if "full_kl" in wanted else None
        return self._sharded.micro_pass(shows_images, backward=backward, reference=reference)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        if loss.requires_grad:
            self._sharded.backward(loss * float(self.optimizer.scale))
            self.optimizer.losses += 1

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight whole. Every rank consumes all of them."""
        return self._sharded.whole_weights()

    def merged_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight of the equal model without adapters, whole. Every rank consumes all of them."""
        return self.model.merged_weights(self._sharded.whole_weights(by_expert=True))

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapters' weights, whole. All ranks call it together."""
        return self._sharded.whole_adapters()


def _check_options(sharded: ShardedModel, config: TrainConfig, option: str) -> None:
    """Refuse options that sharded weights do not have."""
    if config.compile is True and config.activation_checkpointing == "selective":
        raise ConfigError(
            f"`{option}.activation_checkpointing=selective` keeps the products of a layer, and does not see those of "
            f"layers that `{option}.compile` compiles. Set `{option}.activation_checkpointing=none`: compiled layers "
            f"keep fewer activations than others. Or set `full`."
        )
    if config.compile is True and sharded.meshes.tensor is not None:
        raise ConfigError(
            f"`{option}.compile` does not compile layers that `mesh.tensor={sharded.meshes.tensor_size}` splits: "
            f"torch cannot trace the backward pass of their exchanges for packs of any length. Set `mesh.tensor=1`, or "
            f"leave `{option}.compile` out."
        )
    stored = torch.promote_types(PRECISIONS[config.precision], torch.float32)
    for name, weight in sharded.model.trained_weights():
        if weight.dtype != stored:
            raise ConfigError(
                f"`{option}.precision={config.precision}` trains shards in {stored}, and `{name}` was loaded in "
                f"{weight.dtype}. Load it in that dtype, or choose another precision."
            )


class _ZeroGradients(AloneMixer):
    """A mixer for a token alone, in which all that the layers pass gets a gradient of zero."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **_: object
    ) -> Tensor:
        unused = [q, k] if sinks is None else [q, k, sinks]
        scores = torch.stack([(x * 0).sum() for x in unused])  # a sum of the values may be infinite in fp16
        return super().__call__(layer, q, k, v) + scores.sum()


def _zero(outputs: list[Tensor]) -> Tensor:
    """A loss that is 0 and has a gradient of 0 for everything that these outputs depend on."""
    return torch.stack([output.nan_to_num().sum() * 0 for output in outputs if output.requires_grad]).sum()
