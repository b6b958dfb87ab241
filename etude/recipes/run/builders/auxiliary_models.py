"""Loads the models besides the policy, the reference, the teacher and the critic, and builds the policy worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from etude.chat import Tokenizer
from etude.errors import ConfigError
from etude.images.pixel_cache import PixelCache
from etude.models import Head, Model, adapt, load
from etude.observe import get_logger
from etude.recipes.recipe import Recipe, TeacherConfig
from etude.recipes.run.builders import lengths
from etude.recipes.run.config import CriticConfig, Run
from etude.recipes.run.directory import check_model
from etude.recipes.workers.policy_worker import AuxiliaryModels, LossObjective, PolicyWorker
from etude.recipes.workers.utilization import measure_peak_flops
from etude.rollout import TorchEngine
from etude.train import FrozenModel, Learner, RoutedModels, ScoringModel, device_mesh
from etude.train.backend import HeldModel, model_of
from etude.train.device_mesh import ShardMeshes
from etude.train.optim import PRECISIONS
from etude.train.sharded_loading import load_sharded

PrepareFn: TypeAlias = Callable[[Model], Model]


def build_mesh(run: Recipe) -> ShardMeshes | None:
    """Return the mesh that the weights of a run are sharded over, or None if its one rank has them whole.

    All ranks call it together, once.
    """
    if run.train.choose_engine(run.ranks) == "local":
        return None
    return device_mesh.build_mesh(run.mesh, run.compute_device().type, timeout=run.crew.timeout)


def load_trained(
    where: Path,
    dtype: torch.dtype,
    mesh: ShardMeshes | None,
    *,
    device: torch.device,
    head: Head = "language",
    keep_float32: bool = True,
    prepare: PrepareFn = lambda model: model,
) -> HeldModel:
    """Load a model to train: whole without a mesh, else this rank's shards.

    dtype: that of forward passes. keep_float32: its own weights are trained. prepare: attaches adapters, or freezes
    parts.
    """
    if mesh is not None:
        return load_sharded(where, mesh, dtype=dtype, device=device, head=head, prepare=prepare)
    return prepare(load(where, dtype=dtype, device=device, head=head, keep_float32=keep_float32))


@dataclass(frozen=True)
class AuxiliaryLoader:
    """Loads the models of a run besides its policy, and checks that they fit the policy."""

    run: Recipe
    policy: HeldModel
    mesh: ShardMeshes | None = None
    pixels: PixelCache | None = None
    """The pixels of images for the policy; None if it takes text alone."""

    @property
    def _model(self) -> Model:
        return model_of(self.policy)

    def load_reference(self, path: Path | None, temperature: float = 1.0) -> FrozenModel:
        """Load the reference model: by default the model that the run began with, in its initial state.

        A new adapter starts as zero, so the reference is then the policy without it. With an adapter that continues an
        earlier one, the base model and that adapter are loaded once more. Where whole distributions are compared, the
        reference is called in the middle of each update, and stays on the update's device.
        """
        run = self.run
        if path is None and run.lora.rank:
            tokens = run.train.max_tokens_per_micro_batch
            return FrozenModel(self.policy, tokens, temperature=temperature, disable_adapters=True, pixels=self.pixels)
        full_kl = isinstance(run, Run) and "full_kl" in run.forward_outputs()
        return self.load_frozen("reference", path, temperature, keep_resident=full_kl)

    def load_critic(self, critic: CriticConfig) -> HeldModel:
        """Load the critic, in its initial state."""
        where = self._model_directory("critic.path", critic.path)
        precision = PRECISIONS[critic.train.precision]
        device = self.run.role_device("critic", self._model.device)
        model = load_trained(where, precision, self.mesh, device=device, head="value")
        self._refuse_other_tokens("critic", where, model_of(model), "critic.path")
        self._refuse_short_context("critic", where, model_of(model), "critic.path")
        return model

    def load_teacher(self, teacher: TeacherConfig, temperature: float = 1.0) -> ScoringModel:
        """Load the teacher, or the teacher of each data source."""
        if not teacher.paths:
            return self.load_frozen("teacher", teacher.path, temperature)
        return RoutedModels.load(
            teacher.paths,
            lambda source, path: self.load_frozen("teacher", path, temperature, option=f"teacher.paths.{source}"),
        )

    def load_frozen(
        self,
        role: str,
        path: Path | None,
        temperature: float = 1.0,
        *,
        option: str = "",
        keep_resident: bool = False,
    ) -> FrozenModel:
        """Load a model that is never trained: the policy's initial model, unless another is named.

        option: the option that names it, if not the role's `path`. Under `train.offload` it is kept in CPU memory
        between calls, unless it must stay resident or is placed on another device than the policy.
        """
        run = self.run
        policy = self._model
        option = option or f"{role}.path"
        where = self._model_directory(option, path)
        device = run.role_device(role, policy.device)
        offloaded = run.train.offload and not keep_resident and device == policy.device
        home, dtype = torch.device("cpu") if offloaded else device, PRECISIONS[run.train.precision]

        def prepare(model: Model) -> Model:
            self._refuse_other_tokens(role, where, model, option)
            self._refuse_short_context(role, where, model, option)
            if path is None and run.lora.path is not None:
                model = adapt(model, run.lora, seed=run.seed)
            for weight in model.parameters():
                weight.requires_grad_(False)
            return model

        if self.mesh is None:
            frozen: HeldModel = prepare(load(where, dtype=dtype, device=home, head=run.policy_head))
        else:
            frozen = load_sharded(where, self.mesh, dtype=dtype, device=home, head=run.policy_head, prepare=prepare)
        compute_device = policy.device if offloaded else None
        tokens = run.train.max_tokens_per_micro_batch
        pixels = self._pixels_of(role, where, model_of(frozen))
        return FrozenModel(frozen, tokens, temperature=temperature, compute_device=compute_device, pixels=pixels)

    def _pixels_of(self, role: str, where: Path, model: Model) -> PixelCache | None:
        """Return the pixels of images for another model, which reads the images of the policy's rows."""
        if self.pixels is None:
            return None
        if not model.has_vision and self._model.reads_text_too:
            return None  # such a policy is used for text too, and a row with images is refused
        if not model.has_vision:
            raise ConfigError(
                f"The {role} in {where} takes no images, and the policy does. Give one of the same family."
            )
        own = PixelCache.load(where, self.run.max_pixels)
        if own.reader == self.pixels.reader:
            return self.pixels
        if own.reader.layout != self.pixels.reader.layout:
            raise ConfigError(
                f"The {role} in {where} has another number of tokens for an image than the policy: the settings of "
                "their image processors differ. Give one of the same family and settings."
            )
        return own

    def _model_directory(self, option: str, path: Path | None) -> Path:
        """Return the directory of an option's model: the policy's own, unless another is named."""
        where = path or self.run.model.path
        assert where is not None, "a run has a model"
        check_model(where, option)
        return where

    def _refuse_other_tokens(self, role: str, where: Path, model: Model, option: str) -> None:
        """Refuse a model whose tokenizer gives the policy's ids another meaning. option: names the model."""
        run = self.run
        policy = self._model
        assert run.model.path is not None, "a run has a model"
        ours = Tokenizer.load(run.model.tokenizer or run.model.path)
        theirs = Tokenizer.load(where) if (where / "tokenizer.json").is_file() else None
        # a larger model often has more embedding rows than tokens; for a teacher only the tokenizer must be equal
        padded = role == "teacher" and theirs is not None and theirs.vocab_size == ours.vocab_size
        if model.vocab_size != policy.vocab_size and not padded:
            raise ConfigError(
                f"The {role} in {where} knows {model.vocab_size} tokens, and the model in {run.model.path} knows "
                f"{policy.vocab_size}: it would read other words. Give a `{option}` of the same tokenizer."
            )
        if theirs is None or where == run.model.path:
            return
        differ = next(
            (
                id
                for id in range(max(ours.vocab_size, theirs.vocab_size))
                if ours.id_to_token(id) != theirs.id_to_token(id)
            ),
            None,
        )
        if differ is not None:
            raise ConfigError(
                f"The {role} in {where} has another tokenizer than the policy: id {differ} is "
                f"{theirs.id_to_token(differ)!r} there and {ours.id_to_token(differ)!r} here. Give a `{option}` of "
                "the same tokenizer."
            )

    def _refuse_short_context(self, role: str, where: Path, model: Model, option: str) -> None:
        """Refuse a model with a shorter context than the policy's rows; warn if no option can make them shorter.
        option: names the model."""
        room = lengths.max_total_tokens(self._model, self.run.embedded_engine)
        row_tokens, remedy = self.run.longest_row(room)
        if model.context_length < row_tokens and not remedy:
            get_logger("recipes").warning(
                "The %s in %s has a context of %d tokens, and a conversation of the agent may have %d: its output "
                "beyond its context means nothing. Give a `%s` of a longer context, unless the agent stays within %d "
                "tokens.",
                role,
                where,
                model.context_length,
                row_tokens,
                option,
                model.context_length,
            )
        elif model.context_length < row_tokens:
            raise ConfigError(
                f"The {role} in {where} has a context of {model.context_length} tokens, and a row of this run may have "
                f"{row_tokens}: its output beyond its context means nothing. Set {remedy}, or give a `{option}` of "
                "a longer context."
            )


