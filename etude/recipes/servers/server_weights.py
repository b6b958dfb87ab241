"""The servers of a run: started from its weights, and brought to its new ones through files, or by a carrier.

As files the weights lie in the run's directory as any server loads them, written whole before a server hears of them.
The two newest stay there, because a server that is started again begins with the newest that it was told of; all are
gone when the run is over.

Where a carrier brings them, the ranks do (`weight_sender`): here it is said which servers are to get them, and heard
how each fared. No weight passes through this process, unless it is the one rank. A server that is started again is
brought to the newest weights in the same way; where they have moved on since they were published, by the next publish.
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
from etude.dispatch.machine import machine_id
from etude.errors import ConfigError, CrewError, EngineError
from etude.observe import Metrics, Sum, get_logger, make_console
from etude.protocols import Crew
from etude.recipes.recipe import Recipe
from etude.recipes.run.checks import threads_of
from etude.recipes.run.config import Run
from etude.recipes.run.device import select_device
from etude.recipes.run.directory import SERVER_LOGS
from etude.recipes.run.placement import gpus_of_servers
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.recipes.workers.weight_sender import SendPlan, ServerUpdate
from etude.rollout import ServerConfig, ServerPool
from etude.rollout.launch import Device, Dtype, start_servers
from etude.rollout.server_engine import ServerEngine
from etude.sync import SyncConfig
from etude.sync.vllm_plugin import install_plugin

__all__ = ["DTYPES", "WEIGHTS", "WeightPublisher", "serve_run", "server_device_kind"]

WEIGHTS = "published"
"""The folder for the weights that servers are given, in a run's directory."""
KEPT = 2
"""How many of them stay."""
LOOPBACK = re.compile(r"https?://(127\.[0-9.]+|localhost|\[::1\])(:|/|$)")
"""Where a machine speaks with itself."""
DTYPES: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class WeightPublisher:
    """Brings the weights of a run's workers to its servers."""

    def __init__(
        self,
        crew: Crew,
        served: ServerPool,
        directory: Path,
        tokenizer: Path,
        *,
        sleeps: bool,
        plan: SendPlan,
        base: Path | None = None,
    ) -> None:
        """sleeps: whether the servers do, while the policy is trained. base: the weights that they keep, where they are
        brought adapters alone."""
        self._crew, self._served, self._directory, self._tokenizer = crew, served, directory, tokenizer
        self._sleeps, self._plan, self._base = sleeps, plan, base
        self._one = threading.Lock()

    def __call__(self, version: int) -> Metrics:
        """Have every server compute with the workers' weights, under a new version; what that cost."""
        begun = time.perf_counter()
        if self._sleeps:
            asyncio.run(self._served.wake())
        metrics = self._send_direct(version) if self._plan.ranks else self._publish_files(version)
        metrics.add("publish_ms", Sum.of(1e3 * (time.perf_counter() - begun)))
        return metrics

    def free_engine_memory(self) -> None:
        """Have the servers give their memory up, until new weights are published."""
        asyncio.run(self._served.sleep())

    async def update_server(self, server: ServerEngine) -> None:
        """Bring a server that was started again, or was away, to the weights that the others have."""
        try:
            await asyncio.to_thread(self._update_server, server)
        except CrewError as error:
            get_logger("recipes").warning("%s could not be brought to the newest weights: %s", server.url, error)

    def _publish_files(self, version: int) -> Metrics:
        """By files."""
        where = self._directory / f"{version:08d}"
        shutil.rmtree(where, ignore_errors=True)
        if self._base is not None:
            written = self._crew.call(PolicyWorker.write_adapter, where, self._base)
        else:
            written = self._crew.call(PolicyWorker.write_model, where, self._tokenizer, self._plan.untied)
        asyncio.run(self._served.load(where, version))
        for old in sorted(self._directory.iterdir())[:-KEPT]:
            if old not in (where, self._base):
                shutil.rmtree(old, ignore_errors=True)
        return Metrics({"publish_bytes": Sum.of(written)})

    def _send_direct(self, version: int) -> Metrics:
        """By a carrier. Those that took the weights are asked again; if none did, that is an error."""
        with self._one:
            drained = self._plan.sync.timeout if self._plan.sync.running == "finish" else None
            updates, metrics = self._send(self._served.withdraw_servers(drain_timeout=drained), version)
        failed = [update for update in updates if not update.updated]
        if failed and len(failed) == len(updates):
            raise EngineError(
                "No engine was brought to the new weights. "
                + " ".join(f"{update.url}: {update.error}" for update in failed)
            )
        not_updated = [update for update in self._served.servers if update.withdrawn or update.version != version]
        pause = max((update["publish_pause_ms"] for update in metrics), default=0.0)
        return Metrics(
            {
                "publish_bytes": Sum.of(sum(update["publish_bytes"] for update in metrics)),
                "publish_pause_ms": Sum.of(pause),
                "publish_failed_replicas": Sum.of(len(not_updated)),
            }
        )

    def _update_server(self, server: ServerEngine) -> None:
        with self._one:
            version = self._served.version
            if server.version == version:
                return
            updates, _ = self._send(self._served.withdraw_servers(server), version, restarted=True)
        failed = [update.error for update in updates if update.started and not update.updated]
        if failed or not updates:
            why = failed[0] if failed else "It is not there any more."
            raise EngineError(f"{server.url} was not brought to the newest weights: {why}")

    def _send(
        self, servers: Sequence[ServerEngine], version: int, *, restarted: bool = False
    ) -> tuple[list[ServerUpdate], list[Mapping[str, float]]]:
        """Have the ranks go to these servers, and admit those that took the weights; what came of each, and what each
        rank measured that went to any."""
        try:
            everyone = enumerate(self._served.servers)
            addresses = {number: server.address for number, server in everyone if server in servers}
            shares = self._crew.call(PolicyWorker.send_weights, addresses, version, self._plan, restarted=restarted)
        except BaseException:
            self._served.abort_servers(servers)
            raise
        updates = {update.url: update for share in shares for update in share.servers}
        versions: dict[ServerEngine, int | None] = {}
        for server, address in zip(servers, addresses.values(), strict=True):  # which may have moved meanwhile
            outcome = updates[address.url]
            versions[server] = version if outcome.updated else server.version if not outcome.started else None
        self._served.readmit_servers(versions, version)
        return list(updates.values()), [share.metrics for share in shares if share.metrics]


