"""The worker of a rank: the policy's learner, its algorithm, and the engine that samples from it.

The controller calls these workers through a crew. Token columns come in and go out as batches; numbers come out as
metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Loss, LossValue, Outputs, View
from etude.algorithms.corrections import measure_mismatch
from etude.algorithms.losses.supervised import ValueLoss
from etude.algorithms.support_metrics import measure_support
from etude.batch import Batch
from etude.checkpoint import ProcessorFiles, export, export_adapter
from etude.dispatch.machine import machine_id
from etude.images import PromptImages
from etude.models import adapter_config
from etude.models.published_names import PublishedNames
from etude.models.weight_files import find_weights
from etude.observe import Last, Mean, Metrics, Sum
from etude.protocols import Gather, Ids, Split, dispatch_mode
from etude.recipes.workers.checkpointed import CheckpointedWorker
from etude.recipes.workers.update_observer import UpdateObserver
from etude.recipes.workers.utilization import UtilizationMeter, count_parameters
from etude.recipes.workers.weight_sender import SendPlan, SendResult, ServerUpdate, WeightSender, collect_together
from etude.records import Completion, SamplingParams
from etude.rollout import TorchEngine
from etude.rollout.engine_thread import release_omp_workers
from etude.rollout.server_client import ServerAddress
from etude.sync import publish_to_engine
from etude.token_routes import ServedRoutes
from etude.train import Learner, ScoringModel
from etude.train.micro_batches import TOKEN_OF_BATCH
from etude.train.optim import ignore_gradient
from etude.train.ranks import current_ranks

CRITIC = "critic"
"""The key of the critic's tensors in a checkpoint, next to the policy's."""


class PolicyObjective:
    """The objective of the policy's updates: the run's algorithm, with the state that its batch was estimated with.

    If a step makes one update and nothing before it reads π_old, that update's own forward pass computes π_old
    (`start_recording`). The weights are then those that the step began with.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.state = AlgorithmState()
        self._recorded: Tensor | None = None
        self.observer: UpdateObserver | None = None

    def start_recording(self, batch: Batch) -> None:
        """Record the log-probs that the next update, on this batch, computes before its step."""
        self._recorded = torch.full((batch.num_tokens,), torch.nan)

    def take_recorded_logp(self) -> Tensor | None:
        """Return and forget the recorded log-probs of the batch, [T]; None if none were recorded."""
        logp = self._recorded
        self._recorded = None
        return logp

    @property
    def split_unit(self) -> Literal["rollout", "group"]:
        """The unit that must stay in one micro-batch."""
        return self._algorithm.loss.split_unit

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that the algorithm reads."""
        return self._algorithm.required_columns()

    def forward_outputs(self) -> frozenset[str]:
        """Return the outputs that the forward pass must compute."""
        return self._algorithm.forward_outputs()

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        """Return this micro-batch's share of the loss."""
        if self._recorded is not None:
            logp, at = View(batch, outputs).full_output("logp").detach(), batch.extra[TOKEN_OF_BATCH].tensor.cpu()
            self._recorded = self._recorded.to(logp.dtype).index_copy(0, at, logp.cpu())
            batch = batch if batch.old_logp is not None else batch.replace(old_logp=logp)
        if self.observer is not None:
            self.observer.see_loss(batch, outputs, whole, self.state)
        return self._algorithm.compute_loss(batch, outputs, whole, self.state)


@dataclass(frozen=True)
class LossObjective:
    """The objective of updates without an algorithm: a loss alone."""

    wrapped: Loss

    @property
    def split_unit(self) -> Literal["rollout", "group"]:
        """The unit that must stay in one micro-batch."""
        return self.wrapped.split_unit

    def required_columns(self) -> frozenset[str]:
        """Return the batch columns that the loss reads."""
        return self.wrapped.required_columns()

    def forward_outputs(self) -> frozenset[str]:
        """Return the outputs that the forward pass must compute."""
        return self.wrapped.forward_outputs()

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        """Return this micro-batch's share of the loss."""
        return self.wrapped(View(batch, outputs), whole)


@dataclass(frozen=True)
class AuxiliaryModels:
    """The models besides the policy that its algorithm needs."""

    frozen: Mapping[str, ScoringModel] = field(default_factory=dict)
    """Frozen models by the log-prob column that each computes: the reference, the teacher."""
    critic: Learner | None = None
    critic_objective: LossObjective = LossObjective(ValueLoss())
    warmup: int = 0
    """First steps in which only the critic is trained."""


