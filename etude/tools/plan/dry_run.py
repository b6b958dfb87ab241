"""The dry run of one training step: the real model, trainer, algorithm and KV cache, on fake tensors.

No memory is estimated by formula. The dry run builds the parts of a run as `build` does. It executes each phase once
in its worst case: longest prompts and answers, full micro-batches, and all slots of the engine in use.

    sampling     one engine step that reads prompts, and one with every request at the end of its answer
    annotating   the forward passes over a batch before the update
    updating     two full micro-batches, and the optimizer step

Engine steps use the matrix shapes that most processors allow, with any number of rows in a pass. Processors that need
padded shapes are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from etude.algorithms import AlgorithmState
from etude.batch import COLUMNS, Batch, ColumnKind
from etude.data.pack import pack_prefix_tree
from etude.errors import ConfigError
from etude.lazy import pause_gc
from etude.models import EngineModel, create_empty
from etude.models.prepack import can_prepack
from etude.observe import get_logger
from etude.recipes.recipe import Recipe
from etude.recipes.run.builders import auxiliary_models, lengths
from etude.recipes.run.config import Run
from etude.recipes.run.machine.placement import ROLES
from etude.recipes.run.roles import CRITIC_COLUMNS, REFERENCE_COLUMNS, TEACHER_COLUMNS, model_rewards
from etude.recipes.supervised.config import SupervisedRun
from etude.recipes.workers.policy_worker import LossObjective, PolicyWorker
from etude.recipes.workers.utilization import measure_peak_flops
from etude.records import Rollout, Sample
from etude.rollout import TorchEngineConfig
from etude.rollout.batch_invariance import UNPADDED_SHAPES, USUAL_SHAPES
from etude.rollout.kv_cache import count_blocks
from etude.rollout.step_batch import EngineCaches
from etude.tools.plan.dry_run_common import (
    ALL_LAYERS,
    MICRO_BATCHES,
    Depth,
    DryRun,
    DryRunResult,
    Layers,
    Setting,
    build_model,
    build_policy,
    dry_run_options,
    label_by_optimizers,
    logits_labeler,
)
from etude.tools.plan.engine_steps import engine_steps, run_engine_step
from etude.tools.plan.fake_tensors import FakeDeviceMode, fake_process_group, use_fake_tensors
from etude.tools.plan.few_layers import count_layers
from etude.tools.plan.layer_extrapolation import Repeat, extrapolate
from etude.tools.plan.memory_tracker import MemoryTracker
from etude.tools.plan.supervised_dry_run import SupervisedDryRun
from etude.tools.plan.worst_images import WorstImages, find_worst_images, kept_features
from etude.train import Learner
from etude.train.backend import HeldModel, model_of
from etude.train.forward import ForwardPass
from etude.train.micro_batches import iterate_micro_batches
from etude.train.optim import PRECISIONS

ALL_ROLES = frozenset({"policy", "engine", *ROLES})
"""The models that may have memory on a device."""


def dry_run(run: Recipe, device: torch.device, roles: frozenset[str] = ALL_ROLES) -> DryRunResult:
    """Run one rank's step on fake tensors of a device, with the models (`roles`) that are on it.

    Of deep models it builds few layers, and composes the memory of all layers from two runs; see `few_layers`.
    """
    counts = count_layers(run, roles)
    if counts:
        few = {path: Depth(count.few, count.total, count.period, count.start) for path, count in counts.items()}
        result = _run_with_layers(run, device, roles, few)
        repeats = []
        for path, count in counts.items():
            more = {**few, path: replace(few[path], built=count.few + count.period)}
            repeats.append(Repeat(_run_with_layers(run, device, roles, more).memory, count.repeats))
        memory = extrapolate(result.memory, repeats)
        if memory is not None:
            return replace(result, memory=memory)
    return whole_dry_run(run, device, roles)


def whole_dry_run(run: Recipe, device: torch.device, roles: frozenset[str] = ALL_ROLES) -> DryRunResult:
    """Run the step with all layers of all models. It takes time in proportion to the number of layers."""
    return _run_with_layers(run, device, roles, ALL_LAYERS)


def _run_with_layers(run: Recipe, device: torch.device, roles: frozenset[str], layers: Layers) -> DryRunResult:
    """Execute the dry run with so many layers of each model."""
    measure_peak_flops(PRECISIONS[run.train.precision], torch.device("cpu"))  # only the first run would measure it
    tracker = MemoryTracker()
    with (
        pause_gc(),  # it would release memory at other moments in each run
        use_fake_tensors(tracker) as fake_mode,
        fake_process_group(run.ranks),
        _translate_errors(),
    ):
        fake_device = nullcontext() if device.type == "cpu" else FakeDeviceMode(fake_mode, device)
        return _execute(run, Setting(tracker, fake_device, roles, layers))


def real_run(run: Recipe) -> DryRunResult:
    """Run the same step on this processor with random weights and real memory, to check the dry run against it.

    With several ranks, each rank calls this.
    """
    return _execute(run, Setting(MemoryTracker(), nullcontext(), ALL_ROLES, ALL_LAYERS, real=True))


def _execute(run: Recipe, setting: Setting) -> DryRunResult:
    if isinstance(run, SupervisedRun):
        return SupervisedDryRun(run, setting).execute()
    assert isinstance(run, Run), "every recipe is one or the other"
    return _DryRun(run, setting).execute()


class _DryRun(DryRun[Run]):
    """The dry run of an RL run."""

    def __init__(self, run: Run, setting: Setting) -> None:
        critic = run.critic.model_copy(update={"train": dry_run_options(run.critic.train)})
        super().__init__(run, setting, {"critic": critic, "ppo_epochs": 1, "steps": run.steps * run.ppo_epochs})
        self.roles = setting.roles & {"policy", "engine", "reward", *run.active_roles()}
        self.engine_model = self.policy
        has_own_engine = isinstance(run.rollout, TorchEngineConfig) and (
            run.placement.layout == "split" or self.mesh is not None
        )
        if has_own_engine and "engine" in self.roles:
            with self.tracker.labeled_as("engine" if "policy" in self.roles else "weights"):
                self.engine_model = model_of(build_policy(run, None, setting.layers))
        sizes, depth = self.engine_model.sizes, setting.layers.get(self.path)
        self.planned = self.engine_model.with_sizes(sizes if depth is None else depth.extend(sizes))
        """The engine's model, with the sizes of all its layers."""
        lengths.check_context_length(run, self.planned)
        self.row = self._max_lengths()
        self.images = find_worst_images(run, self.row[0])

    def _max_lengths(self) -> tuple[int, int]:
        """Return the longest prompt and the longest answer, in tokens."""
        run, prompt = self.run, self.run.data.max_prompt_length
        if not run.is_episodic:
            return prompt, run.sampling.max_tokens
        total = lengths.max_total_tokens(self.planned, run.embedded_engine)
        if run.env.is_enabled:
            total = run.env.longest_rollout(total)
        return prompt, max(total - prompt, 1)

    def execute(self) -> DryRunResult:
        run = self.run
        tracker = self.tracker
        engine = self.run.rollout
        rollouts = -(-run.collect.tasks * run.collect.group_size // run.ranks)
        slots = engine.max_concurrency(ranks=1)
        max_concurrency = slots if run.data.val else min(slots, rollouts)
        kv_tokens = 0
        with label_by_optimizers(tracker, self.policy):
            worker = self._worker() if "policy" in self.roles else None
            if not isinstance(engine, TorchEngineConfig):
                with tracker.phase("sampling"):  # servers sample; the memory here stays allocated
                    pass
            elif "engine" in self.roles:
                blocks = count_blocks(self.planned, engine)
                kv_tokens = blocks * engine.block_size
                self._sample(engine, blocks, max_concurrency)
            if "reward" in self.roles:
                self._score()
            if worker is not None:
                self._learn(worker)
            else:
                self._run_without_policy()
        depth = self.setting.layers.get(self.path)
        return DryRunResult(tracker.trace(), run, kv_tokens, max_concurrency, self.row, depth)

    def _worker(self) -> PolicyWorker:
        """Build the worker of the policy, with the reference, teacher and critic of this device."""
        run, roles = self.run, self.roles
        reference = self.frozen("reference", run.reference.path) if "reference" in roles else None
        teacher = self.teachers(run.teacher) if "teacher" in roles else None
        critic = self._critic() if "critic" in roles else None
        with self.tracker.labeled_as("optimizer"):
            worker = auxiliary_models.build_policy_worker(
                run, self.held, None, reference=reference, teacher=teacher, critic=critic, pixels=self.pixels
            )
        if critic is not None:
            model_of(critic).activation_checkpointing = self.requested.critic.train.activation_checkpointing
        self.prepare_update(worker)
        return worker

    def _critic(self) -> HeldModel:
        critic = self.run.critic
        with self.tracker.labeled_as("critic"):
            dtype = PRECISIONS[critic.train.precision]
            return build_model(critic.path or self.path, dtype, self.mesh, self.setting.layers, head="value")

    def _sample(self, options: TorchEngineConfig, blocks: int, max_concurrency: int) -> None:
        """Allocate the KV cache and run two engine steps. The cache stays, unless the engine sleeps afterwards."""
        run = self.run
        model = self.engine_model
        tracker = self.tracker
        real = self.setting.real
        with tracker.labeled_as("engine"):
            engine = EngineModel(model, merge=run.lora.publish == "merged", prepack=real and options.prepack)
            with self.setting.fake_device:
                prepacked = _prepacked_weights(engine) if options.prepack and not real else []
        with self.setting.fake_device, torch.no_grad(), engine.activate():
            with tracker.labeled_as("kv"):
                size = options.block_size
                max_num_seqs = options.max_num_seqs
                routes = engine.model.control_routers("train.router_replay=r3") if run.records_routes else None
                caches = EngineCaches(model, blocks=blocks, size=size, max_num_seqs=max_num_seqs, routes=routes)
            shapes = USUAL_SHAPES if options.deterministic and model.dtype == torch.float32 else UNPADDED_SHAPES
            features: list[Tensor] = []
            if self.images is not None:
                with tracker.labeled_as("features"):
                    features = kept_features(engine.model, self.images)
            with tracker.phase("sampling"), tracker.labeled_as("activations", logits_labeler(engine.model)):
                params = run.sampling.params(0)
                steps = engine_steps(options, model, params, blocks, max_concurrency, sum(self.row))
                for scheduled, table in steps:
                    run_engine_step(engine.model, caches, scheduled, table, shapes, real=real, images=self.images)
                    for cache in caches.kv:
                        cache.scratch_memory = torch.empty(0, dtype=cache.dtype)
            tracker.label(caches.state_memory(), "kv")
        if not self.requested.train.offload:
            self.kept_alive += [caches, engine, prepacked, features]

    def _learn(self, worker: PolicyWorker) -> None:
        run = self.run
        batch = worst_case_batch(run, self.row, self.images)
        if run.records_routes:
            batch = batch.replace(routes=torch.tensor(worker.served_routes().blank(batch.num_tokens)))
        columns = run.model_columns() - self._absent_columns()
        with self.phase("annotating", self.policy):
            if columns:
                worker.annotate(batch, columns)
        batch = worker.estimate(batch, run.critic.warmup + 1)
        if batch.old_logp is None:
            batch = batch.replace(old_logp=torch.tensor([0.0] * batch.num_tokens))
        with self.phase("updating", self.policy):
            worker.update([batch])

    def _absent_columns(self) -> frozenset[str]:
        columns_of = {"reference": REFERENCE_COLUMNS, "teacher": TEACHER_COLUMNS, "critic": CRITIC_COLUMNS}
        return frozenset().union(*(columns for role, columns in columns_of.items() if role not in self.roles))

    def _run_without_policy(self) -> None:
        """Run the phases of the models on a device without the policy."""
        run = self.run
        tracker = self.tracker
        batch = worst_case_batch(self.run, self.row, self.images)
        reference = [self.frozen("reference", run.reference.path)] if "reference" in self.roles else []
        teachers = self.teachers(run.teacher).models if "teacher" in self.roles else []
        for frozen in (*reference, *teachers):
            with self.phase("annotating", frozen.model):
                frozen.logp(batch)
        if "critic" in self.roles:
            critic = self._critic()
            with tracker.labeled_as("optimizer"):
                steps = run.steps * run.mini_batches
                learner = Learner(critic, run.critic.train, steps=steps, option="critic.train")
            learner.model.activation_checkpointing = self.requested.critic.train.activation_checkpointing
            batch = run.estimate(batch, AlgorithmState()).batch
            with self.phase("annotating", learner.model):
                learner.annotate(batch, learner.columns & run.model_columns())
            with self.phase("updating", learner.model):
                learner.update(batch, LossObjective(run.critic.loss))

    def _score(self) -> None:
        batch = worst_case_batch(self.run, self.row)
        for reward in model_rewards(self.run.reward):
            with self.tracker.labeled_as("reward model"):
                depth, dtype = self.setting.layers.get(reward.path), PRECISIONS[reward.precision]
                layers = None if depth is None else depth.built
                model = create_empty(reward.path, dtype=dtype, head="score", layers=layers)
            forward = ForwardPass(model, pack_prefix_tree, 1.0)
            with torch.no_grad(), self.phase("scoring", model):
                for micro, _ in iterate_micro_batches(
                    batch, reward.max_tokens_per_micro_batch, "rollout", model.device
                ):
                    forward(micro, frozenset({"score"}))
            self.kept_alive.append(model)


def _prepacked_weights(engine: EngineModel) -> list[Tensor]:
    """Return fake copies of the weights that the engine prepacks for its kernels."""
    return [torch.empty_like(linear.weight) for linear in engine.linear_weights() if can_prepack(linear.weight)]


def worst_case_batch(run: Run, row: tuple[int, int], images: WorstImages | None = None) -> Batch:
    """Return one rank's share of an update batch with rows of maximum length, at most a few micro-batches.

    images: those of each prompt.
    """
    prompt, answer = row
    budget = run.train.max_tokens_per_micro_batch
    together = run.mesh.ranks_per_rollout
    rollouts = -(-run.collect.tasks * run.collect.group_size * together // (run.mini_batches * run.ranks))
    size = min(run.collect.group_size, rollouts)
    max_groups = MICRO_BATCHES * max(1, budget // (prompt + size * answer))
    if run.loss.split_unit == "rollout":
        most = MICRO_BATCHES * max(1, (budget - prompt) // answer)
        if size >= most:  # a group fills the micro-batches alone
            size = most
            max_groups = 1
    return _batch_of_groups(run, row, min(-(-rollouts // size), max_groups), size, images)


def worst_case_group(run: Run, row: tuple[int, int]) -> Batch:
    """Return the rollouts of a group that one rank has, with rows of maximum length."""
    rollouts = -(-run.collect.tasks * run.collect.group_size // run.ranks)
    return _batch_of_groups(run, row, 1, min(run.collect.group_size, rollouts))


def _batch_of_groups(
    run: Run, row: tuple[int, int], groups: int, size: int, images: WorstImages | None = None
) -> Batch:
    """Return groups of `size` rollouts each, with the columns that the run's losses read."""
    prompt, answer = row
    action = np.arange(prompt + answer) >= prompt
    zeros = np.zeros(prompt + answer, np.int32)
    indices = range(groups * size)
    shown = [() if images is None else images.spans(index // size) for index in indices]
    rows = [
        Sample(zeros, action, zeros.astype(np.float32), zeros, zeros, index, images=shown[index]) for index in indices
    ]
    numbers = dict.fromkeys(run.data.batch_columns, 1.0)
    rollouts_of_batch = [Rollout(i, i // size, i // size, float(i % 2), columns=numbers) for i in indices]
    contents = None if images is None else images.contents(groups)
    batch = Batch.from_records(rows, rollouts_of_batch, images=contents)
    present = {name for name, _ in batch.columns()}
    needed = sorted((run.required_columns() | run.critic.loss.required_columns() | run.model_columns()) - present)
    needed = [name for name in needed if name != "routes"]  # a pass makes it
    return batch.replace(**{name: _zeros(name, batch) for name in needed if name in COLUMNS})


def _zeros(name: str, batch: Batch) -> Tensor:
    dtypes = {"anchor": torch.int64, "role": torch.int64, "observation": torch.bool}
    if COLUMNS[name] is ColumnKind.UNIT:
        return torch.tensor([0] * batch.num_rollouts).to(dtypes.get(name, torch.float64))
    return torch.tensor([0] * batch.num_tokens).to(dtypes.get(name, torch.float32))


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Suppress the models' warnings, and raise an operation without fake tensors as a `ConfigError`."""
    log = get_logger("models")
    before = log.disabled
    log.disabled = True
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"This run cannot be executed with fake tensors, so it has no plan: {error} Run it at a small size: "
            f"`peak_memory_gb` in its metrics is the memory of an update."
        ) from error
    finally:
        log.disabled = before
