"""The servers of a run: started from its weights, and brought to its new ones through files, or by a carrier.

As files the weights lie in the run's directory as any server loads them, written whole before a server hears of them.
The two newest stay there, because a server that is started again begins with the newest that it was told of; all are
gone when the run is over.

Where a carrier brings them, the ranks do (`carrying`): here it is said which servers are to get them, and heard how
each fared. No weight passes through this process, unless it is the one rank. A server that is started again is brought
to the newest weights in the same way; where they have moved on since they were published, by the next publish.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from etude.chat import Tokenizer
from etude.config.env import cache_directory
from etude.dispatch.machine import machine
from etude.errors import ConfigError, CrewError, EngineError
from etude.observe import Metrics, Sum, get_log, make_console
from etude.protocols import Crew
from etude.recipes.carrying import Brought, Carriage
from etude.recipes.checks import threads_of
from etude.recipes.device import device_of
from etude.recipes.folder import SERVERS
from etude.recipes.placement import gpus_of_servers
from etude.recipes.recipe import Recipe
from etude.recipes.run import Run
from etude.recipes.workers import PolicyWorker
from etude.rollout import Served, ServerConfig
from etude.rollout.engines import Device, Dtype, serve
from etude.rollout.server import Server
from etude.sync import SyncConfig
from etude.sync.plugin import laid_out

__all__ = ["DTYPES", "WEIGHTS", "Publisher", "device_name", "serving"]

WEIGHTS = "published"
"""The folder for the weights that servers are given, in a run's directory."""
KEPT = 2
"""How many of them stay."""
LOOPBACK = re.compile(r"https?://(127\.[0-9.]+|localhost|\[::1\])(:|/|$)")
"""Where a machine speaks with itself."""
DTYPES: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Publisher:
    """Brings the weights of a run's workers to its servers."""

    def __init__(
        self,
        crew: Crew,
        served: Served,
        directory: Path,
        tokenizer: Path,
        *,
        sleeps: bool,
        carriage: Carriage,
        base: Path | None = None,
    ) -> None:
        """sleeps: whether the servers do, while the policy is trained. base: the weights that they keep, where they are
        brought adapters alone."""
        self._crew, self._served, self._directory, self._tokenizer = crew, served, directory, tokenizer
        self._sleeps, self._how, self._base = sleeps, carriage, base
        self._one = threading.Lock()

    def __call__(self, version: int) -> Metrics:
        """Have every server compute with the workers' weights, under a new version; what that cost."""
        begun = time.perf_counter()
        if self._sleeps:
            asyncio.run(self._served.wake())
        metrics = self._carry(version) if self._how.ranks else self._write(version)
        metrics.add("publish_ms", Sum.of(1e3 * (time.perf_counter() - begun)))
        return metrics

    def make_room(self) -> None:
        """Have the servers give their memory up, until new weights are published."""
        asyncio.run(self._served.sleep())

    async def renew(self, server: Server) -> None:
        """Bring a server that was started again, or was away, to the weights that the others have."""
        try:
            await asyncio.to_thread(self._renew, server)
        except CrewError as error:
            get_log("recipes").warning("%s could not be brought to the newest weights: %s", server.url, error)

    def _write(self, version: int) -> Metrics:
        """By files."""
        where = self._directory / f"{version:08d}"
        shutil.rmtree(where, ignore_errors=True)
        if self._base is not None:
            written = self._crew.call(PolicyWorker.write_adapter, where, self._base)
        else:
            written = self._crew.call(PolicyWorker.write, where, self._tokenizer, self._how.untied)
        asyncio.run(self._served.load(where, version))
        for old in sorted(self._directory.iterdir())[:-KEPT]:
            if old not in (where, self._base):
                shutil.rmtree(old, ignore_errors=True)
        return Metrics({"publish_bytes": Sum.of(written)})

    def _carry(self, version: int) -> Metrics:
        """By a carrier. Those that took the weights are asked again; if none did, that is an error."""
        with self._one:
            drained = self._how.sync.timeout if self._how.sync.running == "finish" else None
            told, figures = self._brought(self._served.withhold(drained=drained), version)
        failed = [each for each in told if not each.took]
        if failed and len(failed) == len(told):
            raise EngineError(
                "No engine was brought to the new weights. " + " ".join(f"{each.url}: {each.why}" for each in failed)
            )
        out = [each for each in self._served.servers if each.withdrawn or each.version != version]
        hold = max((each["publish_hold_ms"] for each in figures), default=0.0)
        return Metrics(
            {
                "publish_bytes": Sum.of(sum(each["publish_bytes"] for each in figures)),
                "publish_hold_ms": Sum.of(hold),
                "publish_withdrawn": Sum.of(len(out)),
            }
        )

    def _renew(self, server: Server) -> None:
        with self._one:
            version = self._served.version
            if server.version == version:
                return
            told, _ = self._brought(self._served.withhold(server), version, anew=True)
        failed = [each.why for each in told if each.begun and not each.took]
        if failed or not told:
            why = failed[0] if failed else "It is not there any more."
            raise EngineError(f"{server.url} was not brought to the newest weights: {why}")

    def _brought(
        self, servers: Sequence[Server], version: int, *, anew: bool = False
    ) -> tuple[list[Brought], list[Mapping[str, float]]]:
        """Have the ranks go to these servers, and admit those that took the weights; what came of each, and what each
        rank measured that went to any."""
        try:
            everyone = enumerate(self._served.servers)
            addresses = {place: server.address for place, server in everyone if server in servers}
            shares = self._crew.call(PolicyWorker.carry, addresses, version, self._how, anew=anew)
        except BaseException:
            self._served.forsake(servers)
            raise
        told = {each.url: each for share in shares for each in share.servers}
        holds: dict[Server, int | None] = {}
        for server, address in zip(servers, addresses.values(), strict=True):  # which may have moved meanwhile
            came = told[address.url]
            holds[server] = version if came.took else server.version if not came.begun else None
        self._served.admit(holds, version)
        return list(told.values()), [share.figures for share in shares if share.figures]


