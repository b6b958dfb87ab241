"""The servers of a run: started from its weights, and brought to its new ones through files, or by a carrier.

As files the weights lie in the run's directory as any server loads them, written whole before a server hears of them.
The two newest stay there, because a server that is started again begins with the newest that it was told of; all are
gone when the run is over. Where a carrier brings them instead, a server that is started again is brought to them anew.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from etude.chat import Tokenizer
from etude.config.env import cache_directory
from etude.observe import Metrics, Sum, make_console
from etude.protocols import Crew
from etude.recipes.checks import threads_of
from etude.recipes.device import device_of
from etude.recipes.folder import SERVERS
from etude.recipes.recipe import Recipe
from etude.recipes.workers import PolicyWorker
from etude.rollout import Served, ServerConfig
from etude.rollout.engines import Device, Dtype, serve
from etude.sync import Fleet, SyncConfig, fleet
from etude.sync.plugin import laid_out

__all__ = ["DTYPES", "WEIGHTS", "Publisher", "device_name", "serving"]

WEIGHTS = "published"
"""The folder for the weights that servers are given, in a run's directory."""
KEPT = 2
"""How many of them stay."""
DTYPES: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass
class Publisher:
    """Brings the weights of a run's workers to its servers."""

    crew: Crew
    served: Served
    directory: Path
    tokenizer: Path
    untied: bool
    sleeps: bool
    fleet: Fleet | None = None
    """Who carries the weights, where files do not."""

    def __call__(self, version: int) -> Metrics:
        """Have every server compute with the workers' weights, under a new version; what that cost."""
        if self.fleet is not None:
            return asyncio.run(self._carry(self.fleet, version))
        begun = time.perf_counter()
        where = self.directory / f"{version:08d}"
        shutil.rmtree(where, ignore_errors=True)
        written = self.crew.call(PolicyWorker.write, where, self.tokenizer, self.untied)
        asyncio.run(self._load(where, version))
        for old in sorted(self.directory.iterdir())[:-KEPT]:
            if old != where:
                shutil.rmtree(old, ignore_errors=True)
        milliseconds = 1e3 * (time.perf_counter() - begun)
        return Metrics({"publish_bytes": Sum.of(written), "publish_ms": Sum.of(milliseconds)})

    def make_room(self) -> None:
        """Have the servers give their memory up, until new weights are published."""
        asyncio.run(self.served.sleep())

    async def _carry(self, fleet: Fleet, version: int) -> Metrics:
        if self.sleeps:
            await self.served.wake()
        return await self.served.carried(fleet.publish(self.weights(), version), version)

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """The workers' weights, as servers compute with them."""
        return self.crew.call(PolicyWorker.served, self.untied)

    async def _load(self, where: Path, version: int) -> None:
        if self.sleeps:
            await self.served.wake()
        await self.served.load(where, version)


@contextmanager
def serving(
    run: Recipe, config: ServerConfig, tokenizer: Tokenizer, crew: Crew, directory: Path
) -> Iterator[tuple[Served, Publisher]]:
    """The servers of a run, which begin with its workers' weights, and who brings them new ones."""
    device, sleeps = device_name(run), run.train.offload
    untied, weights = config.untied(device), directory / WEIGHTS
    plugged = None if config.carrier == "files" else laid_out(cache_directory() / "plugins")
    place = run.model.tokenizer or run.model.path
    assert place is not None, "a run has a model"
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir(parents=True)
    try:
        first = weights / "0"  # before all others in their order
        crew.call(PolicyWorker.write, first, place, untied)
        dtype, threads, logs = DTYPES[run.train.precision], threads_of(run), directory / SERVERS
        shown = make_console(run.observe.console)
        with serve(
            config,
            first,
            tokenizer,
            dtype=dtype,
            device=device,
            logs=logs,
            threads=threads,
            sleeps=sleeps,
            plugged=plugged,
            console=shown,
        ) as served:
            publisher = Publisher(crew, served, weights, place, untied, sleeps)
            with ExitStack() as stack:
                if config.carrier != "files":
                    sync = SyncConfig(carrier=config.carrier, bucket_mib=config.bucket_mib)
                    publisher.fleet = known = fleet(served.servers, sync, weights)
                    stack.callback(known.close)
                    served.renewed_by(lambda server: known.bring(server, publisher.weights()))
                yield served, publisher
    finally:
        shutil.rmtree(weights, ignore_errors=True)


def device_name(run: Recipe) -> Device:
    """What servers compute on."""
    return "cuda" if device_of(run).type == "cuda" else "cpu"
