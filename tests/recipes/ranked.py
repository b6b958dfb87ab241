"""The policy of a tiny model on every rank of a crew, made anew for each thing that is tried of it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, count
from pathlib import Path
from types import MethodType
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from etude.algorithms import AlgorithmConfig, Denominators, Loss, LossValue, Outputs
from etude.algorithms.losses.preference import DPO
from etude.algorithms.losses.supervised import SFT
from etude.batch import Batch
from etude.checkpoint import Checkpoint, CheckpointManager
from etude.data.pack import pack_prefix_tree
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig
from etude.dispatch.process_crew import ProcessCrew
from etude.errors import ConfigError, TrainingError
from etude.models import Head, LoraAdapterConfig, Model, adapt, create, tiny_config
from etude.models.transformers_backbone import _SelfOnlyAttention
from etude.models.visit import Visits
from etude.observe import Max, Metrics
from etude.protocols import Gather, Split, dispatch_mode
from etude.recipes.run.checks import POLICY_COLUMNS, REFERENCE_COLUMNS
from etude.recipes.supervised.worker import annotate_with_reference
from etude.recipes.workers.policy_worker import AuxiliaryModels, LossObjective, PolicyWorker
from etude.records import Completion, SamplingParams
from etude.rollout import TorchEngine, TorchEngineConfig
from etude.train import FrozenModel, Learner, Mesh, MeshConfig, TrainConfig
from etude.train.device_mesh import build_mesh
from etude.train.fsdp import FsdpBackend, ShardedModel
from etude.train.offload import OffloadedTensors
from etude.train.optim import PRECISIONS, MixedPrecisionOptimizer
from etude.train.ranks import DistributedRanks, current_ranks, rank_of
from etude.train.sharded_loading import load_sharded
from etude.train.shards import BUCKET, Shards, kept
from tests.processes import rise_of
from tests.train.tasks import VOCABULARY, Imitate, model


class RankPolicy:
    """One rank."""

    def __init__(self) -> None:
        self.begin()

    @dispatch_mode()
    def begin(
        self,
        precision: str = "fp64",
        algorithm: AlgorithmConfig | None = None,
        epochs: int = 1,
        *,
        policy: Callable[[str], Model] = model,
        mesh: MeshConfig | None = None,
        bucket: int = BUCKET,
        engine: Literal["local", "fsdp"] = "local",
        **options: Any,
    ) -> None:
        """A policy that has learned nothing yet; the rate is high enough to see."""
        config = TrainConfig(precision=precision, **{"learning_rate": 1e-2, "max_grad_norm": 0.5, **options})
        stored = {"bf16": "fp32", "fp16": "fp32"}.get(precision, precision) if engine == "fsdp" else precision
        shape, learns = Mesh(mesh if engine == "local" else None, timeout=60), policy(stored)
        compares = "full_kl" in (algorithm or AlgorithmConfig()).forward_outputs()
        backend: FsdpBackend | None = None
        if engine == "fsdp":
            whole = sharded(learns, PRECISIONS[precision], mesh)
            more = {"seed": 7, "kv_heads": learns.kv_heads}
            other = whole if learns.has_adapters else sharded(unfused(precision, partial(model, **more)), mesh=mesh)
            rests = torch.device("cpu") if not learns.has_adapters and not compares else None
            self.reference = FrozenModel(other, 50, disable_adapters=learns.has_adapters, compute_device=rests)
            held = self.reference if compares else None
            backend = FsdpBackend(whole, config, temperature=1.0, pack=pack_prefix_tree, reference=held)
        else:
            beside = learns if learns.has_adapters else model(precision, seed=7)
            self.reference = FrozenModel(beside, 50, disable_adapters=learns.has_adapters, mesh=shape)
            held = self.reference if compares else None
        self.learner = Learner(
            learns, config, steps=20, peak=1e12, reference=held, mesh=shape, bucket=bucket, backend=backend
        )
        auxiliary = AuxiliaryModels({"ref_logp": self.reference})
        self.worker = PolicyWorker(
            algorithm or AlgorithmConfig(), self.learner, seed=0, ppo_epochs=epochs, auxiliary=auxiliary
        )
        self.wanted = (algorithm or AlgorithmConfig()).required_columns() & (POLICY_COLUMNS | REFERENCE_COLUMNS) | {
            "old_logp"
        }
        self.step = 0
        self.sent = {"during": 0, "after": 0}
        if engine == "local" and (shards := self.learner._backend._optimizer._shards) is not None:
            shards._send = self._counted(shards._send)  # type: ignore[method-assign]

    def _counted(self, send: Callable[[], None]) -> Callable[[], None]:
        """What counts the buckets that are sent during a backward pass, and those that are sent after one."""

        def sending() -> None:
            self.sent["after" if torch._C._current_graph_task_id() == -1 else "during"] += 1
            send()

        return sending

    @dispatch_mode(gather=Gather.ALL)
    def buckets(self) -> list[dict[str, int]]:
        """How many were sent when, how many there are, and how many leaves stand in more than one of them."""
        shards = self.learner._backend._optimizer._shards
        assert shards is not None
        pieces = Counter(piece.name for each in shards._buckets for piece in each.pieces)
        cut = sum(count > 1 for count in pieces.values())
        return {**self.sent, "all": len(shards._buckets), "cut": cut}  # type: ignore[return-value]

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def ready(self, batch: Batch) -> Batch:
        """Annotated and estimated."""
        batch = self.worker.annotate(batch, self.wanted)
        self.step += 1
        return self.worker.estimate(batch, self.step)

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, parts: list[Batch]) -> Metrics:
        """A step on each of them."""
        return self.worker.update(parts)

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def disturbed(self, parts: list[Batch]) -> Metrics:
        """The same, by weights that an engine shares: it is within a step for an answer that nobody waits for any
        more, and is asked for another while the update is made. Which version gave that, and whether they met."""
        model = self.learner.model
        assert model.visits is not None
        model.visits = halting = Halting(model.visits)
        with Halted(model, halting) as engine, ThreadPoolExecutor(2) as others:
            self.worker._engine = engine
            self.worker.publish(1)
            left = others.submit(asyncio.run, self._left(halting))
            assert halting.inside.wait(30)
            late = others.submit(asyncio.run, self._late(halting))
            metrics = self.worker.update(parts)
            self.worker.publish(2)
            left.result(30)
            metrics.add("late_version", Max.of(int(late.result(30).version.min())))
            metrics.add("met", Max.of(float(halting.met)))
        self.worker._engine = None
        return metrics

    async def _left(self, halting: Halting) -> None:
        answer = asyncio.create_task(self.worker.generate(PROMPT, SamplingParams(max_tokens=50), on_start=lambda: None))
        await asyncio.to_thread(halting.inside.wait, 30)
        answer.cancel()
        with suppress(asyncio.CancelledError):
            await answer

    async def _late(self, halting: Halting) -> Completion:
        assert await asyncio.to_thread(halting.trains.wait, 30)
        return await self.worker.generate(PROMPT, SamplingParams(max_tokens=4), on_start=lambda: None)

    @dispatch_mode(gather=Gather.ALL)
    def another(self) -> list[str]:
        """What another thread is told that computes with divided weights during a pass."""
        model, asked = self.learner.model, (torch.arange(5), torch.arange(5), _SelfOnlyAttention())
        with ThreadPoolExecutor(1) as other, self.learner._backend._optimizer.played(backward=False):
            told = str(other.submit(model.hidden, *asked).exception(30))
            with torch.no_grad():
                model.hidden(*asked)
        return told  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def beside(self, odd: int) -> list[tuple[str, bool, int]]:
        """Publish to an engine with weights of its own, whose model is another on one rank: what went wrong, whether it
        has all of them, and how many of them the rank brought together."""
        own = model("fp32", seed=5, layers=3 if rank_of(current_ranks()) == odd else 2)
        shards = self.learner._backend._optimizer._shards
        assert shards is not None
        gathered, calls, wrong = shards.gathered, Counter[str](), ""

        def counted(name: str) -> Tensor:
            calls[name] += 1
            return gathered(name)

        shards.gathered = counted  # type: ignore[method-assign]
        with TorchEngine(own, None, TorchEngineConfig(kv_gib=0.001)) as self.worker._engine:
            try:
                self.worker.publish(3)
            except ConfigError as error:
                wrong = str(error)
        self.worker._engine, shards.gathered = None, gathered  # type: ignore[method-assign]
        brought, held = dict(self.learner.weights()), dict(own.named_weights())
        there = all(torch.equal(weight, held[name]) for name, weight in brought.items())
        return wrong, there, calls.total()  # type: ignore[return-value]

    @dispatch_mode()
    def rest(self) -> None:
        """Have the optimizer rest between updates, in other memory of the processor's."""
        self.learner._resting = self.resting = Watched(self.learner)

    @dispatch_mode(gather=Gather.ALL)
    def woken(self) -> list[list[bool]]:
        """Whether the weights were divided already, each time that the optimizer came home."""
        return self.resting.divided  # type: ignore[return-value]

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def ordered(self, batch: Batch) -> Batch:
        """What the model says of a batch, of which the next micro-batch is made when the last was computed."""
        cut, passed, seen = self.learner._micro_batches, self.learner._backend.forward, list[str]()

        def cutting(*asked: Any) -> Iterator[Any]:
            for micro in cut(*asked):
                seen.append("made")
                yield micro

        def passing(*asked: Any, **how: Any) -> Any:
            seen.append("computed")
            return passed(*asked, **how)

        self.learner._micro_batches, self.learner._backend.forward = cutting, passing  # type: ignore[method-assign]
        told = self.learner.annotate(batch, frozenset({"entropy"}))
        self.learner._micro_batches, self.learner._backend.forward = cut, passed  # type: ignore[method-assign]
        assert seen == ["made", "computed"] * (len(seen) // 2) and len(seen) > 4
        return told

    @dispatch_mode()
    def waited(self, seconds: float) -> None:
        """Have so much been waited for, as for another rank whose server is slow to take what is published."""
        shards = self.learner._backend._optimizer._shards
        assert shards is not None
        shards._seconds += seconds

    @dispatch_mode(Split.GROUPS)
    def fail_twice(self, batch: Batch) -> None:
        """Run out of memory in the second micro-batch of an update: in its loss, and then in its backward pass."""
        for backward in (False, True):
            with suppress(TrainingError):
                self.learner.update(batch, RunsOut(SFT(), backward=backward))
                raise AssertionError("memory did not run out")

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def measure(self, batch: Batch) -> Metrics:
        """The loss of preferences, of which the reference tells while it is measured."""
        annotate = annotate_with_reference(self.reference)
        return self.learner.measure(batch, LossObjective(DPO()), annotate)

    @dispatch_mode(gather=Gather.ALL)
    def released(self) -> list[bool]:
        """Whether no weight is whole, of the policy and of the reference."""
        weights = (*self.learner.model.parameters(), *self.reference.model.parameters())
        return all(isinstance(weight, DTensor) for weight in weights)  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def held(self) -> list[dict[str, torch.dtype]]:
        """The dtype of each weight of the model."""
        return {name: weight.dtype for name, weight in self.learner.model.named_weights()}  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def rested(self) -> list[bool]:
        """Whether the moments are in other memory while they rest, and where they were after that."""
        moments = cast(Mapping[str, Any], self.learner.state()["exp_avg"])
        before = {name: _local(moment).clone() for name, moment in moments.items()}
        addresses = {name: _local(moment).data_ptr() for name, moment in moments.items()}
        moved = OffloadedTensors(self.learner._backend.offloadable_tensors(), torch.device("cpu"), torch.device("cpu"))
        away = all(_local(moment).data_ptr() != addresses[name] for name, moment in moments.items())
        with moved.loaded():
            return away and all(torch.equal(_local(m), before[name]) for name, m in moments.items())  # type: ignore[return-value]

    @dispatch_mode(Split.GROUPS)
    def fail_comparing(self, batch: Batch) -> None:
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

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def imitate(self, batch: Batch, seen: int | None = None, loss: Loss | None = None) -> Metrics:
        """A step of supervised learning, from so many of the actions."""
        action = batch.action & (batch.action.cumsum(0) <= (batch.num_tokens if seen is None else seen))
        return self.learner.update(batch.replace(action=action), Imitate(loss or SFT()))

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def tell(self, batch: Batch, columns: frozenset[str]) -> Batch:
        """What the model says of a batch."""
        return self.learner.annotate(batch, columns)

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def teach(self, batch: Batch) -> Batch:
        """What the reference says, and what it thinks likeliest."""
        ids, logp = self.reference.top_tokens(batch, 4, VOCABULARY)
        told = self.worker.annotate(batch, frozenset({"ref_logp"}))
        return told.replace(teacher_topk_ids=ids, teacher_topk_logp=logp)

    @dispatch_mode()
    def gradient(self) -> dict[str, Tensor]:
        """Of the first update, if it was not clipped: whole, whoever has which rows of it."""
        moments = self.learner.state()["exp_avg"]
        assert isinstance(moments, Mapping)
        return {name: _whole(moment) / (1 - 0.9) for name, moment in moments.items()}

    @dispatch_mode(gather=Gather.ALL)
    def weights(self) -> list[dict[str, Tensor]]:
        """What every rank computes with."""
        return {name: weight.clone() for name, weight in self.learner.weights()}  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def assembled(self) -> list[bool]:
        """Have the weights be whole on every rank, as for an engine; whether they are what they are told to be."""
        self.learner.assemble()
        told = dict(self.learner.weights())
        return all(torch.equal(weight, told[name]) for name, weight in self.learner.model.named_weights())  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def taken(self) -> list[int]:
        """Bytes that each rank has taken of the system's memory and not given back, by the C library's own count."""
        gc.collect()
        return _in_use()  # type: ignore[return-value]

    @dispatch_mode()
    def watch(self) -> None:
        """Note how much of the weights is there while they are used."""
        self.learner.model.visits = self.watching = Watching(self.learner.model)

    @dispatch_mode(gather=Gather.ALL)
    def watched(self) -> list[tuple[int, int]]:
        """How many bytes of the weights are there now, and were at most."""
        return self.watching.there(), self.watching.most  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def named(self) -> list[bool]:
        """Whether rows that lie elsewhere than their leaf are named for a checkpoint where they lie."""
        ranks = current_ranks()
        assert isinstance(ranks, DistributedRanks)
        shards = Shards({"leaf": torch.empty(6, 3, device="meta")}, ranks, widen=False)
        part = torch.arange(9.0).view(3, 3)
        return kept(shards.named("leaf", part)).data_ptr() == part.data_ptr()  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def kept(self) -> list[int]:
        """How many numbers each rank keeps of the masters."""
        masters = self.learner.state()["weights"]
        assert isinstance(masters, Mapping)
        return sum(_local(each).numel() for each in masters.values())  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def loaded(
        self, directory: Path, head: Head = "language", lora: int = 0, mesh: MeshConfig | None = None
    ) -> list[dict[str, Tensor]]:
        """The weights of a directory, of which each rank has read its shards."""
        return dict(_loaded(directory, mesh or MeshConfig(), head, lora).whole_weights())  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def loading(self, directory: Path) -> list[dict[str, int]]:
        """The bytes that loading has taken at most, those of the shards, and those of the largest weight.

        Mapped files, which count as allocations of their size, are left out.
        """
        files = {file.stat().st_size for file in directory.glob("*.safetensors")}
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            weights = [weight for _, weight in _loaded(directory, MeshConfig(), "language", 0).model.named_weights()]
        results = profiler.profiler.kineto_results  # type: ignore[union-attr]
        events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda event: event.start_ns())
        changes = [event.nbytes() for event in events if abs(event.nbytes()) not in files]
        counts = {"peak": max(accumulate(changes)), "shards": sum(_local(weight).nbytes for weight in weights)}
        return counts | {"largest": max(weight.numel() * weight.itemsize for weight in weights)}  # type: ignore[return-value]

    @dispatch_mode()
    def write(self, directory: Path) -> int:
        """Write the policy as servers load it: merged, without its adapters, and these alone; return their rank."""
        self.worker.write_model(directory / "merged", directory, untied=True)
        self.worker.write_model(directory / "bare", directory, untied=False, bare=True)
        self.worker.write_adapter(directory / "adapter", Path("base"))
        return self.worker.adapter_rank()

    @dispatch_mode(gather=Gather.ALL)
    def published(self, policy: Callable[[str], Model]) -> list[bool]:
        """Publish to an engine with weights of its own; whether it has all of them."""
        own = policy("fp32")
        for weight in own.parameters():
            weight.data.zero_()
        with TorchEngine(own, None, TorchEngineConfig(kv_gib=0.001)) as self.worker._engine:
            self.worker.publish(3)
        self.worker._engine = None
        held = dict(own.named_weights())
        return all(torch.equal(weight, held[name]) for name, weight in self.learner.weights())  # type: ignore[return-value]

    @dispatch_mode()
    def save(self, checkpoints: CheckpointManager, step: int) -> Checkpoint:
        """Write a checkpoint."""
        return self.worker.save(checkpoints, step, {"learner": self.worker.facts()})

    @dispatch_mode()
    def resume(self, directory: Path) -> None:
        """Go on from the newest one."""
        checkpoints = CheckpointManager(directory)
        newest = checkpoints.newest()
        assert newest is not None
        self.worker.resume(checkpoints, newest)

    @dispatch_mode(gather=Gather.ALL)
    def spent(self, megabytes: int, bucket: int) -> list[dict[str, float]]:
        """What exchanging the gradients and the weights of so large a model took at most, beside what was there, in
        buckets."""
        rows = megabytes * 2**20 // 4 // 1024
        leaves = {
            "large": nn.Parameter(torch.ones(rows // 2, 1024)),
            **{f"small.{i}": nn.Parameter(torch.ones(rows // 40, 1024)) for i in range(20)},
        }
        masters = MixedPrecisionOptimizer(
            leaves.items(), TrainConfig(precision="fp32"), ranks=current_ranks(), bucket=bucket
        )
        found = {}
        for leaf in leaves.values():
            leaf.grad = torch.ones_like(leaf)
        for weight in masters._weights.values():
            weight.grad = torch.ones_like(weight)
        found["gradients"] = rise_of(masters.gather) / bucket
        found["weights"] = rise_of(masters.refresh_copy) / bucket
        return found  # type: ignore[return-value]


def crew_of(ranks: int, logs: Path) -> ProcessCrew:
    """A crew of processes with a policy each."""
    return ProcessCrew(RankPolicy, ranks=ranks, share=partition_rollouts, logs=logs, config=CrewConfig(timeout=120))


def sharded(whole: Model, dtype: torch.dtype | None = None, mesh: MeshConfig | None = None) -> ShardedModel:
    """A model in shards over all ranks, which computes in another dtype if one is given."""
    return ShardedModel(whole, mesh_of(mesh or MeshConfig()), compute_dtype=None if dtype == whole.dtype else dtype)


@cache
def mesh_of(config: MeshConfig) -> DeviceMesh:
    """All ranks as a mesh, made once."""
    if not dist.is_initialized():  # one rank that computes as many do
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return build_mesh(config, "cpu", timeout=60)


def _loaded(directory: Path, mesh: MeshConfig, head: Head, lora: int) -> ShardedModel:
    def prepare(model: Model) -> Model:
        return adapt(model, LoraAdapterConfig(rank=lora), seed=3) if lora else model

    return load_sharded(directory, mesh_of(mesh), dtype=torch.float32, head=head, prepare=prepare)


def unfused(precision: str, policy: Callable[[str], Model] = model) -> Model:
    """A policy in transformers' own layers. Its norms compute in float64 where it does, not in float32."""
    module = policy(precision).module
    for part in module.modules():
        if isinstance(part, Qwen2RMSNorm | Qwen3RMSNorm):
            part.forward = MethodType(_norm, part)
    return Model(module, fused=False)


def with_unused(precision: str) -> Model:
    """A policy with a weight that no pass reads."""
    made = model(precision)
    made.module.model.unused = nn.Parameter(torch.ones(6, 3, dtype=made.dtype))
    return made


def _norm(self: Any, hidden: Tensor) -> Tensor:
    if hidden.dtype in (torch.bfloat16, torch.float16):
        return cast(Tensor, Qwen3RMSNorm.forward(self, hidden))
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


@dataclass
class RunsOut(Imitate):
    """An objective that runs out of memory in its second micro-batch."""

    backward: bool = False

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        value = super().loss(batch, outputs, whole)
        if len(self.seen) < 2:
            return value
        if not self.backward:
            raise MemoryError
        return LossValue(_RunsOut.apply(value.loss), value.metrics)  # type: ignore[no-untyped-call]


class _RunsOut(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> Tensor:
        raise MemoryError


def adapted(precision: str) -> Model:
    """A policy with adapters that do something already."""
    made = adapt(model(precision), LoraAdapterConfig(rank=4), seed=0)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in made.trained_weights():
            weight.add_(0.05 * torch.randn(weight.shape, generator=chance).to(weight.dtype))
    return made


def frozen(precision: str, parts: Sequence[str]) -> Model:
    """A policy of which these parts are not trained, with a head of its own."""
    made = model(precision, tied=False)
    made.freeze(parts)
    return made


def judge(precision: str) -> Model:
    """One that gives scores."""
    return create(tiny_config(VOCABULARY, layers=2, hidden=32), seed=0, dtype=PRECISIONS[precision], head="score")


PROMPT = np.arange(5, dtype=np.int32)


class Halting:
    """Keeps an engine within its first step until it is asked to pause, or a trainer computes beside it."""

    def __init__(self, visits: Visits) -> None:
        self._visits, self.met = visits, False
        self.inside, self.trains, self.goes_on = threading.Event(), threading.Event(), threading.Event()

    def enter(self, layer: int) -> None:
        if not torch.is_inference_mode_enabled():
            self.met |= not self.goes_on.is_set()
            self.trains.set()
            self.goes_on.set()
        elif layer:
            self.inside.set()
            self.goes_on.wait(30)
        self._visits.enter(layer)

    def leave(self, layer: int, *, back: bool) -> None:
        self._visits.leave(layer, back=back)


class Halted(TorchEngine):
    """The engine that is kept so."""

    def __init__(self, model: Model, halting: Halting) -> None:
        super().__init__(model, None, TorchEngineConfig(kv_gib=0.001))
        self._halting = halting

    async def pause(self) -> None:
        self._halting.goes_on.set()
        await super().pause()


class Watched(OffloadedTensors):
    """Notes whether a learner's weights are divided when its optimizer comes home."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner._backend._optimizer.offloadable_tensors(), learner.model.device, learner.model.device)
        self._learner, self.divided = learner, list[bool]()

    def loaded(self) -> AbstractContextManager[None]:
        self.divided.append(self._learner.divided)
        return super().loaded()


class Watching:
    """Looks at the memory of a model's weights wherever a pass over it is."""

    def __init__(self, of: Model) -> None:
        assert of.visits is not None
        self._of, self._visits, self.most = of, of.visits, 0

    def enter(self, layer: int) -> None:
        self._visits.enter(layer)
        self.most = max(self.most, self.there())

    def leave(self, layer: int, *, back: bool) -> None:
        self._visits.leave(layer, back=back)

    def there(self) -> int:
        storages = {weight.untyped_storage()._cdata: weight.untyped_storage() for weight in self._of.parameters()}
        return sum(storage.nbytes() for storage in storages.values())


class _Counts(ctypes.Structure):
    """What glibc's `mallinfo2` tells."""

    _fields_ = [(str(place), ctypes.c_size_t) for place in range(10)]


MAPPED, USED = "4", "7"
"""Which of them are bytes in mappings of their own, and bytes in use elsewhere."""


def _in_use() -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Counts
    counts = library.mallinfo2()
    return int(getattr(counts, MAPPED) + getattr(counts, USED))


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