class PolicyWorker(CheckpointedWorker):
    """One rank of the policy: annotates, estimates, updates. Statistics of a batch are reduced through its `Ranks`."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        learner: Learner,
        *,
        seed: int,
        ppo_epochs: int,
        auxiliary: AuxiliaryModels | None = None,
        engine: TorchEngine | None = None,
        max_total_tokens: int = 0,
    ) -> None:
        """engine: samples from the learner's model. max_total_tokens: the tokens that model and engine have room for,
        prompt and answers together."""
        super().__init__()
        self._algorithm = algorithm
        self._learner = learner
        self._auxiliary = auxiliary or AuxiliaryModels()
        self._engine = engine
        self._seed = seed
        self._ppo_epochs = ppo_epochs
        self._ranks = learner.ranks
        self._max_total_tokens = max_total_tokens
        self._meter = UtilizationMeter(learner.model.device)
        self._objective = PolicyObjective(algorithm)
        self._next_state = AlgorithmState()
        self._estimated = Metrics()
        self._step = 0
        self._sender: WeightSender | None = None
        self._sent_version: int | None = None
        """The learner's version when its weights were last sent to servers."""

    def close(self) -> None:
        """Free the resources of the weight sender."""
        if self._sender is not None:
            self._sender.close()

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch, columns: frozenset[str]) -> Batch:
        """Return the batch with the columns that only models can compute."""
        for name in sorted(columns & self._auxiliary.frozen.keys()):
            batch = batch.replace(**{name: self._auxiliary.frozen[name].logp(batch)})
        critic = self._auxiliary.critic
        critic_columns = columns & critic.columns if critic is not None else frozenset()
        if critic is not None and critic_columns:
            batch = critic.annotate(batch, critic_columns)
        own = columns - critic_columns - self._auxiliary.frozen.keys()
        return self._learner.annotate(batch, own) if own else batch

    @dispatch_mode(Split.GROUPS, Gather.CONCAT)
    def estimate(self, batch: Batch, step: int) -> Batch:
        """Return the batch with advantages, weights and masks."""
        self._step = step
        estimated = self._algorithm.estimate(batch, self._next_state, seed=self._seed, step=step, ranks=self._ranks)
        self._objective.state = estimated.state
        self._next_state = estimated.next_state
        self._estimated = estimated.metrics
        self._estimated.merge(measure_support(batch, self._learner.model.vocab_size))
        return estimated.batch

    @dispatch_mode(Split.ROLLOUTS, Gather.METRICS)
    def mean_advantages(self, batch: Batch) -> Metrics:
        """Return the mean advantage of each rollout's action tokens, named by the rollout's id."""
        assert batch.rollout_id is not None, "rollouts of a run have ids"
        starts = batch.rollout_token_offsets
        advantage = torch.where(batch.action, batch.require("advantage").double(), 0.0)
        sums, counts = (
            torch.cat([column.new_zeros(1), column.cumsum(0)])[starts].diff().tolist()
            for column in (advantage, batch.action.long())
        )
        each = zip(batch.rollout_id.tolist(), sums, counts, strict=True)
        return Metrics({str(id): Mean.over(total, count) for id, total, count in each})

    @dispatch_mode(Split.GROUPS, Gather.METRICS)
    def update(self, parts: Sequence[Batch]) -> Metrics:
        """Make an optimizer step on each of these update batches, in every epoch; return metrics since the last
        update."""
        metrics = self._estimated
        self._estimated = Metrics()
        before = self._learner.version
        critic = self._auxiliary.critic
        critic_work = nullcontext() if critic is None else critic.working()
        with self._pause_engine(), self._learner.working(), critic_work:
            for epoch in range(self._ppo_epochs):
                for part in parts:
                    if critic is not None:
                        critic_metrics = critic.update(part, self._auxiliary.critic_objective)
                        metrics.merge({f"critic/{name}": metric for name, metric in critic_metrics.items()})
                    if self._step > self._auxiliary.warmup:
                        alone = self._ppo_epochs * len(parts) == 1
                        metrics.merge(self._update_policy(part, alone=alone, first=epoch == 0))
        metrics.add("optimizer_steps", Last.of(self._learner.version - before))
        return metrics

    @contextmanager
    def _pause_engine(self) -> Iterator[None]:
        """Pause an engine that shares the learner's weights, from here until weights are published.

        The engine may still have an aborted answer, or get a late request. If the update fails, the engine continues.
        """
        shared = self._engine if self._engine is not None and self._engine.model is self._learner.model else None
        if shared is not None:
            _wait_for(shared.pause())
        try:
            yield
        except BaseException:
            if shared is not None:
                _wait_for(shared.resume())
            raise

    def _update_policy(self, part: Batch, *, alone: bool, first: bool) -> Metrics:
        """Update the policy. alone: it is the only update of its step. first: it is the first on this part.

        Where the mismatch was not measured before, it is measured by the log-probs of the update itself.
        """
        scale = self._algorithm.correction.step_scale(View(part, ranks=self._ranks))
        measures = first if self._algorithm.correction.policies == "two" else alone and part.old_logp is None
        if measures:
            self._objective.start_recording(part)
        metrics = self._learner.update(part, self._objective, step_scale=scale)
        if self._algorithm.correction.step_scaling != "none":
            metrics.add("correction/step_scale", Mean.of(scale))
        recorded = part.replace(old_logp=self._objective.take_recorded_logp()) if measures else part
        if measures and recorded.behavior_logp is not None:
            metrics.merge(measure_mismatch(View(recorded, ranks=self._ranks)))
        return metrics

    @dispatch_mode()
    def observe(self, observer: UpdateObserver | None) -> None:
        """Show this observer each update of the policy; None ends that."""
        self._objective.observer = observer
        self._learner.watch_gradient(ignore_gradient if observer is None else observer.see_gradient)

    @dispatch_mode()
    def parameters(self) -> tuple[int, int]:
        """Return the number of weights, and the number of trained weights."""
        return count_parameters(self._learner.model)

    @dispatch_mode()
    def max_total_tokens(self) -> int:
        """Return the most tokens that a rollout may have."""
        return self._max_total_tokens

    @dispatch_mode()
    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights by their published names."""
        return self._learner.weights()

    @dispatch_mode()
    def tensors(self) -> Mapping[str, Any]:
        critic = self._auxiliary.critic
        return self._learner.state() if critic is None else {**self._learner.state(), CRITIC: critic.state()}

    @dispatch_mode()
    def facts(self) -> Mapping[str, Any]:
        """Return the plain values that a checkpoint stores: the algorithm's own state."""
        return asdict(self._next_state)

    @dispatch_mode()
    def restore(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        if self._auxiliary.critic is not None:
            self._auxiliary.critic.restore(tensors[CRITIC])
        self._learner.restore({name: value for name, value in tensors.items() if name != CRITIC})
        means = {int(role): mean for role, mean in facts["role_means"].items()}
        self._next_state = AlgorithmState(facts["kl_value"], means)

    # -- servers --------------------------------------------------------------------------------------------------

    @dispatch_mode(gather=Gather.ALL)
    def machine(self) -> list[str]:
        """Return the machine of each rank; see `dispatch.machine`."""
        return machine_id()  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def free_gpu_memory(self) -> list[tuple[int, int]]:
        """Return the free and the total bytes of each rank's GPU, once torch has given back what it does not use."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._learner.model.device)  # type: ignore[return-value]

    @dispatch_mode(gather=Gather.ALL)
    def send_weights(
        self, servers: Mapping[int, ServerAddress], version: int, plan: SendPlan, restarted: bool = False
    ) -> list[SendResult]:
        """Send the weights to servers, by their numbers, under this version; each rank sends to its share and returns
        the results.

        restarted: these servers were restarted, and the version is the last one that was sent. If the weights have
        changed since, nothing is sent: the next publish does it.
        """
        servers_of_rank = plan.share(servers, current_ranks().rank)
        if restarted and self._sent_version != self._learner.version:
            results = [
                ServerUpdate(server.url, updated=False, started=False, error="The weights have changed since.")
                for server in servers_of_rank
            ]
            return SendResult(results)  # type: ignore[return-value]
        self._sent_version = self._learner.version
        self._sender = self._sender or WeightSender(plan.sync, self._learner.model.device)
        model = self._learner.model
        keeps = plan.keeps_tower and not restarted and self._sender.have_all(servers_of_rank)
        kept = model.frozen_tower if keeps else frozenset()
        with self._server_weights(plan.untied) as weights:
            sent = ((name, weight) for name, weight in weights if name not in kept)
            named = self._names(plan.names_of).publish(model.with_buffers(sent))
            result = self._sender.send(servers_of_rank, named, version, partial=bool(kept))
        return result  # type: ignore[return-value]

    @dispatch_mode()
    def write_model(
        self,
        directory: Path,
        tokenizer: Path,
        untied: bool,
        bare: bool = False,
        names_of: Path | None = None,
        processor: ProcessorFiles | None = None,
    ) -> int:
        """Write the policy as a model directory that a server loads, by one rank; return the bytes of its weights.

        untied: write the head as a separate weight, if it is tied to the embedding. bare: leave the adapters out.
        names_of: see `SendPlan`. processor: the image processor, of a model that takes images.
        """
        model = self._learner.model
        config = model.config_dict() | ({"tie_word_embeddings": False} if untied and not bare else {})
        with self._collective(self._learner.base_weights()) if bare else self._server_weights(untied) as weights:
            if current_ranks().rank == 0:
                named = self._names(names_of).publish(model.with_buffers(weights))
                export(named, config, directory, tokenizer=tokenizer, processor=processor)
        return sum(file.stat().st_size for file in directory.glob("*.safetensors"))

    @dispatch_mode()
    def write_adapter(self, directory: Path, base: Path, names_of: Path | None = None) -> int:
        """Write only the adapters of the policy, in peft's format, by one rank; return their bytes. base: the directory
        of the adapted model. names_of: see `SendPlan`."""
        weights = dict(self._names(names_of).rename(self._learner.adapter_weights().items()))
        if current_ranks().rank == 0:
            export_adapter(weights, adapter_config(self._learner.model, base), directory)
        return sum(file.stat().st_size for file in directory.glob("*.safetensors"))

    @dispatch_mode()
    def has_experts(self) -> bool:
        """Return True if the policy has a mixture of experts."""
        return self._learner.model.has_experts

    @dispatch_mode()
    def adapter_rank(self) -> int:
        """Return the rank (inner width) of the widest adapter."""
        return self._learner.model.adapter_rank

    @dispatch_mode()
    def adapter_modules(self) -> tuple[str, ...]:
        """Return the last parts of the names of the layers with adapters."""
        return self._learner.model.adapter_modules

    @dispatch_mode()
    def served_routes(self) -> ServedRoutes:
        """Return the form of the routes that servers report of this model."""
        shape = self._learner.replay.shape
        assert shape is not None, "a learner that replays routes knows their form"
        return ServedRoutes(shape.layers, self._learner.model.num_layers, shape.per_token, shape.experts)

    def _server_weights(self, untied: bool) -> AbstractContextManager[Iterable[tuple[str, Tensor]]]:
        """Yield the weights as servers compute with them, one at a time, with adapters merged in. untied: see
        `write_model`."""
        merged = self._learner.merged_weights()
        return self._collective(self._learner.model.untied_weights(merged) if untied else merged)

    def _names(self, names_of: Path | None) -> PublishedNames:
        """Return the names that servers know; see `SendPlan`."""
        return PublishedNames(self._learner.model.module, () if names_of is None else find_weights(names_of))

    def _collective(
        self, weights: Iterable[tuple[str, Tensor]]
    ) -> AbstractContextManager[Iterable[tuple[str, Tensor]]]:
        """Yield weights of the learner, of which every rank goes through all; see `collect_together`."""
        return collect_together(weights, divided=self._learner.is_sharded)

    # -- sampling -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        images: PromptImages | None = None,
        *,
        on_start: Callable[[], None],
    ) -> Completion:
        """Sample one continuation with this rank's engine."""
        return await self._sampling_engine.generate(prompt, sampling, images=images, on_start=on_start)

    @dispatch_mode()
    def publish(self, version: int) -> Metrics:
        """Make the engine compute with the learner's weights, under a new version; return the cost on each rank."""
        learner = self._learner
        model = self._learner.model
        engine = self._sampling_engine
        if model.has_adapters:
            metrics = asyncio.run(publish_to_engine(engine, learner.adapter_weights().items(), version))
        else:
            gathered = {name: weight.shape for name, weight in model.named_weights()} if learner.is_sharded else None
            with self._collective(learner.merged_weights()) as weights:
                publishing = publish_to_engine(engine, weights, version, gathered, kept=model.frozen_tower)
                metrics = asyncio.run(publishing)
        asyncio.run(engine.wake())  # it may have slept to make room
        asyncio.run(engine.resume())  # it has paused since the update
        release_omp_workers()
        return metrics

    @dispatch_mode()
    def free_engine_memory(self) -> None:
        """Make the engine free its memory, until new weights are published. Its running requests are aborted; their
        results are not needed."""
        asyncio.run(self._sampling_engine.abort())
        asyncio.run(self._sampling_engine.sleep())

    @dispatch_mode(gather=Gather.METRICS)
    def engine_stats(self) -> Metrics:
        """Return the engine's statistics since the last call. Busy seconds are averaged over ranks, because their
        engines run in parallel."""
        stats = dict(self._sampling_engine.stats())
        stats["engine/busy_seconds"] = Sum.of((stats["engine/busy_seconds"].value() or 0.0) / current_ranks().count)
        return Metrics(stats)

    @dispatch_mode(gather=Gather.METRICS)
    def utilization(self) -> Metrics:
        """Return the device's utilization since the last call."""
        return self._meter.read()

    @property
    def _sampling_engine(self) -> TorchEngine:
        assert self._engine is not None, "a worker that samples has an engine"
        return self._engine


def _wait_for(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end on a new thread, because the caller may be inside an event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()
