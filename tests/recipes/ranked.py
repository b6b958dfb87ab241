"""A policy of a tiny model on every rank of a crew, built again for each test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, count
from pathlib import Path
from types import MethodType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from etude.algorithms import AlgorithmConfig, Denominators, Loss, LossValue, Outputs
from etude.algorithms.losses.preference import DPO
from etude.algorithms.losses.supervised import SFT
from etude.batch import Batch
from etude.checkpoint import Checkpoint, CheckpointManager
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig
from etude.dispatch.process_crew import ProcessCrew
from etude.errors import TrainingError
from etude.images.pixel_cache import PixelCache
from etude.models import (
    Head,
    LoraAdapterConfig,
    Model,
    PackedAttention,
    adapt,
    compiled_layers,
    create,
    load,
    tiny_config,
)
from etude.observe import Metrics
from etude.protocols import Gather, Split, dispatch_mode
from etude.recipes.run.builders.policy import choose_trained
from etude.recipes.run.roles import POLICY_COLUMNS, REFERENCE_COLUMNS
from etude.recipes.supervised.worker import annotate_with_reference
from etude.recipes.workers.policy_worker import AuxiliaryModels, LossObjective, PolicyWorker
from etude.rollout import TorchEngine, TorchEngineConfig
from etude.train import FrozenModel, Learner, MeshConfig, PolicyTrainConfig, RoutedModels
from etude.train.backend import HeldModel
from etude.train.device_mesh import ShardMeshes, build_mesh
from etude.train.fsdp import ShardedModel
from etude.train.memory import OffloadedTensors
from etude.train.optim import PRECISIONS
from etude.train.sharded_loading import load_sharded
from tests.families import family_model
from tests.train.tasks import VOCABULARY, Imitate, model

COLLECTIVES = {
    "c10d::_allgather_base_": "gathers",
    "c10d::_reduce_scatter_base_": "reduces",
    "c10d::allgather_into_tensor_coalesced_": "tensor_gathers",
    "c10d::reduce_scatter_tensor_coalesced_": "tensor_reduces",
    "c10d::allgather_": "small_gathers",
    "c10d::allreduce_": "sums",
    "c10d::alltoall_base_": "exchanges",
}
"""The names of collective calls in a profile: of weights and gradients, of tokens along `context` and `tensor`, the
others, and of tokens and heads along `context` and `expert`."""


class RankPolicy:
    """One rank of the crew."""

    def __init__(self) -> None:
        self.start()

    @dispatch_mode()
    def start(
        self,
        precision: str = "fp64",
        algorithm: AlgorithmConfig | None = None,
        epochs: int = 1,
        *,
        policy: Callable[[str], Model] = model,
        mesh: MeshConfig | None = None,
        engine: Literal["local", "fsdp"] = "local",
        offload_activations: bool = False,
        compiler: str = "aot_eager",
        pixels: Callable[[], PixelCache] | None = None,
        **options: Any,
    ) -> None:
        """Build a new policy. The learning rate is high enough to see its effect.

        compiler: the compiler of layers with `compile`; the default one traces as torch's own does, in less time.
        pixels: makes those of the images of batches.
        """
        compiled_layers.BACKEND = compiler
        config = PolicyTrainConfig(precision=precision, **{"learning_rate": 1e-2, "max_grad_norm": 0.5, **options})
        stored_precision = {"bf16": "fp32", "fp16": "fp32"}.get(precision, precision) if engine == "fsdp" else precision
        trained_model = policy(stored_precision)
        uses_reference = "full_kl" in (algorithm or AlgorithmConfig()).forward_outputs()
        held: HeldModel = trained_model
        other_model: HeldModel = trained_model if trained_model.has_adapters else model(precision, seed=7)
        compute_device = None
        if engine == "fsdp":
            held = sharded(trained_model, PRECISIONS[precision], mesh)
            sizes = {"seed": 7, "kv_heads": trained_model.heads.key_heads}
            other_model = (
                held
                if trained_model.has_adapters
                else sharded(unfused_model(precision, partial(model, **sizes)), mesh=mesh)
            )
            compute_device = torch.device("cpu") if not trained_model.has_adapters and not uses_reference else None
        self.reference = FrozenModel(
            other_model, 50, disable_adapters=trained_model.has_adapters, compute_device=compute_device
        )
        reference = self.reference if uses_reference else None
        self.held = held
        read = None if pixels is None else pixels()
        self.learner = Learner(held, config, steps=20, peak=1e12, reference=reference, pixels=read)
        if offload_activations:
            self.learner.model.activation_checkpointing = "offload"  # the option itself is refused without a GPU
        auxiliary = AuxiliaryModels({"ref_logp": self.reference})
        self.worker = PolicyWorker(
            algorithm or AlgorithmConfig(), self.learner, seed=0, ppo_epochs=epochs, auxiliary=auxiliary
        )
        self.columns = (algorithm or AlgorithmConfig()).required_columns() & (POLICY_COLUMNS | REFERENCE_COLUMNS) | {
            "old_logp"
        }
        self.columns |= {"routes"} if config.router_replay == "r2" else set()
        self.step = 0

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with the algorithm's columns and its advantages."""
        batch = self.worker.annotate(batch, self.columns)
        self.step += 1
        return self.worker.estimate(batch, self.step)

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, parts: list[Batch]) -> Metrics:
        """Make an update on each batch."""
        return self.worker.update(parts)

    @dispatch_mode(Split.GROUPS)
    def fail_twice(self, batch: Batch) -> None:
        """Run out of memory in the second micro-batch of an update: in its loss, and then in its backward pass."""
        for backward in (False, True):
            with suppress(TrainingError):
                self.learner.update(batch, OutOfMemory(SFT(), backward=backward))
                raise AssertionError("memory did not run out")

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def measure(self, batch: Batch) -> Metrics:
        """Measure the loss of preferences, with the reference's log-probs computed per micro-batch."""
        annotate = annotate_with_reference(self.reference)
        return self.learner.measure(batch, LossObjective(DPO()), annotate)

    @dispatch_mode(gather=Gather.ALL)
    def has_only_shards(self) -> list[bool]:
        """Return true if the policy and the reference hold no whole weight."""
        weights = (*self.learner.model.parameters(), *self.reference.model.parameters())
        return all(isinstance(weight, DTensor) for weight in weights)  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def weight_dtypes(self) -> list[dict[str, torch.dtype]]:
        """Return the dtype of each weight of the model."""
        return {name: weight.dtype for name, weight in self.learner.model.named_weights()}  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def offloads_moments(self) -> list[bool]:
        """Return true if offload moves the moments to other memory, and loading them keeps their values."""
        moments = cast(Mapping[str, Any], self.learner.state()["exp_avg"])
        before = {name: _local(moment).clone() for name, moment in moments.items()}
        addresses = {name: _local(moment).data_ptr() for name, moment in moments.items()}
        offloaded = OffloadedTensors(
            self.learner._backend.optimizer.offloadable_tensors(), torch.device("cpu"), torch.device("cpu")
        )
        moved = all(_local(moment).data_ptr() != addresses[name] for name, moment in moments.items())
        with offloaded.loaded():
            return moved and all(torch.equal(_local(m), before[name]) for name, m in moments.items())  # type: ignore[return-value]

    @dispatch_mode(Split.GROUPS)
    def fail_in_reference(self, batch: Batch) -> None:
        """Run out of memory at the reference's logits in the second micro-batch of an update: in its forward pass, and
        then in its backward pass."""
        logits = self.reference.logits
        for call in (3, 4):
            calls = count(1)

            def failing(hidden: Tensor, calls: Iterator[int] = calls, call: int = call) -> Tensor:
                if next(calls) == call:
                    raise MemoryError
                return logits(hidden)

            self.reference.logits = failing  # type: ignore[method-assign]
            with suppress(TrainingError):
                self.learner.update(batch, self.worker._objective)
                raise AssertionError("memory did not run out")
        self.reference.logits = logits  # type: ignore[method-assign]

    @dispatch_mode(Split.GROUPS)
    def fail_in_first_layer(self, batch: Batch) -> None:
        """Run out of memory in the first layer's attention in the second micro-batch of an update."""
        attend, calls = PackedAttention.__call__, count(0)

        def failing(attention: PackedAttention, *args: Any, **more: Any) -> Tensor:
            if next(calls) == self.learner.model.num_layers:
                raise MemoryError
            return attend(attention, *args, **more)

        PackedAttention.__call__ = failing  # type: ignore[method-assign,assignment]
        try:
            with suppress(TrainingError):
                self.learner.update(batch, Imitate(SFT()))
                raise AssertionError("memory did not run out")
        finally:
            PackedAttention.__call__ = attend  # type: ignore[method-assign]

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def supervised_update(self, batch: Batch, num_actions: int | None = None, loss: Loss | None = None) -> Metrics:
        """Make a supervised update on the first `num_actions` action tokens, or on all."""
        action = batch.action & (batch.action.cumsum(0) <= (batch.num_tokens if num_actions is None else num_actions))
        return self.learner.update(batch.replace(action=action), Imitate(loss or SFT()))

    @dispatch_mode(gather=Gather.ALL)
    def count_collectives(self, batch: Batch) -> list[dict[str, int]]:
        """Return the number of collective calls of an update, by kind. Every rank has the whole batch."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            metrics = self.learner.update(batch, Imitate(SFT()))
        results = profiler.profiler.kineto_results  # type: ignore[union-attr]
        called = Counter(event.name() for event in results.events())
        counts = {kind: called[name] for name, kind in COLLECTIVES.items()}
        return counts | {"micro_batches": int(metrics.reduce()["micro_batches"])}  # type: ignore[return-value]

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch, columns: frozenset[str]) -> Batch:
        """Return the batch with these columns."""
        return self.learner.annotate(batch, columns)

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def annotate_with_teacher(self, batch: Batch) -> Batch:
        """Return the batch with the reference's log-probs, and with its likeliest tokens as a teacher's."""
        ids, logp = self.reference.top_tokens(batch, 4, VOCABULARY)
        annotated = self.worker.annotate(batch, frozenset({"ref_logp"}))
        return annotated.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def annotate_with_two_teachers(self, batch: Batch) -> Batch:
        """Return the batch with what two teachers compute: the reference for `code`, the policy for `math`."""
        teachers = RoutedModels({"code": self.reference, "math": FrozenModel(self.held, 50)})
        ids, logp = teachers.top_tokens(batch, 4, VOCABULARY)
        return batch.replace(teacher_logp=teachers.logp(batch), teacher_topk_ids=ids, teacher_topk_logp=logp)

    @dispatch_mode()
    def gradient(self) -> dict[str, Tensor]:
        """Return the gradient of the first update, gathered from all ranks; correct if it was not clipped."""
        moments = self.learner.state()["exp_avg"]
        assert isinstance(moments, Mapping)
        return {name: _whole(moment) / (1 - 0.9) for name, moment in moments.items()}

    @dispatch_mode(gather=Gather.ALL)
    def weights(self) -> list[dict[str, Tensor]]:
        """Return the weights that every rank computes with."""
        return {name: weight.clone() for name, weight in self.learner.weights()}  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def count_master_elements(self) -> list[int]:
        """Return the number of elements of the master weights that each rank holds."""
        masters = self.learner.state()["weights"]
        assert isinstance(masters, Mapping)
        return sum(_local(weight).numel() for weight in masters.values())  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def load_weights(
        self, directory: Path, head: Head = "language", lora: int = 0, mesh: MeshConfig | None = None
    ) -> list[dict[str, Tensor]]:
        """Load a directory in shards, and return the whole weights."""
        return dict(_load_sharded(directory, mesh or MeshConfig(), head, lora).whole_weights())  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def measure_loading(self, directory: Path, mesh: MeshConfig | None = None) -> list[dict[str, int]]:
        """Return the peak of allocated bytes while loading, the bytes of the shards, and those of the largest weight.

        The profile counts mapped files as allocations of their size; they are left out.
        """
        files = {file.stat().st_size for file in directory.glob("*.safetensors")}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            weights = [
                weight
                for _, weight in _load_sharded(directory, mesh or MeshConfig(), "language", 0).model.named_weights()
            ]
        results = profiler.profiler.kineto_results  # type: ignore[union-attr]
        events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns())
        changes = [event.nbytes() for event in events if abs(event.nbytes()) not in files]
        counts = {"peak": max(accumulate(changes)), "shards": sum(_local(weight).nbytes for weight in weights)}
        return counts | {"largest": max(weight.numel() * weight.itemsize for weight in weights)}  # type: ignore[return-value]

    @dispatch_mode()
    def write_files(self, directory: Path) -> int:
        """Write the merged policy, the policy without adapters, and the adapters; return the adapters' rank."""
        self.worker.write_model(directory / "merged", directory, untied=True)
        self.worker.write_model(directory / "bare", directory, untied=False, bare=True)
        self.worker.write_adapter(directory / "adapter", Path("base"))
        return self.worker.adapter_rank()

    @dispatch_mode()
    def write_model(self, directory: Path) -> None:
        """Write the policy as servers read it."""
        self.worker.write_model(directory / "model", directory, untied=True)

    @dispatch_mode(gather=Gather.ALL)
    def publish(self, policy: Callable[[str], Model]) -> list[bool]:
        """Publish to an engine with a separate copy, in which only the frozen weights are loaded.

        Return true if the engine then has all weights.
        """
        engine_model = policy("fp32")
        for _, weight in engine_model.trained_weights():
            weight.data.zero_()
        with TorchEngine(engine_model, None, TorchEngineConfig(kv_gib=0.001)) as self.worker._engine:
            self.worker.publish(3)
        self.worker._engine = None
        engine_weights = dict(engine_model.named_weights())
        return all(torch.equal(weight, engine_weights[name]) for name, weight in self.learner.weights())  # type: ignore[return-value]

    @dispatch_mode()
    def save(self, checkpoints: CheckpointManager, step: int) -> Checkpoint:
        """Write a checkpoint."""
        return self.worker.save(checkpoints, step, {"learner": self.worker.facts()})

    @dispatch_mode()
    def resume(self, directory: Path) -> None:
        """Resume from the newest checkpoint."""
        checkpoints = CheckpointManager(directory)
        newest = checkpoints.newest()
        assert newest is not None
        self.worker.resume(checkpoints, newest)


