"""A step of a run played through without memory: the real model, learner, algorithm and cache, on outlines.

Nothing is estimated by formula. What a run is made of is put together as `build` does it, and does each of its phases
once, at its worst: prompts and answers as long as they may be, micro-batches full, every place of the engine taken.

    loading      where weights are divided: they are whole for a moment
    sampling     a step of the engine that reads prompts, and one in which everybody is at the end of an answer
    asking       what the models are asked of a batch before anything is learned from it
    updating     two full micro-batches, and the optimizer's step

Otherwise loading is not played: it takes less than updating does. Steps of the engine are played in the form of
products that holds on most processors, whose passes have any number of rows (`most` is None); what other processors
need is not played.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.algorithms import State
from etude.batch import COLUMNS, Batch, Kind
from etude.data.pack import tree
from etude.errors import ConfigError
from etude.models import Model, Resident, outlined
from etude.models.layout import is_laid_out
from etude.observe import get_log
from etude.recipes import checks, models
from etude.recipes.checks import BY_THE_CRITIC, BY_THE_REFERENCE, BY_THE_TEACHER, scored
from etude.recipes.placement import ROLES
from etude.recipes.recipe import Recipe
from etude.recipes.run import Run
from etude.recipes.supervised import Supervised
from etude.recipes.workers import Minimise, PolicyWorker
from etude.records import Rollout, Sample
from etude.rollout import EngineConfig
from etude.rollout.blocks import Blocks
from etude.rollout.kv import Cache, Pass, blocks_of
from etude.rollout.request import Request
from etude.rollout.sampling import draw
from etude.rollout.schedule import Scheduler, Work
from etude.rollout.steady import LOOSE, STEADY, Form, slack
from etude.tools.ledger import Ledger
from etude.tools.lesson import Lesson
from etude.tools.outline import Pretend, as_one_of, without_memory
from etude.tools.rehearsed import FULL, Rehearsed, loading, named_by_optimizers, policy, wide
from etude.train import Frozen, Learner
from etude.train.forward import ForwardPass, cut
from etude.train.optim import PRECISIONS

__all__ = ["EVERYBODY", "batch_of", "perform", "rehearse"]

EVERYBODY = frozenset({"policy", "engine", *ROLES})
"""Whose memory may be on a device."""


def rehearse(run: Recipe, device: torch.device, roles: frozenset[str] = EVERYBODY) -> Rehearsed:
    """Play one rank's step on a device of this kind, as far as it is played by those of its models that are there."""
    ledger = Ledger()
    with without_memory(ledger) as outline, as_one_of(run.ranks), _quietly():
        on = nullcontext() if device.type == "cpu" else Pretend(outline, device)
        return _staged(run, on, ledger, roles).play()


def perform(run: Recipe) -> Rehearsed:
    """The same on this processor, with random weights and memory: what a rehearsal is measured against. Where there are
    several ranks, every one of them does it."""
    return _staged(run, nullcontext(), Ledger(), EVERYBODY, real=True).play()


def _staged(
    run: Recipe, on: AbstractContextManager[Any], ledger: Ledger, roles: frozenset[str], *, real: bool = False
) -> Lesson | _Stage:
    """What is played of a run of either kind. on: within, what computes believes itself on the device that is planned
    for. real: whether it is there, with memory and numbers."""
    if isinstance(run, Supervised):
        return Lesson(run, on, ledger)
    assert isinstance(run, Run), "every recipe is one or the other"
    return _Stage(run, on, ledger, roles, real=real)


