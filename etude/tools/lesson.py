"""A step of a run that learns from examples, played through without memory: see `rehearsal`.

Its examples are as long as they may be, and all of them is learned: only the first token of each is given.

    asking       what a reference or a teacher tells of them
    updating     two full micro-batches, and the optimizer's step
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from etude.batch import Batch
from etude.data.lessons import Row
from etude.data.preferences import Preferences
from etude.models import outlined
from etude.recipes import models, school
from etude.recipes.distill import DistillRun
from etude.recipes.dpo import DPORun
from etude.recipes.lessons import batch_of
from etude.recipes.supervised import Supervised
from etude.tools.ledger import Ledger
from etude.tools.rehearsed import FULL, Rehearsed, loading, named_by_optimizers, policy, wide
from etude.train import Frozen

__all__ = ["Lesson", "examples"]


class Lesson:
    """The parts of a run that learns from examples."""

    def __init__(self, run: Supervised, on: AbstractContextManager[Any], ledger: Ledger) -> None:
        """on: within, what computes believes itself on the device that is planned for."""
        self.on, self.ledger = on, ledger
        rests = run.train.model_copy(update={"offload": False})  # where it rests is said when the ledger is read
        steps = run.steps or run.train.warmup + 1  # how many there are is known of the files alone
        self.run = run.model_copy(update={"train": rests, "steps": steps, "epochs": None})
        self.mesh = models.mesh_of(run)
        with ledger.of("weights"), loading(ledger, run.train):
            self.model = policy(run)
        self.longest = run.data.longest(self.model.context)

    def play(self) -> Rehearsed:
        """Each phase once."""
        run, ledger, model = self.run, self.ledger, self.model
        named = wide(model)
        with named_by_optimizers(ledger, model):
            other = self._other()
            with ledger.of("optimizer"), loading(ledger, run.train):
                worker = school.worker_of(run, model, other, self.mesh)
            batch = examples(run, self.longest, -(-run.batch_size * run.mesh.size // run.ranks))
            if other is not None:
                with self.on, ledger.phase("asking"), ledger.of("activations", named):
                    batch = worker.annotate(batch)
            with self.on, ledger.phase("updating"), ledger.of("activations", named):
                worker.update(batch)
        return Rehearsed(ledger, model, 0, 0, (1, self.longest - 1))

    def _other(self) -> Frozen | None:
        """The reference or the teacher, where there is one."""
        run, micro = self.run, self.run.train.micro_tokens
        if isinstance(run, DPORun) and "ref_logp" in run.loss.needs():
            if run.reference.path is None and run.lora.rank:
                return Frozen(self.model, micro, unadapted=True, mesh=self.mesh)
            role, path, warmth = "reference", run.reference.path, 1.0
        elif isinstance(run, DistillRun):
            role, path, warmth = "teacher", run.teacher.path, run.temperature
        else:
            return None
        where = path or run.model.path
        assert where is not None, "a run has a model"
        with self.ledger.of(role):
            return Frozen(outlined(where, dtype=self.model.dtype), micro, temperature=warmth, mesh=self.mesh)


def examples(run: Supervised, longest: int, count: int) -> Batch:
    """So many examples at their worst, or as many of them as fill a few micro-batches."""
    sides = 2 if isinstance(run.data, Preferences) else 1
    enough = FULL * max(1, run.train.micro_tokens // (sides * longest))
    nothing = np.zeros(longest, np.int32)
    row = Row(nothing, np.arange(longest) >= 1, nothing.astype(np.int16))
    return batch_of([((row,),) * sides] * min(count, enough))
