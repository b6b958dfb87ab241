"""The engine of many ranks: weights, gradients and optimizer in shards, by PyTorch's FSDP2.

    ShardedModel (root)                 embedding, final norm, head     whole for a micro-batch
    └─ each decoder layer               one FSDP group each             whole while it computes
                                        │
    AdamW over the DTensors  ◄──────────┘  gradients: sums over ranks, in float32

Whatever computes with weights runs inside the root's forward pass, where the root's weights are whole and each layer's
hooks fire. Every rank makes the same passes: one without a micro-batch computes a single token and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from etude.algorithms.view import Ranks
from etude.batch import Batch, Pack
from etude.checkpoint import TensorTree
from etude.models import Model
from etude.models.lora_layers import external_name
from etude.models.transformers_backbone import decoder_layers
from etude.train.config import TrainConfig
from etude.train.forward import ForwardPass, ForwardResult, ReferenceModel
from etude.train.optim import PRECISIONS, ShardedOptimizer, StepResult
from etude.train.ranks import DistributedRanks, current_ranks, max_over_ranks

__all__ = ["FsdpBackend", "ShardedModel"]


class ShardedModel(nn.Module):
    """A model whose weights each rank holds a shard of. `run` computes with them.

    The root group holds the embedding, the final norm and the head; each decoder layer is a group of its own. Gradients
    are summed over ranks, because losses are divided by the counts of the whole update batch already.
    """

    def __init__(self, model: Model, mesh: DeviceMesh, *, compute_dtype: torch.dtype | None = None) -> None:
        """compute_dtype: the dtype of forward passes; None is that of the weights."""
        super().__init__()
        self.module: nn.Module = model.module
        self._model = [model]  # in a list, so that it is no submodule
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32 if compute_dtype else None, cast_forward_inputs=False
        )
        self.layers = decoder_layers(model.module, model.num_layers)
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self, mesh=mesh, mp_policy=policy)
        for group in self.groups():
            group.set_gradient_divide_factor(1.0)
            group.set_force_sum_reduction_for_comms(True)
        cast(FSDPModule, self).set_reduce_scatter_unused_params(True)

    @property
    def model(self) -> Model:
        """The model over the same modules."""
        return self._model[0]

    def forward(self, compute: Callable[[], Any]) -> Any:
        """Run `compute` while the root's weights are whole. It returns tensors, in a list or a dict."""
        return compute()

    def groups(self) -> Iterator[FSDPModule]:
        """The FSDP groups: the root and each layer."""
        return (each for each in self.modules() if isinstance(each, FSDPModule))

    def reshard(self) -> None:
        """Release the root's whole weights after a pass without a gradient."""
        for group in self.groups():
            group.reshard()

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, by its external name, a group at a time. Every rank consumes all of them."""
        layers = {id(layer): layer for layer in self.layers}
        names = {id(layer): name for name, layer in self.module.named_modules() if id(layer) in layers}
        yield from self._group_weights(cast(FSDPModule, self), self.module, "", skip=set(layers))
        for layer in self.layers:
            yield from self._group_weights(cast(FSDPModule, layer), layer, f"{names[id(layer)]}.", skip=set())

    def _group_weights(
        self, group: FSDPModule, module: nn.Module, prefix: str, *, skip: set[int]
    ) -> Iterator[tuple[str, Tensor]]:
        group.unshard()
        try:
            for name, weight in _named_parameters(module, prefix, skip):
                yield external_name(name), weight.detach()
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

    def __init__(
        self,
        sharded: ShardedModel,
        config: TrainConfig,
        ranks: Ranks,
        *,
        temperature: float,
        pack: Callable[[Batch], Pack],
        reference: ReferenceModel | None = None,
        option: str = "train",
    ) -> None:
        self._sharded, self.model, self.ranks, self.ranks_per_rollout = sharded, sharded.model, ranks, 1
        self.model.activation_checkpointing = config.activation_checkpointing
        self.dtype = PRECISIONS[config.precision]
        self._forward = ForwardPass(self.model, pack, temperature, reference)
        self._optimizer = ShardedOptimizer(dict(self.model.trained_weights()), config, option=option)
        self._outputs: list[Tensor] | None = None
        """The outputs of the current micro-batch whose backward pass is not made yet."""
        self._computed = False
        """True once the current micro-batch has run the model."""
        self._losses = 0
        """The losses since `zero_grad` that had a gradient."""

    @property
    def same_passes(self) -> bool:
        """True: each pass gathers weights."""
        return True

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return float(self._optimizer.scale)

    @contextmanager
    def micro_pass(self, *, backward: bool) -> Iterator[None]:
        """Frame one micro-batch, and complete what this rank did not compute of it."""
        self._outputs, self._computed = None, False
        yield
        if not self._computed:
            self._run_empty()
        if backward and self._outputs is not None:
            torch.autograd.backward(_zero(self._outputs))
        self._outputs = None
        if not backward:
            self._sharded.reshard()

    def forward(self, batch: Batch, wanted: frozenset[str], *, observations: bool = False) -> ForwardResult:
        """Compute these outputs of a micro-batch."""
        results: list[ForwardResult] = []

        def compute() -> dict[str, Tensor]:
            results.append(self._forward(batch, wanted, observations=observations))
            return results[0].columns

        if not self._forward.runs_model(batch, wanted, observations=observations):
            compute()
            return results[0]
        columns = self._sharded(compute)
        self._computed, self._outputs = True, list(columns.values())
        return ForwardResult(columns, results[0].pack, results[0].predicted)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's loss."""
        if loss.requires_grad:
            (loss * self.scale).backward()  # type: ignore[no-untyped-call]
            self._outputs, self._losses = None, self._losses + 1

    def zero_grad(self) -> None:
        """Drop every gradient."""
        self._losses = 0
        self._optimizer.zero_grad()

    def step(self, learning_rate: float) -> StepResult:
        """Clip the gradient and update the weights. Without a loss on any rank the gradient is none, not zero: weight
        decay and AdamW's moments do not act then."""
        if not max_over_ranks(self._losses, current_ranks()):
            self._optimizer.zero_grad()
        return self._optimizer.step(learning_rate)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight whole. Every rank consumes all of them."""
        return self._sharded.whole_weights()

    def state(self) -> TensorTree:
        """Return what the next update depends on, as DTensors."""
        return self._optimizer.state()

    def refresh(self) -> None:
        """Do nothing: forward passes gather the weights that the optimizer steps."""

    def assemble(self) -> None:
        """Do nothing: an engine beside shards has weights of its own."""

    def disperse(self) -> None:
        """Do nothing."""

    def offloadable_tensors(self) -> list[Tensor]:
        """The moments."""
        return self._optimizer.offloadable_tensors()

    def exchange_seconds(self) -> float:
        """Return 0: FSDP2 overlaps its exchanges, and does not tell how long it waits."""
        return 0.0

    def _run_empty(self) -> None:
        """Run one token through the model, for the exchanges of ranks that have more."""
        token = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        self._outputs = list(self._sharded(lambda: [self.model.hidden(token, token, _attend_self).sum()]))


def _attend_self(layer: int, q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Attend to the token itself alone; queries and keys enter, so that their weights get a gradient of zero."""
    del layer
    score = (q.sum() + k.sum()) * 0
    return v.repeat_interleave(q.shape[1] // k.shape[1], 1) + score


def _zero(outputs: list[Tensor]) -> Tensor:
    """A loss that is 0 and has a gradient of 0 for everything that these outputs depend on."""
    return torch.stack([output.nan_to_num().sum() * 0 for output in outputs if output.requires_grad]).sum()


def data_ranks(mesh: DeviceMesh) -> DistributedRanks:
    """The ranks of a mesh as those that hold other rollouts."""
    return DistributedRanks(mesh.get_group())
