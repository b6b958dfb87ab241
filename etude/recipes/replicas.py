"""The processes of a run that several ranks share: started, and spoken to as one engine.

Each rank holds the whole model and an engine that samples from it. The controller holds neither: tasks, order, rewards
and journal are its own, and what needs the model it asks of the ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from etude.data.share import shares
from etude.dispatch import crew_of
from etude.dispatch.crew import Joint
from etude.observe import Metrics
from etude.protocols import Ids
from etude.recipes.checks import threads_of
from etude.recipes.device import device_of
from etude.recipes.recipe import Recipe
from etude.recipes.workers import PolicyWorker
from etude.records import Completion, SamplingParams
from etude.rollout.router import Router

__all__ = ["Replicas", "start"]

R = TypeVar("R", bound=Recipe)


def start(rank: Callable[[R], object], run: R, logs: Path) -> Joint[Any]:
    """Start the ranks of a run, and wait until each has made its worker."""
    return crew_of(run.cluster)(
        rank,
        run,
        ranks=run.ranks,
        share=shares,
        logs=logs,
        config=run.crew,
        threads=threads_of(run),
        device="cuda" if device_of(run).type == "cuda" else "cpu",
        level=run.observe.level,
        repeats=run.mesh.size,
    )


class Replicas(Router):
    """The engines of all ranks."""

    def __init__(self, crew: Joint[Any]) -> None:
        super().__init__([_Replica(crew, rank) for rank in range(crew.ranks)])
        self._crew = crew

    def stats(self) -> Metrics:
        """What they did since this was last asked, together."""
        return self._crew.call(PolicyWorker.sampled)


class _Replica:
    """The engine of one rank."""

    def __init__(self, crew: Joint[Any], rank: int) -> None:
        self._crew, self._rank = crew, rank

    async def generate(
        self, prompt: Ids, sampling: SamplingParams, *, begun: Callable[[], None] | None = None
    ) -> Completion:
        """Sample one continuation there. Cancelling the wait aborts the request."""
        asked = self._crew.ask(self._rank, PolicyWorker.generate, prompt, sampling, begun=begun)
        answer: Completion = await asyncio.wrap_future(asked)
        return answer
