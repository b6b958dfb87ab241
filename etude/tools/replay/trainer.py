"""The trainer of a replay: a run's policy, its optimizer and its algorithm, over recorded rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from torch import Tensor

from etude.checkpoint import Checkpoint, CheckpointManager, TensorTree
from etude.dispatch import CrewConfig, LocalCrew
from etude.observe import Mean, Metrics
from etude.recipes.collect.recorded import RecordedSteps
from etude.recipes.collect.statistics import CollectionWarnings
from etude.recipes.run.builders.collection import step_groups_builder
from etude.recipes.run.builders.crew import build_trainer
from etude.recipes.run.config import Run
from etude.recipes.run.steps.components import Learners
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.store import Journal
from etude.tools.replay.observer import StepObserver
from etude.train import MeshConfig

TrainerState = tuple[TensorTree, Mapping[str, Any]]
"""The tensors and the plain values that the next step depends on."""
START_COLUMNS = frozenset({"old_logp", "entropy"})
"""The columns that an observer has at the weights that a step begins with."""


def read_steps(run: Run, store: Journal) -> RecordedSteps:
    """Return the recorded steps of a run."""
    builder = step_groups_builder(run, CollectionWarnings(one_by_one=False))
    return RecordedSteps(store, builder, run.agent.failed_reward)


class RecordedTrainer:
    """Trains on the recorded rollouts of steps, as the run did, without an engine."""

    def __init__(self, steps: RecordedSteps, crew: LocalCrew, learners: Learners) -> None:
        self._steps = steps
        self._crew = crew
        self.learners = learners

    def resume(self, checkpoints: CheckpointManager, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of the run."""
        self.learners.resume(checkpoints, checkpoint)

    def train(self, step: int, observer: StepObserver | None = None) -> Metrics:
        """Train on the rollouts of a step, and return the metrics. observer: sees the step's updates."""
        groups = self._steps.groups(step)
        batch = self.learners.annotate(groups.scored, step - 1)
        batch = self.learners.estimate(batch, step)
        self._crew.call(PolicyWorker.observe, observer)
        if observer is not None:
            batch = observer.begin(batch, self._crew.call(PolicyWorker.annotate, batch, START_COLUMNS))
        metrics = self.learners.update(batch)
        rewards = [scored.trained_reward for scored in groups.scored]
        metrics.add("reward", Mean.over(sum(rewards), len(rewards)))
        return metrics

    def state(self) -> TrainerState:
        """Return a copy of what the next step depends on."""
        return _copy(self._crew.call(PolicyWorker.tensors)), self.learners.facts()

    def restore(self, state: TrainerState) -> None:
        """Continue from the state of another trainer, whose algorithm may differ."""
        self._crew.call(PolicyWorker.restore, *state)


@contextmanager
def open_trainer(run: Run, steps: RecordedSteps) -> Iterator[RecordedTrainer]:
    """Yield the trainer of a run in its initial state."""
    run = _one_process(run)
    worker = build_trainer(run)
    with closing(worker), closing(LocalCrew(worker)) as crew:
        learners = Learners(
            crew,
            run.model_columns(),
            run.mini_batches,
            run.loss.split_unit,
            run.ess_floor,
            read_images=steps.images,
        )
        yield RecordedTrainer(steps, crew, learners)


def _one_process(run: Run) -> Run:
    train = run.train.model_copy(update={"engine": "local"})
    critic = run.critic.model_copy(update={"train": run.critic.train.model_copy(update={"engine": "local"})})
    alone = {"ranks": 1, "cluster": "local", "mesh": MeshConfig(), "crew": CrewConfig()}
    return run.model_copy(update={**alone, "train": train, "critic": critic})


def _copy(tree: TensorTree) -> TensorTree:
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else _copy(value)
        for name, value in tree.items()
    }