@contextmanager
def serving(
    run: Run, config: ServerConfig, tokenizer: Tokenizer, crew: Crew, directory: Path
) -> Iterator[tuple[Served, Publisher]]:
    """The servers of a run, which begin with its workers' weights, and who brings them new ones."""
    device, sleeps = device_name(run), run.train.offload
    weights = directory / WEIGHTS
    carriage = carriage_of(config, crew, untied=config.untied(device), alone=run.cluster == "local")
    plugged = laid_out(cache_directory() / "plugins") if carriage.ranks else None
    place = run.model.tokenizer or run.model.path
    assert place is not None, "a run has a model"
    if device == "cuda":
        config = config.model_copy(update={"devices": gpus_of_servers(run, config)})
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir(parents=True)
    try:
        first = weights / "0"  # before all others in their order
        alone = config.adapters == "only"
        crew.call(PolicyWorker.write, first, place, carriage.untied, bare=alone)
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
            adapter_rank=crew.call(PolicyWorker.adapter_rank) if alone else 0,
            console=shown,
        ) as served:
            base = first if alone else None
            publisher = Publisher(crew, served, weights, place, sleeps=sleeps, carriage=carriage, base=base)
            if carriage.ranks:
                served.renewed_by(publisher.renew)
            yield served, publisher
    finally:
        shutil.rmtree(weights, ignore_errors=True)


def carriage_of(config: ServerConfig, crew: Crew, *, untied: bool, alone: bool) -> Carriage:
    """Which ranks bring weights to the servers, and how: none where files are written. What one machine shares, and
    servers that are found on it alone, are reached by the ranks of this machine only.

    untied: whether files have a head of their own, where that is the embedding. Whoever takes weights by a carrier
    brings a tied one up to date itself. alone: whether all ranks are on this machine, as without a cluster; in one, a
    rank whose machine cannot be told counts as elsewhere.
    """
    if config.carrier == "files":
        return Carriage(SyncConfig(), (), untied)
    ranks = crew.call(PolicyWorker.machine)
    near = config.carrier in ("shm", "ipc") or not config.url or any(LOOPBACK.match(url) for url in config.url)
    here = machine()
    able = [rank for rank, where in enumerate(ranks) if alone or not near or (here and where == here)]
    if not able:
        raise ConfigError(
            f"`rollout.carrier={config.carrier}` wants a rank on the machine of the servers, which is this one, and "
            f"all {len(ranks)} ranks are on others, for all that can be told. Have one of them here; or name servers "
            f"by addresses that the ranks reach (`rollout.url`), with `rollout.carrier=gloo` or `nccl`; or leave "
            f"`rollout.carrier=files`, with the run in a directory that all machines see."
        )
    sync = SyncConfig(
        carrier=config.carrier,
        bucket_mib=config.bucket_mib,
        running=config.running,
        timeout=config.update_timeout,
        address=config.address,
    )
    return Carriage(sync, able, untied=False)


def device_name(run: Recipe) -> Device:
    """What servers compute on."""
    return "cuda" if device_of(run).type == "cuda" else "cpu"
