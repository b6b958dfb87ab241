"""What runs on a rank: the policy's learner, the algorithm that it learns by, and the engine that samples from it.

The controller speaks to these through a crew. Token columns come in and go out as batches; numbers come out as metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from etude.algorithms import Algorithm, Denominators, Loss, LossValue, Outputs, State, View
from etude.algorithms.losses.supervised import Value
from etude.batch import Batch
from etude.checkpoint import Checkpoint, Checkpoints, export, export_adapter
from etude.dispatch.machine import machine
from etude.models import adapter_config
from etude.observe import Last, Metrics, Sum
from etude.protocols import Gather, Ids, Split, spread
from etude.recipes.carrying import Brought, Carriage, Carried, Courier, InStep
from etude.recipes.meter import Meter, sizes_of
from etude.records import Completion, SamplingParams
from etude.rollout import TorchEngine
from etude.rollout.remote import Address
from etude.rollout.team import dismiss_team
from etude.sync import LocalCarrier
from etude.train import Frozen, Learner
from etude.train.forward import TOKEN_OF_BATCH
from etude.train.ranks import count, is_first, of_group, place

__all__ = ["Beside", "Improve", "Minimise", "PolicyWorker"]

CRITIC = "critic"
"""What the critic's tensors are kept under, beside the policy's."""


class Improve:
    """What a policy's update minimises: the run's algorithm, under the state that its batch was estimated in.

    Where a step makes one update and nothing before it reads π_old, π_old is what that update's own forward pass says
    (`begins`): the weights are those that the step began with.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.state = State()
        self._old: Tensor | None = None

    def begins(self, batch: Batch) -> None:
        """The next update is the one of its step, and of this batch."""
        self._old = torch.full((batch.tokens,), torch.nan)

    def told(self) -> Tensor | None:
        """[T]: π_old of the batch, now that its update was made; forgotten here. None where it was known before."""
        old, self._old = self._old, None
        return old

    @property
    def split_unit(self) -> Literal["rollout", "group"]:
        """What must stay in one micro-batch."""
        return self._algorithm.loss.split_unit

    def needs(self) -> frozenset[str]:
        """The batch columns it reads."""
        return self._algorithm.needs()

    def outputs(self) -> frozenset[str]:
        """What the forward pass must compute."""
        return self._algorithm.outputs()

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        """This micro-batch's share."""
        if self._old is not None:
            old = View(batch, outputs).forward("logp").detach()
            self._old = self._old.to(old.dtype).index_copy(0, batch.extra[TOKEN_OF_BATCH].tensor.cpu(), old.cpu())
            batch = batch.replace(old_logp=old)
        return self._algorithm.objective(batch, outputs, whole, self.state)


@dataclass(frozen=True)
class Minimise:
    """What an update minimises that has no algorithm around it: a loss, and nothing besides."""

    wrapped: Loss

    @property
    def split_unit(self) -> Literal["rollout", "group"]:
        """What must stay in one micro-batch."""
        return self.wrapped.split_unit

    def needs(self) -> frozenset[str]:
        """The batch columns it reads."""
        return self.wrapped.needs()

    def outputs(self) -> frozenset[str]:
        """What the forward pass must compute."""
        return self.wrapped.outputs()

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        """This micro-batch's share."""
        return self.wrapped(View(batch, outputs), whole)


@dataclass(frozen=True)
class Beside:
    """The models beside the policy, where its algorithm asks for them."""

    frozen: Mapping[str, Frozen] = field(default_factory=dict)
    """Who tells a column of log-probs and never learns: the reference, the teacher."""
    critic: Learner | None = None
    foresee: Minimise = Minimise(Value())
    warmup: int = 0
    """Steps at the beginning in which the critic learns alone."""