@contextmanager
def serve_run(
    run: Run, config: ServerConfig, tokenizer: Tokenizer, crew: Crew, directory: Path
) -> Iterator[tuple[ServerPool, WeightPublisher]]:
    """The servers of a run, which begin with its workers' weights, and who brings them new ones."""
    device, sleeps = server_device_kind(run), run.train.offload
    weights = directory / WEIGHTS
    plan = build_send_plan(config, crew, untied=config.needs_untied_head(device), alone=run.cluster == "local")
    plugin_directory = install_plugin(cache_directory() / "plugins") if plan.ranks else None
    tokenizer_path = run.model.tokenizer or run.model.path
    assert tokenizer_path is not None, "a run has a model"
    if device == "cuda":
        config = config.model_copy(update={"devices": gpus_of_servers(run, config)})
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir(parents=True)
    try:
        first = weights / "0"  # before all others in their order
        adapters_only = config.adapters == "only"
        crew.call(PolicyWorker.write_model, first, tokenizer_path, plan.untied, bare=adapters_only)
        dtype, threads, logs = DTYPES[run.train.precision], threads_of(run), directory / SERVER_LOGS
        console = make_console(run.observe.console)
        with start_servers(
            config,
            first,
            tokenizer,
            dtype=dtype,
            device=device,
            logs=logs,
            threads=threads,
            enable_sleep=sleeps,
            plugin_path=plugin_directory,
            adapter_rank=crew.call(PolicyWorker.adapter_rank) if adapters_only else 0,
            console=console,
        ) as served:
            base = first if adapters_only else None
            publisher = WeightPublisher(crew, served, weights, tokenizer_path, sleeps=sleeps, plan=plan, base=base)
            if plan.ranks:
                served.set_weight_reloader(publisher.update_server)
            yield served, publisher
    finally:
        shutil.rmtree(weights, ignore_errors=True)


def build_send_plan(config: ServerConfig, crew: Crew, *, untied: bool, alone: bool) -> SendPlan:
    """Which ranks bring weights to the servers, and how: none where files are written. What one machine shares, and
    servers that are found on it alone, are reached by the ranks of this machine only.

    untied: whether files have a head of their own, where that is the embedding. Whoever takes weights by a carrier
    brings a tied one up to date itself. alone: whether all ranks are on this machine, as without a cluster; in one, a
    rank whose machine cannot be told counts as elsewhere.
    """
    if config.weight_transport == "files":
        return SendPlan(SyncConfig(), (), untied)
    ranks = crew.call(PolicyWorker.machine)
    near = config.weight_transport in ("shm", "ipc") or not config.url or any(LOOPBACK.match(url) for url in config.url)
    here = machine_id()
    able = [rank for rank, where in enumerate(ranks) if alone or not near or (here and where == here)]
    if not able:
        raise ConfigError(
            f"`rollout.weight_transport={config.weight_transport}` wants a rank on the machine of the servers, which "
            f"is this one, and all {len(ranks)} ranks are on others, for all that can be told. Have one of them here; "
            "or name servers by addresses that the ranks reach (`rollout.url`), with `rollout.weight_transport=gloo` "
            f"or `nccl`; or leave `rollout.weight_transport=files`, with the run in a directory that all machines see."
        )
    sync = SyncConfig(
        weight_transport=config.weight_transport,
        bucket_mib=config.bucket_mib,
        running=config.running,
        timeout=config.update_timeout,
        address=config.address,
    )
    return SendPlan(sync, able, untied=False)


def server_device_kind(run: Recipe) -> Device:
    """What servers compute on."""
    return "cuda" if select_device(run).type == "cuda" else "cpu"
