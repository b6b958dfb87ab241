"""The servers of a run: started with its weights, and updated through files or by a direct weight transport.

As files, the weights are in the run's directory as any server loads them. They are written completely before a server
gets their path. The two newest versions stay, because a restarted server begins with the newest version that it knew.
Of adapters all those stay that a server holds. All are removed when the run is over.

With a direct weight transport the ranks send the weights (`weight_sender`). This module chooses the servers, and gets
the result of each. No weight passes through this process, unless it is the only rank. A restarted server gets the
newest weights in the same way. If the weights have changed since they were published, the next publish updates it.
The weights of a vision tower that is not trained are sent to a server once, and again after a restart or a failure.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from etude.chat import Tokenizer
from etude.checkpoint import ProcessorFiles
from etude.config.env import cache_directory
from etude.dispatch.machine import machine_id
from etude.errors import ConfigError, CrewError, EngineError
from etude.observe import Max, Metrics, Sum, get_logger, make_console
from etude.protocols import Crew
from etude.recipes.run.config import Run
from etude.recipes.run.directory import SERVER_LOGS
from etude.recipes.run.machine.placement import gpus_of_servers
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.recipes.workers.weight_sender import SendPlan, ServerUpdate
from etude.rollout import ServerConfig, ServerPool, VllmConfig
from etude.rollout.gpu_share import share_beside_rank
from etude.rollout.held_adapters import AdapterSpec, adapter_count
from etude.rollout.launch import Device, Dtype, start_servers
from etude.rollout.reported_sets import Recording
from etude.rollout.served_images import ImageOptions
from etude.rollout.server_engine import ServerEngine
from etude.rollout.vllm_weights import install_plugin
from etude.sync import SyncConfig

WEIGHTS = "published"
"""The subdirectory of a run's directory for the weights that servers load."""
KEPT = 2
"""Number of versions that stay there."""
LOOPBACK = re.compile(r"https?://(127\.[0-9.]+|localhost|\[::1\])(:|/|$)")
"""Addresses of this machine itself."""
DTYPES: dict[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class WeightPublisher:
    """Publishes the weights of a run's workers to its servers."""

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
        kept: int = KEPT,
        processor: ProcessorFiles | None = None,
    ) -> None:
        """sleeps: the servers sleep while the policy is trained. base: the weights that the servers keep, if they get
        only adapters. kept: the number of versions whose files stay. processor: the image processor beside them."""
        self._crew = crew
        self._served = served
        self._directory = directory
        self._tokenizer = tokenizer
        self._sleeps = sleeps
        self._plan = plan
        self._base = base
        self._kept = kept
        self._processor = processor
        self._one = threading.Lock()

    def __call__(self, version: int) -> Metrics:
        """Make every server compute with the workers' weights, under a new version; return the cost."""
        begun = time.perf_counter()
        if self._sleeps:
            asyncio.run(self._served.wake())
        metrics = self._send_direct(version) if self._plan.ranks else self._publish_files(version)
        if self._sleeps:
            asyncio.run(self._served.wake_cache())
        metrics.add("publish_ms", Sum.of(1e3 * (time.perf_counter() - begun)))
        metrics.add("publish_debt", Max.of(version - self._served.oldest_version))
        return metrics

    def free_engine_memory(self) -> None:
        """Make the servers free their memory, until new weights are published."""
        asyncio.run(self._served.sleep())

    async def update_server(self, server: ServerEngine) -> None:
        """Send the current weights to a server that restarted or was unreachable."""
        try:
            await asyncio.to_thread(self._update_server, server)
        except CrewError as error:
            get_logger("recipes").warning("%s could not get the newest weights: %s", server.url, error)

    def _publish_files(self, version: int) -> Metrics:
        """Publish as files."""
        where = self._directory / f"{version:08d}"
        shutil.rmtree(where, ignore_errors=True)
        if self._base is not None:
            written = self._crew.call(PolicyWorker.write_adapter, where, self._base, names_of=self._plan.names_of)
        else:
            written = self._crew.call(
                PolicyWorker.write_model,
                where,
                self._tokenizer,
                self._plan.untied,
                names_of=self._plan.names_of,
                processor=self._processor,
            )
        asyncio.run(self._served.load(where, version, running=self._plan.sync.running, timeout=self._plan.sync.timeout))
        for old in sorted(self._directory.iterdir())[: -self._kept]:
            if old not in (where, self._base):
                shutil.rmtree(old, ignore_errors=True)
        return Metrics({"publish_bytes": Sum.of(written)})

    def _send_direct(self, version: int) -> Metrics:
        """Publish by a direct weight transport. Servers that took the weights return to rotation; if none did, that is
        an error."""
        with self._one:
            sync = self._plan.sync
            withdrawn = self._served.withdraw_servers(running=sync.running, timeout=sync.timeout)
            updates, metrics = self._send(withdrawn, version)
        failed = [update for update in updates if not update.updated]
        if failed and len(failed) == len(updates):
            raise EngineError(
                "No engine took the new weights. " + " ".join(f"{update.url}: {update.error}" for update in failed)
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
            why = failed[0] if failed else "It has left the run."
            raise EngineError(f"{server.url} did not get the newest weights: {why}")

    def _send(
        self, servers: Sequence[ServerEngine], version: int, *, restarted: bool = False
    ) -> tuple[list[ServerUpdate], list[Mapping[str, float]]]:
        """Have the ranks send weights to these servers, and readmit those that took them. Return the result of each
        server, and the metrics of each rank that sent to any."""
        try:
            everyone = enumerate(self._served.servers)
            addresses = {number: server.address for number, server in everyone if server in servers}
            shares = self._crew.call(PolicyWorker.send_weights, addresses, version, self._plan, restarted=restarted)
        except BaseException:
            self._served.abort_servers(servers)
            raise
        updates = {update.url: update for share in shares for update in share.servers}
        versions: dict[ServerEngine, int | None] = {}
        for server, address in zip(
            servers, addresses.values(), strict=True
        ):  # their addresses may have changed meanwhile
            outcome = updates[address.url]
            versions[server] = version if outcome.updated else server.version if not outcome.started else None
        self._served.readmit_servers(versions, version)
        return list(updates.values()), [share.metrics for share in shares if share.metrics]


@contextmanager
def serve_run(
    run: Run, config: ServerConfig, tokenizer: Tokenizer, crew: Crew, directory: Path
) -> Iterator[tuple[ServerPool, WeightPublisher]]:
    """Start the servers of a run with its workers' weights, and yield them with the publisher of new weights."""
    device, sleeps = server_device_kind(run.compute_device()), run.train.offload
    if crew.call(PolicyWorker.has_experts):
        config.check_experts(device)
    weights = directory / WEIGHTS
    plan = build_send_plan(config, crew, untied=config.needs_untied_head(device), alone=run.cluster == "local")
    plan = replace(plan, keeps_tower=not (sleeps or config.url))
    if config.url:  # such servers may serve the whole model that the trained one is a part of
        plan = replace(plan, names_of=run.model.path)
    plugin_directory = install_plugin(cache_directory() / "plugins") if plan.ranks else None
    tokenizer_path = run.model.tokenizer or run.model.path
    assert tokenizer_path is not None, "a run has a model"
    if device == "cuda":
        config = config.model_copy(update={"devices": gpus_of_servers(config, run.own_gpus)})
        if sleeps and isinstance(config, VllmConfig):
            config = share_gpus(config, crew, run.ranks)
    shutil.rmtree(weights, ignore_errors=True)
    weights.mkdir(parents=True)
    try:
        first = weights / "0"  # sorts before all later versions
        adapters_only = config.adapters == "only"
        adapters = None
        if adapters_only:
            rank, modules = crew.call(PolicyWorker.adapter_rank), crew.call(PolicyWorker.adapter_modules)
            adapters = AdapterSpec(adapter_count(run.max_staleness), rank, modules)
        routes = crew.call(PolicyWorker.served_routes) if run.records_routes else None
        names_of = plan.names_of
        crew.call(
            PolicyWorker.write_model,
            first,
            tokenizer_path,
            plan.untied,
            bare=adapters_only,
            names_of=names_of,
            processor=run.processor_files,
        )
        dtype = DTYPES[run.train.precision]
        threads = run.rank_threads()
        logs = directory / SERVER_LOGS
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
            adapters=adapters,
            recording=Recording.of(run.training_params(), routes),
            images=ImageOptions(run.max_pixels, run.vision.max_images, run.vision.tower, run.trains_tower),
            console=console,
        ) as served:
            base, kept = (None, KEPT) if adapters is None else (first, adapters.held)
            publisher = WeightPublisher(
                crew,
                served,
                weights,
                tokenizer_path,
                sleeps=sleeps,
                plan=plan,
                base=base,
                kept=kept,
                processor=run.processor_files,
            )
            if plan.ranks:
                served.set_weight_reloader(publisher.update_server)
            yield served, publisher
    finally:
        shutil.rmtree(weights, ignore_errors=True)