class _Stage:
    """The parts of a run that collects."""

    def __init__(
        self, run: Run, on: AbstractContextManager[Any], ledger: Ledger, roles: frozenset[str], *, real: bool
    ) -> None:
        assert run.model.path is not None, "a plan is of a model"
        self.on, self.ledger, self.roles, self.real = on, ledger, roles, real
        self.offload = run.train.offload
        rests = run.train.model_copy(update={"offload": False})  # where it rests is said when the ledger is read
        changes: dict[str, Any] = {"train": rests, "epochs": 1, "steps": run.steps * run.epochs}
        self.run = run.model_copy(update=changes)
        self.mesh = models.mesh_of(run)
        apart = run.placement.layout == "split"
        with ledger.of("weights" if "policy" in roles else None), self._loading():
            self.policy = policy(run)
        self.sampled = self.policy
        if apart and "engine" in roles:
            with ledger.of("engine" if "policy" in roles else "weights"):
                self.sampled = policy(run)
        checks.room(run, self.policy)
        self.row = _row(run, self.policy)
        self.held: object = None
        """What the engine keeps while others work."""

    def play(self) -> Rehearsed:
        """Each phase once."""
        run, ledger, engine = self.run, self.ledger, self.run.rollout
        wanted = -(-run.collect.tasks * run.collect.group_size // run.ranks)
        at_once = engine.max_running if run.data.val else min(engine.max_running, wanted)
        held = 0
        with named_by_optimizers(ledger, self.policy):
            worker = self._worker() if "policy" in self.roles else None
            if not isinstance(engine, EngineConfig):
                with ledger.phase("sampling"):  # servers sample, and what is here waits for them
                    pass
            else:
                blocks = blocks_of(self.policy, engine)
                held = blocks * engine.block_size
                if "engine" in self.roles:
                    if worker is not None and self.sampled is self.policy:
                        worker.assemble()
                    self._sample(engine, blocks, at_once)
            if "reward" in self.roles:
                self._score()
            if worker is not None:
                self._learn(worker)
            else:
                self._ask()
        return Rehearsed(ledger, self.policy, held, at_once, self.row)

    def _worker(self) -> PolicyWorker:
        """The learner, and what stands beside it here."""
        run, here = self.run, self.roles & checks.roles(self.run)
        reference = self._frozen("reference", run.reference.path) if "reference" in here else None
        teacher = self._frozen("teacher", run.teacher.path) if "teacher" in here else None
        critic = self._critic() if "critic" in here else None
        with self.ledger.of("optimizer"), self._loading():
            return models.worker_of(
                run, self.policy, None, mesh=self.mesh, reference=reference, teacher=teacher, critic=critic
            )

    def _loading(self) -> AbstractContextManager[None]:
        """Of whoever is trained here."""
        run, here = self.run, self.roles & {"policy", *checks.roles(self.run)}
        trained = {"policy": run.train, "critic": run.critic.train}
        return loading(self.ledger, *(train for role, train in trained.items() if role in here))

    def _critic(self) -> Model:
        critic = self.run.critic
        dtype, exact = PRECISIONS[critic.train.precision], critic.train.weights == "divided"
        with self.ledger.of("critic"), self._loading():
            return outlined(critic.path or self._path, dtype=dtype, head="value", exact=exact)

    def _frozen(self, role: str, path: Any) -> Frozen:
        if role == "reference" and path is None and self.run.lora.rank:
            return Frozen(self.policy, self.run.train.micro_tokens, unadapted=True, mesh=self.mesh)
        with self.ledger.of(role):
            model = outlined(path or self._path, dtype=self.policy.dtype)
        return Frozen(model, self.run.train.micro_tokens, mesh=self.mesh)

    @property
    def _path(self) -> Any:
        return self.run.model.path

    def _sample(self, how: EngineConfig, blocks: int, at_once: int) -> None:
        """The cache, and two steps of the engine; the cache stays, unless the engine sleeps while others work."""
        run, model, ledger = self.run, self.sampled, self.ledger
        with ledger.of("engine"):
            engine = Resident(model, merge=run.lora.publish == "merged", prepack=self.real and how.prepack)
            with self.on:
                laid = _laid_out(engine) if how.prepack and not self.real else []
        with self.on, torch.no_grad(), engine.used():
            with ledger.of("kv"):
                cache = Cache(model, blocks=blocks, size=how.block_size)
            form = STEADY if how.deterministic and model.dtype == torch.float32 else LOOSE
            with ledger.phase("sampling"), ledger.of("activations", wide(engine.model)):
                for works, table in _steps(run, how, model, blocks, at_once, sum(self.row)):
                    _step(engine.model, cache, works, table, form)
                    cache.fetched = torch.empty(0, dtype=cache.dtype)
        if not self.offload:
            self.held = cache, engine, laid, self.sampled

    def _learn(self, worker: PolicyWorker) -> None:
        run, ledger = self.run, self.ledger
        batch = batch_of(run, self.row)
        told = checks.from_the_models(run)
        asked = told - self._elsewhere()
        with self.on, ledger.phase("asking"), ledger.of("activations", wide(self.policy)):
            if asked:
                worker.annotate(batch, asked)
        batch = worker.estimate(batch, run.critic.warmup + 1)
        if batch.old_logp is None:
            batch = batch.replace(old_logp=torch.tensor([0.0] * batch.tokens))
        with self.on, ledger.phase("updating"), ledger.of("activations", wide(self.policy)):
            worker.update([batch])

    def _elsewhere(self) -> frozenset[str]:
        """The columns that are told by models that are not here."""
        told_by = {"reference": BY_THE_REFERENCE, "teacher": BY_THE_TEACHER, "critic": BY_THE_CRITIC}
        return frozenset().union(*(columns for role, columns in told_by.items() if role not in self.roles))

    def _ask(self) -> None:
        """What those do that are here without the policy."""
        run, ledger, here = self.run, self.ledger, self.roles & checks.roles(self.run)
        batch = batch_of(run, self.row)
        for role, path in (("reference", run.reference.path), ("teacher", run.teacher.path)):
            if role in here:
                model = self._frozen(role, path)
                with self.on, ledger.phase("asking"), ledger.of("activations", wide(model.model)):
                    model.logp(batch)
        if "critic" in here:
            critic = self._critic()
            with ledger.of("optimizer"), self._loading():
                steps = run.steps * run.updates
                learner = Learner(critic, run.critic.train, steps=steps, mesh=self.mesh, option="critic.train")
            batch = run.estimate(batch, State()).batch
            with self.on, ledger.of("activations"):
                with ledger.phase("asking"):
                    learner.annotate(batch, learner.columns & checks.from_the_models(run))
                with ledger.phase("updating"):
                    learner.update(batch, Minimise(run.critic.loss))

    def _score(self) -> None:
        """What reward models are asked."""
        for reward in scored(self.run.reward):
            with self.ledger.of("reward model"):
                model = outlined(reward.path, dtype=PRECISIONS[reward.precision], head="score")
            forward, batch = ForwardPass(model, tree, 1.0), batch_of(self.run, self.row)
            with self.on, torch.no_grad(), self.ledger.phase("scoring"), self.ledger.of("activations"):
                for micro, _ in cut(batch, reward.micro_tokens, "rollout", model.device):
                    forward(micro, frozenset({"score"}))
            self.held = self.held, model


def _laid_out(engine: Resident) -> list[Tensor]:
    """What the engine keeps of its weights once more, in the order of the kernels, where these have one."""
    return [torch.empty_like(each.weight) for each in engine.products() if is_laid_out(each.weight)]


def batch_of(run: Run, row: tuple[int, int]) -> Batch:
    """One rank's share of an update batch at its worst, or as much of it as fills a few micro-batches: every row as
    long as it may be."""
    prompt, answer = row
    rollouts = -(-run.collect.tasks * run.collect.group_size * run.mesh.size // (run.updates * run.ranks))
    size = min(run.collect.group_size, rollouts)
    enough = FULL * max(1, run.train.micro_tokens // (prompt + size * answer))
    groups = min(-(-rollouts // size), enough)
    action = np.arange(prompt + answer) >= prompt
    nothing = np.zeros(prompt + answer, np.int32)
    rows: list[Any] = []
    told: list[Any] = []
    for group in range(groups):
        for _ in range(size):
            place = len(told)
            told.append(Rollout(place, group, group, float(place % 2)))
            rows.append(Sample(nothing, action, nothing.astype(np.float32), nothing, nothing, place))
    batch = Batch.from_records(rows, told)
    there = {name for name, _ in batch.columns()}
    needed = sorted((run.needs() | run.critic.loss.needs() | checks.from_the_models(run)) - there)
    return batch.replace(**{name: _zeros(name, batch) for name in needed if name in COLUMNS})


def _zeros(name: str, batch: Batch) -> Tensor:
    """A column of which nothing is known."""
    whole = {"anchor": torch.int64, "role": torch.int64, "observation": torch.bool}
    if COLUMNS[name] is Kind.UNIT:
        return torch.tensor([0] * batch.rollouts).to(whole.get(name, torch.float64))
    return torch.tensor([0] * batch.tokens).to(whole.get(name, torch.float32))


def _row(run: Run, model: Model) -> tuple[int, int]:
    """The longest prompt, and what may follow it."""
    prompt = run.data.max_prompt
    if run.env.asked:
        return prompt, max((run.env.max_tokens or checks.longest(run, model)) - prompt, 1)
    if run.agent.path is not None:
        return prompt, max(checks.longest(run, model) - prompt, 1)
    return prompt, run.sampling.max_tokens


def _steps(
    run: Run, engine: EngineConfig, model: Model, blocks: int, at_once: int, longest: int
) -> Iterator[tuple[list[Work], Any]]:
    """The work of two steps of the engine: prompts are read, and everybody is at the end of an answer."""
    longest = min(longest, blocks * engine.block_size, model.context)
    for reads, prefill in ((True, engine.prefill_tokens), (False, at_once * longest)):
        scheduler = Scheduler(
            Blocks(blocks, engine.block_size),
            max_running=engine.max_running,
            prefill_tokens=prefill,
            longest=longest + slack(engine.block_size),
        )
        chance = np.random.default_rng(0)
        for _ in range(at_once):
            prompt = chance.integers(0, model.vocabulary, longest - 1).astype(np.int32)
            one = run.sampling.params(0)
            scheduler.add(Request(prompt, one, limit=longest, vocabulary=model.vocabulary, tokenizer=None))
        works = scheduler.schedule()
        if not reads:
            scheduler.advance([Work(each.request, 0, longest - 2) for each in works])
            works = [Work(each.request, longest - 2, longest - 1) for each in works]
        yield works, scheduler.table


def _step(model: Model, cache: Cache, works: list[Work], table: Any, form: Form) -> None:
    """As the engine does one."""
    run = Pass(cache, works, table, form)
    hidden = model.hidden(run.ids, run.positions, run)
    requests = [work.request for work in run.drawing]
    rows = form.rows.logits(model.vocabulary)
    for start in range(0, len(requests), rows):
        some = requests[start : start + rows]
        logits = model.logits(hidden[run.last[start : start + rows]])[: len(some)]
        draw(logits, [r.drawing for r in some], [r.generated for r in some], [r.length for r in some])


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings of what is only played; what cannot be played is a sentence."""
    log = get_log("models")
    before, log.disabled = log.disabled, True
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"This run cannot be rehearsed without its numbers, so no plan can be made of it: {error} Try it at a "
            f"small size: `peak_memory_gb` in its metrics is what an update took."
        ) from error
    finally:
        log.disabled = before
