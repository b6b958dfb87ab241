"""Starts the rank processes of a run, and calls their engines as one engine.

Each rank holds the whole model and an engine that samples from it. The controller holds neither. It has the tasks,
their order, the rewards and the journal, and calls the ranks for anything that needs the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from etude.data.partition import partition_rollouts
from etude.dispatch import crew_of
from etude.dispatch.multi_rank_crew import MultiRankCrew
from etude.images import PromptImages
from etude.models import adapt
from etude.models.loading import create_on_meta
from etude.observe import Metrics
from etude.protocols import Ids
from etude.recipes.recipe import Recipe
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.records import Completion, SamplingParams
from etude.rollout.router import Router
from etude.train.context_parallel import refuse_undivided_heads
from etude.train.expert_parallel import refuse_undivided, refuse_without_experts
from etude.train.tensor_parallel import refuse_unsplittable

R = TypeVar("R", bound=Recipe)


def start_ranks(rank: Callable[[R], object], run: R, logs: Path) -> MultiRankCrew[Any]:
    """Start the ranks of a run, and wait until each has built its worker.

    Layers and heads that the mesh cannot split, and experts that it cannot divide, are refused before: the model's
    config tells.
    """
    if run.mesh.ranks_per_rollout * run.mesh.expert > 1 and run.model.path is not None:
        model = create_on_meta(run.model.path, dtype=torch.float32, head=run.policy_head)
        model = adapt(model, run.lora, seed=run.seed) if run.lora.is_enabled else model
        if run.mesh.expert > 1:
            refuse_without_experts(model, run.mesh.expert)
            refuse_undivided(model, run.mesh.expert)
        if run.mesh.tensor > 1:
            refuse_unsplittable(model, run.mesh.tensor)
        if run.mesh.context > 1:
            refuse_undivided_heads(model.module.config, run.mesh.context, run.mesh.tensor)
    return crew_of(run.cluster)(
        rank,
        run,
        ranks=run.ranks,
        share=partition_rollouts,
        logs=logs,
        config=run.crew,
        threads=run.rank_threads(),
        device="cuda" if run.compute_device().type == "cuda" else "cpu",
        level=run.observe.level,
        repeats=run.mesh.ranks_per_rollout,
    )


class RankEngines(Router):
    """The engines of all ranks, as one engine."""

    def __init__(self, crew: MultiRankCrew[Any]) -> None:
        super().__init__([_Replica(crew, rank) for rank in range(crew.ranks)])
        self._crew = crew

    def stats(self) -> Metrics:
        """Return the merged statistics of all engines since the last call."""
        return self._crew.call(PolicyWorker.engine_stats)


class _Replica:
    """The engine of one rank."""

    def __init__(self, crew: MultiRankCrew[Any], rank: int) -> None:
        self._crew = crew
        self._rank = rank

    async def generate(
        self,
        prompt: Ids,
        sampling: SamplingParams,
        *,
        images: PromptImages | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Completion:
        """Sample one continuation on that rank. Cancelling the wait aborts the request."""
        future = self._crew.submit(self._rank, PolicyWorker.generate, prompt, sampling, images, on_start=on_start)
        answer: Completion = await asyncio.wrap_future(future)
        return answer