def build_send_plan(config: ServerConfig, crew: Crew, *, untied: bool, alone: bool) -> SendPlan:
    """Return the ranks that send weights to the servers, and the transport settings; no ranks where files are written.

    Shared memory, and servers at addresses of this machine, are reached only by the ranks of this machine. untied:
    write a tied head as a separate weight in files. A direct transport needs no such head, because servers update a
    tied one themselves. alone: all ranks are on this machine, as without a cluster. In a cluster, a rank whose machine
    is unknown counts as remote.
    """
    if config.weight_transport == "files":
        return SendPlan(SyncConfig(running=config.running, timeout=config.update_timeout), (), untied)
    ranks = crew.call(PolicyWorker.machine)
    near = config.weight_transport in ("shm", "ipc") or not config.url or any(LOOPBACK.match(url) for url in config.url)
    here = machine_id()
    able = [rank for rank, where in enumerate(ranks) if alone or not near or (here and where == here)]
    if not able:
        raise ConfigError(
            f"`rollout.weight_transport={config.weight_transport}` needs a rank on this machine, where the servers "
            f"are, and all {len(ranks)} ranks seem to be on others. Have one of them here. Or name servers by "
            "addresses that the ranks reach (`rollout.url`), with `rollout.weight_transport=gloo` or `nccl`. Or "
            "leave `rollout.weight_transport=files`, with the run in a directory that all machines see."
        )
    sync = SyncConfig(
        weight_transport=config.weight_transport,
        bucket_mib=config.bucket_mib,
        running=config.running,
        timeout=config.update_timeout,
        address=config.address,
    )
    return SendPlan(sync, able, untied=False)


def share_gpus(config: VllmConfig, crew: Crew, ranks: int) -> VllmConfig:
    """Return the options with a share of memory that the ranks on the same GPUs leave, unless one is given."""
    if config.url or config.gpu_memory_utilization is not None or not set(config.devices) & set(range(ranks)):
        return config
    memory = crew.call(PolicyWorker.free_gpu_memory)
    shares = [share_beside_rank(*memory[gpu]) for gpu in set(config.devices) if gpu < ranks]
    return config.model_copy(update={"gpu_memory_utilization": min(shares)})


def server_device_kind(device: torch.device) -> Device:
    """Return the kind of device that servers compute on."""
    return "cuda" if device.type == "cuda" else "cpu"
