"""What runs on a rank: the policy's learner, and the algorithm that it learns by.

The controller speaks to these through a crew. Token columns come in and go out as batches; numbers come out as metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from etude.algorithms import Algorithm, Denominators, LossValue, Outputs, State, View
from etude.algorithms.losses.supervised import Value
from etude.batch import Batch
from etude.observe import Last, Metrics
from etude.protocols import Gather, Split, spread
from etude.train import Frozen, Learner

__all__ = ["Beside", "Foresee", "Improve", "PolicyWorker"]

CRITIC = "critic"
"""What the critic's tensors are kept under, beside the policy's."""


class Improve:
    """What a policy's update minimises: the run's algorithm, under the state that its batch was estimated in."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self.state = State()

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
        return self._algorithm.objective(batch, outputs, whole, self.state)


@dataclass(frozen=True)
class Foresee:
    """What a critic's update minimises: a loss of its own."""

    wrapped: Value
    split_unit: Literal["rollout", "group"] = "rollout"

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
    foresee: Foresee = Foresee(Value())
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
        updates: int,
        epochs: int,
        beside: Beside | None = None,
    ) -> None:
        self._algorithm, self._learner, self._beside = algorithm, learner, beside or Beside()
        self._seed, self._updates, self._epochs = seed, updates, epochs
        self._objective = Improve(algorithm)
        self._following = State()
        self._estimated = Metrics()
        self._step = 0

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
        found = self._algorithm.estimate(batch, self._following, seed=self._seed, step=step)
        self._objective.state, self._following = found.state, found.following
        self._estimated = found.metrics
        return found.batch

    @spread(Split.GROUPS, Gather.METRICS)
    def update(self, batch: Batch) -> Metrics:
        """Every optimizer step of this step, and what was seen since the batch came."""
        metrics, self._estimated = self._estimated, Metrics()
        before = self._learner.version
        for _ in range(self._epochs):
            for part in batch.split(self._updates, by=self._algorithm.loss.split_unit):
                if self._beside.critic is not None:
                    told = self._beside.critic.update(part, self._beside.foresee)
                    metrics.merge({f"critic/{name}": metric for name, metric in told.items()})
                if self._step > self._beside.warmup:
                    metrics.merge(self._learner.update(part, self._objective))
        metrics.add("optimizer_steps", Last.of(self._learner.version - before))
        return metrics

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
