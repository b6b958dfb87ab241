"""The dry run of a supervised step: see `dry_run`.

Its examples have the maximum length, with a loss on all tokens but the first. A model that takes images computes them
twice: once as text, whose logits need most memory, and once with images instead, which are all the tower's. What lies
between needs less than one of both.

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
from etude.tools.plan.worst_images import WorstImages, find_worst_images
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
            self.images = find_worst_images(run, max_tokens - 1)
            frozen = self._frozen_model()
            with tracker.labeled_as("optimizer"):
                worker = build_supervised_worker(run, self.held, frozen, self.pixels)
            self.prepare_update(worker)
            count = -(-run.batch_size * run.mesh.ranks_per_rollout // run.ranks)
            batches = [worst_case_examples(run, max_tokens, count)]
            if self.images is not None:
                batches.append(worst_case_examples(run, max_tokens, count, self.images))
            if frozen is not None:
                with self.phase("annotating", model):
                    batches = [worker.annotate(batch) for batch in batches]
            with self.phase("updating", model):
                for batch in batches:
                    worker.update(batch)
        depth = self.setting.layers.get(self.path)
        return DryRunResult(tracker.trace(), run, 0, 0, (1, max_tokens - 1), depth)

    def _frozen_model(self) -> ScoringModel | None:
        run = self.run
        if isinstance(run, DPORun) and "ref_logp" in run.loss.required_columns():
            return self.frozen("reference", run.reference.path)
        return self.teachers(run.teacher, run.temperature) if isinstance(run, DistillRun) else None


def worst_case_examples(run: SupervisedRun, max_tokens: int, count: int, images: WorstImages | None = None) -> Batch:
    """Return `count` examples of maximum length, but at most a few micro-batches. images: those of each."""
    sides = 2 if isinstance(run.data, PreferenceDataConfig) else 1
    context = 0 if images is None else images.count * images.tokens  # both answers of a pair share it
    packed = context + sides * (max_tokens - context)
    max_examples = MICRO_BATCHES * max(1, run.train.max_tokens_per_micro_batch // packed)
    zeros = np.zeros(max_tokens, np.int32)
    number = min(count, max_examples)
    shown = [() if images is None else images.spans(index) for index in range(number)]
    action = np.arange(max_tokens) >= max(1, context)
    rows = [TokenRow(zeros, action, zeros.astype(np.int16), spans) for spans in shown]
    contents = None if images is None else images.contents(number)
    return batch_of([((row,),) * sides for row in rows], images=contents)
