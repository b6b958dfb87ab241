"""Builds the workers that train a run's policy, and the engine that samples from it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.chat import ChatRenderer
from etude.dispatch import LocalCrew
from etude.protocols import Crew
from etude.recipes.run.builders import lengths
from etude.recipes.run.builders.auxiliary_models import (
    AuxiliaryLoader,
    build_mesh,
    build_policy_worker,
    load_pixels,
)
from etude.recipes.run.builders.policy import PolicyLoader, build_chat_renderer
from etude.recipes.run.config import Run
from etude.recipes.run.directory import RANK_LOGS
from etude.recipes.run.steps.components import Engine
from etude.recipes.servers.rank_engines import RankEngines, start_ranks
from etude.recipes.servers.server_weights import WeightPublisher, serve_run
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.rollout import ServerConfig, TorchEngine
from etude.rollout.image_reader import ImageReader
from etude.train.backend import HeldModel, model_of
from etude.train.device_mesh import ShardMeshes


def build_crew(
    run: Run, chat: ChatRenderer, directory: Path, stack: ExitStack
) -> tuple[Crew, Engine, WeightPublisher | None]:
    """Return the workers that train, the engine that samples, and the weight publisher if servers sample.

    The workers are in this process, or in one process or Ray actor per rank.
    """
    crew: Crew
    engine: Engine | None
    if run.in_process:
        worker, embedded = RankBuilder(run, chat).build()
        if embedded is not None:
            stack.enter_context(closing(embedded))
        stack.callback(worker.close)
        crew = stack.enter_context(closing(LocalCrew(worker)))
        engine = embedded
    else:
        rank_crew = stack.enter_context(closing(start_ranks(build_rank_worker, run, directory / RANK_LOGS)))
        crew = rank_crew
        engine = RankEngines(rank_crew)
    if isinstance(run.rollout, ServerConfig):
        server_pool, publisher = stack.enter_context(serve_run(run, run.rollout, chat.tokenizer, crew, directory))
        return crew, server_pool, publisher
    assert engine is not None, "without servers the workers sample"
    return crew, engine, None


def build_rank_worker(run: Run) -> PolicyWorker:
    """Build the worker of one rank, in the rank's own process."""
    return RankBuilder(run, build_chat_renderer(run)).build()[0]


def build_trainer(run: Run) -> PolicyWorker:
    """Build the worker that trains a run's policy in this process. It has no engine, and so it publishes nothing."""
    chat = build_chat_renderer(run)
    policy = PolicyLoader(run, chat.tokenizer).load_trained(None)
    return RankBuilder(run, chat).build_worker(policy, None, None)


@dataclass(frozen=True)
class RankBuilder:
    """Builds what one rank of a run holds."""

    run: Run
    chat: ChatRenderer

    def build(self) -> tuple[PolicyWorker, TorchEngine | None]:
        """Build a model, its engine unless servers sample, and the worker that trains it."""
        run = self.run
        mesh = build_mesh(run)
        policy = PolicyLoader(run, self.chat.tokenizer).load_trained(mesh)
        lengths.check_context_length(run, model_of(policy))
        if run.embedded_engine is None:
            return self.build_worker(policy, None, mesh), None
        engine = self._build_engine(policy, mesh)
        try:
            return self.build_worker(policy, engine, mesh), engine
        except BaseException:
            engine.close()
            raise

    def build_worker(self, policy: HeldModel, engine: TorchEngine | None, mesh: ShardMeshes | None) -> PolicyWorker:
        """Build the policy worker with its auxiliary models."""
        run = self.run
        shared = None if engine is None else engine.pixels  # read for sampling already
        pixels = load_pixels(run, policy) if shared is None else shared
        auxiliary = AuxiliaryLoader(run, policy, mesh, pixels)
        temperature = run.sampling.temperature
        reference = teacher = critic = None
        if run.uses_reference:
            reference = auxiliary.load_reference(run.reference.path, temperature)
        if run.uses_teacher:
            teacher = auxiliary.load_teacher(run.teacher, temperature)
        if run.uses_critic:
            critic = auxiliary.load_critic(run.critic)
        return build_policy_worker(
            run, policy, engine, reference=reference, teacher=teacher, critic=critic, pixels=pixels
        )

    def _build_engine(self, policy: HeldModel, mesh: ShardMeshes | None) -> TorchEngine:
        run = self.run
        config = run.embedded_engine
        assert config is not None, "without servers the workers sample"
        model = model_of(policy)
        if mesh is not None:  # the engine has its own whole weights
            model = PolicyLoader(run, self.chat.tokenizer).load(run.engine_device())
        elif run.placement.layout == "split":
            model = model.copy(device=run.engine_device())
        if run.max_staleness and model.device.type == "cpu":  # both compute at the same time
            shares = run.share_threads(torch.get_num_threads())
            config = config.model_copy(update={"threads": shares.engine})
            torch.set_num_threads(shares.trainer)
        merge = run.lora.publish == "merged"
        images = ImageReader.of(model, run.model.path, run.max_pixels)
        return TorchEngine(
            model, self.chat.tokenizer, config, merge=merge, records_routes=run.records_routes, images=images
        )