def start_crew(ranks: int, logs: Path) -> ProcessCrew:
    """Start a crew of processes with a policy on each."""
    return ProcessCrew(RankPolicy, ranks=ranks, share=partition_rollouts, logs=logs, config=CrewConfig(timeout=120))


def sharded(whole: Model, dtype: torch.dtype | None = None, mesh: MeshConfig | None = None) -> ShardedModel:
    """Return the model sharded over all ranks, which computes in another dtype if one is given."""
    return ShardedModel(whole, get_mesh(mesh or MeshConfig()), compute_dtype=None if dtype == whole.dtype else dtype)


@cache
def get_mesh(config: MeshConfig) -> ShardMeshes:
    """Return the mesh of all ranks, built once."""
    if not dist.is_initialized():  # a single rank with the engine of several
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return build_mesh(config, "cpu", timeout=60)


def _load_sharded(directory: Path, mesh: MeshConfig, head: Head, lora: int) -> ShardedModel:
    def prepare(model: Model) -> Model:
        return adapt(model, LoraAdapterConfig(rank=lora), seed=3) if lora else model

    return load_sharded(directory, get_mesh(mesh), dtype=torch.float32, head=head, prepare=prepare)


def family_policy(precision: str, name: str, **more: Any) -> Model:
    """Return a tiny model of a family of transformers."""
    return family_model(name, PRECISIONS[precision], vocab_size=VOCABULARY, initializer_range=0.1, **more)