class PolicyWorker:
    """One rank of the policy: annotates, estimates, updates. The statistics of a batch go through its `Ranks`."""

    def __init__(
        self,
        algorithm: Algorithm,
        learner: Learner,
        *,
        seed: int,
        epochs: int,
        beside: Beside | None = None,
        engine: TorchEngine | None = None,
        longest: int = 0,
    ) -> None:
        """engine: what samples from the learner's model. longest: the tokens that both have room for, prompt and
        answers together."""
        self._algorithm, self._learner, self._beside, self._engine = algorithm, learner, beside or Beside(), engine
        self._seed, self._epochs, self._ranks = seed, epochs, learner.ranks
        self._longest = longest
        self._meter = Meter(learner.model.device)
        self._objective = Improve(algorithm)
        self._following = State()
        self._estimated = Metrics()
        self._step = 0
        self._courier: Courier | None = None
        self._carried: int | None = None
        """The learner's version when its weights were carried to servers last."""

    def close(self) -> None:
        """Let go of what was made on the way."""
        if self._courier is not None:
            self._courier.close()

    @spread(Split.GROUPS, Gather.CONCAT)
    def annotate(self, batch: Batch, columns: frozenset[str]) -> Batch:
        """The batch with the columns that only the models can tell."""
        for name in sorted(columns & self._beside.frozen.keys()):
            batch = batch.replace(**{name: self._beside.frozen[name].logp(batch)})
        critic = self._beside.critic
        foreseen = columns & critic.columns if critic is not None else frozenset()
        if critic is not None and foreseen:
            batch = critic.annotate(batch, foreseen)
        own = columns - foreseen - self._beside.frozen.keys()
        return self._learner.annotate(batch, own) if own else batch

    @spread(Split.GROUPS, Gather.CONCAT)
    def estimate(self, batch: Batch, step: int) -> Batch:
        """The batch with advantages, weights and masks."""
        self._step = step
        found = self._algorithm.estimate(batch, self._following, seed=self._seed, step=step, ranks=self._ranks)
        self._objective.state, self._following = found.state, found.following
        self._estimated = found.metrics
        return found.batch

    @spread(Split.GROUPS, Gather.METRICS)
    def update(self, parts: Sequence[Batch]) -> Metrics:
        """An optimizer step on each of these update batches, in every epoch, and what was seen since the last ones."""
        metrics, self._estimated = self._estimated, Metrics()
        before = self._learner.version
        critic = self._beside.critic
        resting = nullcontext() if critic is None else critic.working()
        with self._undisturbed(), self._learner.working(), resting:
            for _ in range(self._epochs):
                for part in parts:
                    if critic is not None:
                        told = critic.update(part, self._beside.foresee)
                        metrics.merge({f"critic/{name}": metric for name, metric in told.items()})
                    if self._step > self._beside.warmup:
                        metrics.merge(self._improved(part, alone=self._epochs * len(parts) == 1))
        metrics.add("optimizer_steps", Last.of(self._learner.version - before))
        return metrics

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Within, and on until weights are published, an engine that shares them computes nothing, and does not have
        them whole. It may be at an answer that nobody waits for any more, and be asked for one that comes late. Where
        the update fails, it goes on."""
        shared = self._engine if self._engine is not None and self._engine.model is self._learner.model else None
        if shared is not None:
            _wait_for(shared.pause())
        self._learner.disperse()
        try:
            yield
        except BaseException:
            if shared is not None:
                _wait_for(shared.resume())
            raise

    def _improved(self, part: Batch, *, alone: bool) -> Metrics:
        """An update of the policy; alone, if it is the only one of its step."""
        if part.old_logp is not None or not alone:
            return self._learner.update(part, self._objective)
        self._objective.begins(part)
        metrics = self._learner.update(part, self._objective)
        known = View(part.replace(old_logp=self._objective.told()), ranks=self._ranks)
        metrics.merge(self._algorithm.correction.measured(known))
        return metrics

    @spread()
    def parameters(self) -> tuple[int, int]:
        """How many weights the model has, and how many of them are trained."""
        return sizes_of(self._learner.model)

    @spread()
    def longest(self) -> int:
        """How many tokens a rollout may have."""
        return self._longest

    @spread()
    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights by their published names."""
        return self._learner.weights()

    @spread()
    def tensors(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this rank in tensors."""
        critic = self._beside.critic
        return self._learner.state() if critic is None else {**self._learner.state(), CRITIC: critic.state()}

    @spread()
    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint keeps in plain numbers: the algorithm's own state."""
        return asdict(self._following)

    @spread()
    def restore(self, tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        if self._beside.critic is not None:
            self._beside.critic.restore(tensors[CRITIC])
        self._learner.restore({name: value for name, value in tensors.items() if name != CRITIC})
        means = {int(role): mean for role, mean in facts["role_means"].items()}
        self._following = State(facts["kl_value"], means)

    @spread()
    def save(self, checkpoints: Checkpoints, step: int, facts: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint, each rank its share."""
        return checkpoints.save(step, self.tensors(), facts)

    @spread()
    def resume(self, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        """Go on from what lies on the disk, however many ranks wrote it."""
        tensors = self.tensors()
        checkpoints.load(checkpoint, tensors)
        self.restore(tensors, checkpoint.facts["learner"])

    # -- servers --------------------------------------------------------------------------------------------------

    @spread(gather=Gather.ALL)
    def machine(self) -> list[str]:
        """Which machine each rank is on; see `dispatch.machine`."""
        return machine()  # type: ignore[return-value]

    @spread(gather=Gather.ALL)
    def carry(self, servers: Mapping[int, Address], version: int, how: Carriage, anew: bool = False) -> list[Carried]:
        """Bring servers, by their places, to the weights, under this version, each rank its share of them; what came of
        each.

        anew: these were started again, and the version is the one that was carried last. Where the weights have moved
        on since, they are left as they are: the next publish brings them.
        """
        mine = how.share(servers, place(of_group()))
        if anew and self._carried != self._learner.version:
            left = [Brought(each.url, took=False, begun=False, why="The weights have moved on.") for each in mine]
            return Carried(left)  # type: ignore[return-value]
        self._carried = self._learner.version
        self._courier = self._courier or Courier(how.sync, self._learner.model.device)
        with self._served(how.untied) as weights:
            return self._courier.carry(mine, weights, version)  # type: ignore[return-value]

    @spread()
    def write(self, directory: Path, tokenizer: Path, untied: bool, bare: bool = False) -> int:
        """Write the policy as a model directory that a server loads; how many bytes its weights are. One rank does.

        untied: with a head of its own, where that is the embedding. bare: without its adapters.
        """
        model = self._learner.model
        told = model.described() | ({"tie_word_embeddings": False} if untied and not bare else {})
        with nullcontext(model.bare_weights()) if bare else self._served(untied) as weights:
            if is_first(of_group()):
                export(weights, told, directory, tokenizer=tokenizer)
        return sum(file.stat().st_size for file in directory.glob("*.safetensors"))

    @spread()
    def write_adapter(self, directory: Path, base: Path) -> int:
        """Write the adapters of the policy alone, as peft does; how many bytes they are. One rank does. base: where the
        model lies that they adapt."""
        if is_first(of_group()):
            model = self._learner.model
            export_adapter(model.adapter_weights(), adapter_config(model, base), directory)
        return sum(file.stat().st_size for file in directory.glob("*.safetensors"))

    @spread()
    def adapter_rank(self) -> int:
        """The inner width of its widest adapter."""
        named = self._learner.model.adapter_weights()
        return max((weight.shape[0] for name, weight in named.items() if ".lora_A." in name), default=0)

    @contextmanager
    def _served(self, untied: bool) -> Iterator[Iterable[tuple[str, Tensor]]]:
        """The weights as servers compute with them, one at a time: adapters are added in. untied: see `write`. Where
        they are divided, every rank goes through all of them, whatever it does with them."""
        model = self._learner.model
        if not self._learner.divided:
            yield model.untied_weights() if untied else model.merged_weights()
            return
        whole = self._learner.weights()
        weights = InStep(model.untied_weights(whole) if untied else whole)
        try:
            yield weights
        finally:
            weights.rest()

    # -- sampling -------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Ids, sampling: SamplingParams, *, begun: Callable[[], None]) -> Completion:
        """Answer one question by this rank's engine."""
        return await self._hosted.generate(prompt, sampling, begun=begun)

    @spread()
    def publish(self, version: int) -> Metrics:
        """Have the engine compute with the learner's weights, under a new version; what that cost, on each rank."""
        model, weights = self._learner.model, InStep(self.weights())
        if self._hosted.model is model:
            self.assemble()
        try:
            told = asyncio.run(LocalCarrier(self._hosted).publish(weights, version, model.named_weights()))
        finally:
            if self._learner.divided:
                weights.rest()
        asyncio.run(self._hosted.wake())  # where it slept, to make room
        asyncio.run(self._hosted.resume())  # it has paused since the update
        dismiss_team()
        return told

    def assemble(self) -> None:
        """Have the weights be whole in the model, where they are divided, until the next update."""
        self._learner.assemble()

    @spread()
    def make_room(self) -> None:
        """Have the engine give its memory up, until new weights are published. What it still computes, nobody waits
        for."""
        asyncio.run(self._hosted.abort())
        asyncio.run(self._hosted.sleep())

    @spread(gather=Gather.METRICS)
    def sampled(self) -> Metrics:
        """What the engine did since this was last asked. It is busy beside those of the other ranks."""
        seen = dict(self._hosted.stats())
        seen["engine/busy_seconds"] = Sum.of((seen["engine/busy_seconds"].value() or 0.0) / count(of_group()))
        return Metrics(seen)

    @spread(gather=Gather.METRICS)
    def utilisation(self) -> Metrics:
        """How busy the device was since this was last asked."""
        return self._meter.read()

    @property
    def _hosted(self) -> TorchEngine:
        assert self._engine is not None, "a worker that samples has an engine"
        return self._engine


def _wait_for(work: Coroutine[Any, Any, None]) -> None:
    """Until it is done, on a thread of its own: whoever has an update made may stand on an event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()
