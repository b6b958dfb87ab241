"""The dry run of a supervised step: see `dry_run`.

Its examples have the maximum length, with a loss on all tokens but the first.

    annotating   the forward pass of a reference or a teacher
    updating     two full micro-batches, and the optimizer step
"""

from __future__ import annotations

import numpy as np

from etude.batch import Batch
from etude.data.preferences import PreferenceDataConfig
from etude.data.tokenization import TokenRow
from etude.recipes.supervised.builder import build_supervised_worker
from etude.recipes.supervised.config import SupervisedRun
from etude.recipes.supervised.examples import batch_of
from etude.recipes.supervised.runs import DistillRun, DPORun
from etude.tools.plan.dry_run_common import MICRO_BATCHES, DryRun, DryRunResult, Setting, label_by_optimizers
from etude.train import ScoringModel


class SupervisedDryRun(DryRun[SupervisedRun]):
    """The dry run of a supervised run."""

    def __init__(self, run: SupervisedRun, setting: Setting) -> None:
        steps = run.steps or run.train.warmup_steps + 1  # only the data files tell the number of steps
        super().__init__(run, setting, {"steps": steps, "epochs": None})

    def execute(self) -> DryRunResult:
        run = self.run
        tracker = self.tracker
        model = self.policy
        max_tokens = run.data.max_row_tokens(model.context_length)
        with label_by_optimizers(tracker, model):
            frozen = self._frozen_model()
            with tracker.labeled_as("optimizer"):
                worker = build_supervised_worker(run, self.held, frozen)
            self.prepare_update(worker)
            batch = worst_case_examples(run, max_tokens, -(-run.batch_size * run.mesh.ranks_per_rollout // run.ranks))
            if frozen is not None:
                with self.phase("annotating", model):
                    batch = worker.annotate(batch)
            with self.phase("updating", model):
                worker.update(batch)
        depth = self.setting.layers.get(self.path)
        return DryRunResult(tracker.trace(), run, 0, 0, (1, max_tokens - 1), depth)

    def _frozen_model(self) -> ScoringModel | None:
        run = self.run
        if isinstance(run, DPORun) and "ref_logp" in run.loss.required_columns():
            return self.frozen("reference", run.reference.path)
        return self.teachers(run.teacher, run.temperature) if isinstance(run, DistillRun) else None


def worst_case_examples(run: SupervisedRun, max_tokens: int, count: int) -> Batch:
    """Return `count` examples of maximum length, but at most a few micro-batches."""
    sides = 2 if isinstance(run.data, PreferenceDataConfig) else 1
    max_examples = MICRO_BATCHES * max(1, run.train.max_tokens_per_micro_batch // (sides * max_tokens))
    zeros = np.zeros(max_tokens, np.int32)
    row = TokenRow(zeros, np.arange(max_tokens) >= 1, zeros.astype(np.int16))
    return batch_of([((row,),) * sides] * min(count, max_examples))