def unfused_model(precision: str, policy: Callable[[str], Model] = model) -> Model:
    """Return a policy with transformers' own layers. In float64 its norms compute in float64, not in float32."""
    module = policy(precision).module
    for part in module.modules():
        if isinstance(part, Qwen2RMSNorm | Qwen3RMSNorm):
            part.forward = MethodType(_norm, part)
        if isinstance(part, Gemma2RMSNorm):
            part.forward = MethodType(_norm_of_gemma, part)
    return Model(module, fused=False)


def seeing_policy(precision: str, where: Path, *, tower: bool, **lora: Any) -> Model:
    """Return the vision-language model of a directory. tower: train its tower too, or its adapters."""
    seeing = load(where, dtype=PRECISIONS[precision])
    return choose_trained(seeing, LoraAdapterConfig(**lora), (), tower=tower, seed=0)


def model_with_unused_weight(precision: str) -> Model:
    """Return a policy with a weight that no pass reads."""
    policy = model(precision)
    policy.module.model.unused = nn.Parameter(torch.ones(6, 3, dtype=policy.dtype))
    return policy


def _norm(self: Any, hidden: Tensor) -> Tensor:
    if hidden.dtype in (torch.bfloat16, torch.float16):
        return cast(Tensor, Qwen3RMSNorm.forward(self, hidden))
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _norm_of_gemma(self: Any, hidden: Tensor) -> Tensor:
    return (1 + self.weight) * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)


@dataclass
class OutOfMemory(Imitate):
    """An objective that runs out of memory in its second micro-batch."""

    backward: bool = False

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        value = super().loss(batch, outputs, whole)
        if len(self.seen) < 2:
            return value
        if not self.backward:
            raise MemoryError
        return LossValue(_OutOfMemory.apply(value.loss), value.metrics)  # type: ignore[no-untyped-call]


class _OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Tensor:
        raise MemoryError


def adapted_model(precision: str, policy: Callable[[str], Model] = model) -> Model:
    """Return a policy with adapters that already change its outputs."""
    adapted = adapt(policy(precision), LoraAdapterConfig(rank=4), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in adapted.trained_weights():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return adapted


def partly_frozen_model(precision: str, parts: Sequence[str]) -> Model:
    """Return a policy with these parts frozen, and with a separate head."""
    policy = model(precision, tied=False)
    policy.freeze(parts)
    return policy


def score_model(precision: str) -> Model:
    """Return a model with a score head."""
    return create(tiny_config(VOCABULARY, layers=2, hidden=32), seed=0, dtype=PRECISIONS[precision], head="score")


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