def load_pixels(run: Recipe, policy: HeldModel) -> PixelCache | None:
    """Return the pixels of images for a run's policy; None if it takes text alone."""
    if not model_of(policy).has_vision or run.model.path is None:
        return None
    return PixelCache.load(run.model.path, run.max_pixels)


def build_policy_worker(
    run: Run,
    policy: HeldModel,
    engine: TorchEngine | None,
    *,
    reference: FrozenModel | None = None,
    teacher: ScoringModel | None = None,
    critic: HeldModel | None = None,
    pixels: PixelCache | None = None,
) -> PolicyWorker:
    """Build the policy worker from loaded models. Policy and critic are trained, each by its own options.

    pixels: of the images of rows, for a policy that takes images.
    """
    warmup, updates = run.critic.warmup if critic is not None else 0, run.mini_batches * run.ppo_epochs
    learner = Learner(
        policy,
        run.train,
        temperature=run.sampling.temperature,
        steps=(run.steps - warmup) * updates,
        peak=measure_peak_flops(PRECISIONS[run.train.precision], model_of(policy).device),
        reference=reference if "full_kl" in run.forward_outputs() else None,
        pixels=pixels,
    )
    critic_learner = None
    if critic is not None:
        critic_learner = Learner(critic, run.critic.train, steps=run.steps * updates, option="critic.train")
    models_by_column: dict[str, ScoringModel | None] = {"ref_logp": reference, "teacher_logp": teacher}
    frozen = {column: model for column, model in models_by_column.items() if model is not None}
    auxiliary = AuxiliaryModels(frozen, critic_learner, LossObjective(run.critic.loss), warmup)
    max_total_tokens = lengths.max_total_tokens(model_of(policy), run.embedded_engine)
    return PolicyWorker(
        run,
        learner,
        seed=run.seed,
        ppo_epochs=run.ppo_epochs,
        auxiliary=auxiliary,
        engine=engine,
        max_total_tokens=max_total_tokens,
    )
