"""The dry run of a supervised step: see `dry_run`.

Its examples have the maximum length, with a loss on all tokens but the first.

    annotating   the forward pass of a reference or a teacher
    updating     two full micro-batches, and the optimizer step
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from etude.batch import Batch
from etude.data.preferences import PreferenceDataConfig
from etude.data.tokenization import TokenRow
from etude.recipes import auxiliary_models
from etude.recipes.supervised.builder import build_supervised_worker
from etude.recipes.supervised.config import SupervisedRun
from etude.recipes.supervised.distill import DistillRun
from etude.recipes.supervised.dpo import DPORun
from etude.recipes.supervised.examples import batch_of
from etude.tools.plan.dry_run_common import (
    MICRO_BATCHES,
    DryRunResult,
    Layers,
    build_frozen,
    build_policy,
    copy_for_save,
    dry_run_options,
    label_by_optimizers,
    logits_labeler,
)
from etude.tools.plan.memory_tracker import MemoryTracker
from etude.train import FrozenModel
from etude.train.backend import model_of
from etude.train.optim import PRECISIONS


class SupervisedDryRun:
    """The dry run of a supervised run."""

    def __init__(
        self, run: SupervisedRun, fake_device: AbstractContextManager[Any], tracker: MemoryTracker, layers: Layers
    ) -> None:
        """fake_device: a context in which tensors report the planned device."""
        self.fake_device, self.tracker, self.layers = fake_device, tracker, layers
        self.activation_checkpointing = run.train.activation_checkpointing
        steps = run.steps or run.train.warmup_steps + 1  # only the data files tell the number of steps
        self.run = run.model_copy(update={"train": dry_run_options(run.train), "steps": steps, "epochs": None})
        self.mesh = auxiliary_models.build_mesh(run)
        with tracker.labeled_as("weights"):
            self.policy = build_policy(run, self.mesh, layers)
        self.model = model_of(self.policy)
        self.copy: object = None
        """The copy of the trained state that is written in the background."""
        self.max_tokens = run.data.max_row_tokens(self.model.context_length)

    def execute(self) -> DryRunResult:
        """Execute each phase once."""
        run, tracker, model = self.run, self.tracker, self.model
        labeler = logits_labeler(model)
        with label_by_optimizers(tracker, model):
            frozen = self._frozen_model()
            with tracker.labeled_as("optimizer"):
                worker = build_supervised_worker(run, self.policy, frozen)
            model.activation_checkpointing = self.activation_checkpointing
            if run.checkpoint.async_save:
                with self.fake_device, tracker.labeled_as("copy"):
                    self.copy = copy_for_save(worker.tensors())
            batch = worst_case_examples(run, self.max_tokens, -(-run.batch_size * run.mesh.size // run.ranks))
            if frozen is not None:
                with self.fake_device, tracker.phase("annotating"), tracker.labeled_as("activations", labeler):
                    batch = worker.annotate(batch)
            with self.fake_device, tracker.phase("updating"), tracker.labeled_as("activations", labeler):
                worker.update(batch)
        return DryRunResult(tracker.trace(), run, 0, 0, (1, self.max_tokens - 1))

    def _frozen_model(self) -> FrozenModel | None:
        """Build the reference or the teacher, if the run has one."""
        run, max_tokens_per_micro_batch = self.run, self.run.train.max_tokens_per_micro_batch
        if isinstance(run, DPORun) and "ref_logp" in run.loss.required_columns():
            if run.reference.path is None and run.lora.rank:
                return FrozenModel(self.policy, max_tokens_per_micro_batch, disable_adapters=True)
            role, path, temperature = "reference", run.reference.path, 1.0
        elif isinstance(run, DistillRun):
            role, path, temperature = "teacher", run.teacher.path, run.temperature
        else:
            return None
        directory = path or run.model.path
        assert directory is not None, "a run has a model"
        with self.tracker.labeled_as(role):
            frozen = build_frozen(directory, PRECISIONS[run.train.precision], self.mesh, self.layers)
        return FrozenModel(frozen, max_tokens_per_micro_batch, temperature=temperature)


def worst_case_examples(run: SupervisedRun, max_tokens: int, count: int) -> Batch:
    """Return `count` examples of maximum length, but at most a few micro-batches."""
    sides = 2 if isinstance(run.data, PreferenceDataConfig) else 1
    max_examples = MICRO_BATCHES * max(1, run.train.max_tokens_per_micro_batch // (sides * max_tokens))
    zeros = np.zeros(max_tokens, np.int32)
    row = TokenRow(zeros, np.arange(max_tokens) >= 1, zeros.astype(np.int16))
    return batch_of([((row,),) * sides] * min(count, max_examples))
