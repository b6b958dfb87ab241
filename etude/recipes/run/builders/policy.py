"""Loads the policy of a run: whole to compute with, or as it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from etude.chat import ChatRenderer, Tokenizer
from etude.errors import ConfigError
from etude.models import LoraAdapterConfig, Model, adapt, load
from etude.recipes.recipe import Recipe
from etude.recipes.run.builders.auxiliary_models import load_trained
from etude.recipes.run.directory import check_model
from etude.recipes.run.rules.required import NO_MODEL
from etude.train.backend import HeldModel
from etude.train.device_mesh import ShardMeshes
from etude.train.optim import PRECISIONS


def build_chat_renderer(run: Recipe) -> ChatRenderer:
    """Return the chat renderer of a run's model."""
    source = run.model
    if source.path is None:
        raise ConfigError(NO_MODEL)
    check_model(source.path)
    tokenizer = Tokenizer.load(source.tokenizer or source.path)
    return run.chat.build_renderer(tokenizer, source.path, run.max_pixels, tower=run.policy_head == "seeing")


def load_policy(run: Recipe) -> tuple[Model, ChatRenderer]:
    """Return the model of a run and its chat renderer, with adapters attached and frozen weights frozen."""
    chat = build_chat_renderer(run)
    return PolicyLoader(run, chat.tokenizer).load(run.compute_device()), chat


def choose_trained(
    model: Model, lora: LoraAdapterConfig, freeze: Sequence[str], *, tower: bool = False, seed: int
) -> Model:
    """Return the model with its adapters attached, and these parts frozen. tower: train that of a vision model."""
    if lora.is_enabled:
        model = adapt(model, lora, seed=seed)
        _check_adapted_tower(model, tower)
    elif not tower:
        model.freeze_tower()
    if freeze:
        model.freeze(freeze)
    return model


def _check_adapted_tower(model: Model, tower: bool) -> None:
    """Refuse adapters in a tower that is not trained, and a trained tower without adapters."""
    adapted = any(weight.requires_grad for weight in model.tower_weights.values())
    if adapted and not tower:
        raise ConfigError(
            "`lora.targets` names layers of the vision tower, and the tower is not trained. Set `vision.train=true`, "
            "or name layers of the text part."
        )
    if tower and not adapted:
        raise ConfigError(
            "`vision.train=true` trains the vision tower, and with `lora` only layers with adapters are trained; the "
            "tower has none. Name some of its layers in `lora.targets`, or leave `vision.train` out."
        )


@dataclass(frozen=True)
class PolicyLoader:
    """Loads the model of a run, with adapters attached and frozen weights frozen."""

    run: Recipe
    tokenizer: Tokenizer
    """The tokenizer that must fit the model."""

    def load(self, device: torch.device) -> Model:
        """Load the model to compute with, whole."""
        run = self.run
        assert run.model.path is not None, "a run has a model"
        return self._prepare(
            load(run.model.path, dtype=PRECISIONS[run.train.precision], device=device, head=run.policy_head)
        )

    def load_trained(self, mesh: ShardMeshes | None) -> HeldModel:
        """Load the model to train it, in the full precision of its files: whole, or this rank's shards."""
        run = self.run
        assert run.model.path is not None, "a run has a model"
        return load_trained(
            run.model.path,
            PRECISIONS[run.train.precision],
            mesh,
            device=run.compute_device(),
            head=run.policy_head,
            keep_float32=not run.lora.is_enabled,
            prepare=self._prepare,
        )

    def _prepare(self, model: Model) -> Model:
        """Attach adapters to a model and freeze parts, by the run's options. Refuse a tokenizer of another model."""
        run = self.run
        if self.tokenizer.vocab_size > model.vocab_size:
            remedy = "Leave `model.tokenizer` out." if run.model.tokenizer else "Set `model.tokenizer`."
            raise ConfigError(
                f"The tokenizer in {self.tokenizer.directory} has {self.tokenizer.vocab_size} tokens, and the model in "
                f"{run.model.path} knows {model.vocab_size}: they belong to different models. {remedy}"
            )
        return choose_trained(model, run.lora, run.model.freeze, tower=run.trains_tower, seed=run.seed)
