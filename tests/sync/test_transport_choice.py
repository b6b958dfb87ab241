"""Every option of publishing to servers, servers that hang, and the plug-in as a server's Python finds it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from etude.errors import ConfigError, EngineError
from etude.protocols import TransportName
from etude.rollout.server_client import ServerClient
from etude.rollout.vllm import VllmBackend
from etude.rollout.vllm_weights import PLUGIN, install_plugin
from etude.sync import SyncConfig, WeightTransport, build_transport, build_weight_sync
from etude.sync.broadcast import BroadcastTransport
from etude.sync.disk import DiskTransport
from etude.sync.shm import ShmTransport
from etude.sync.weights import WeightStream


@pytest.mark.parametrize(
    ("name", "kind"),
    [("shm", ShmTransport), ("disk", DiskTransport), ("gloo", BroadcastTransport), ("nccl", BroadcastTransport)],
)
def test_each_transport_is_chosen_by_its_name(name: str, kind: type[WeightTransport], tmp_path: Path) -> None:
    assert isinstance(build_transport(SyncConfig.model_validate({"weight_transport": name}), tmp_path), kind)


async def places_of(transport: WeightTransport, weights: list[tuple[str, torch.Tensor]]) -> list[Mapping[str, Any]]:
    return [bucket.where async for bucket in transport.buckets(weights, True)]


@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_transfers_between_gpus_start_at_the_gpu_with_the_weights(
    name: TransportName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread would take the first GPU instead. A device without memory stands in for the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(import_module("etude.sync.ipc"), "_handle", lambda bucket: [str(bucket.device)])
    made = build_transport(SyncConfig(weight_transport=name), tmp_path, torch.device("meta"))
    weights = [("model.a.weight", torch.ones(4, 4))]
    if isinstance(made, BroadcastTransport):
        ((_, tensor),) = made._next_tensors(WeightStream(weights))
        assert tensor.device.type == "meta"
    else:
        assert asyncio.run(places_of(made, weights)) == [{"handle": ["meta"]}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_sharing_gpu_memory_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch sees none here.*`weight_transport=shm`"):
        build_transport(SyncConfig(weight_transport="ipc"), tmp_path)


def test_a_publish_without_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no engine to publish to"):
        build_weight_sync([], SyncConfig(), tmp_path)


def test_the_installed_plug_in_is_found(tmp_path: Path) -> None:
    made = install_plugin(tmp_path)
    assert install_plugin(tmp_path) == made and list(tmp_path.iterdir()) == [made]
    code = "from importlib.metadata import entry_points; print(*entry_points(group='vllm.general_plugins'))"
    listed = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(made)}, capture_output=True, text=True, check=True
    )
    assert f"{PLUGIN}:register" in listed.stdout


def test_several_threads_may_install_the_plug_in_at_once(tmp_path: Path) -> None:
    begin = Barrier(8)

    def lay_out() -> list[str]:
        begin.wait()
        return sorted(path.name for path in (install_plugin(tmp_path) / PLUGIN).iterdir())

    with ThreadPoolExecutor(8) as pool:
        listings = [listing.result() for listing in [pool.submit(lay_out) for _ in range(8)]]
    assert "engine.py" in listings[0] and all(listing == listings[0] for listing in listings)
    assert list(tmp_path.iterdir()) == [install_plugin(tmp_path)]


def test_several_hanging_servers_delay_a_publish_no_longer_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their connections are accepted, and get no reply."""
    # The package has a function of that name.
    monkeypatch.setattr(import_module("etude.sync.replicas"), "CLEANUP_TIMEOUT", 0.5)

    async def publish(urls: list[str]) -> float:
        config = SyncConfig(weight_transport="disk", directory=tmp_path / "published", timeout=0.5)
        published, began = (
            build_weight_sync([ServerClient(url, VllmBackend()) for url in urls], config, tmp_path),
            time.monotonic(),
        )
        with pytest.raises(EngineError, match="No engine got the new weights"):
            await published.publish([("model.a.weight", torch.ones(4, 4))], 1)
        return time.monotonic() - began

    with ExitStack() as stack:
        hung = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16)) for _ in range(12)]
        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in hung]
        assert asyncio.run(publish(urls)) < 10.0, "one after the other they take 12.5 s"
