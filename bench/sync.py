"""Time weight transports from a trainer to an engine, against one copy of the weights.

    python -m bench.sync [--size 75m] [--rounds 5] [--only shm disk] [--json FILE]

The weights are a random Qwen3-shaped model's in bf16. Every publish sends all of them with the code of a run: in
buckets, to an engine in its own process, which copies them over its weights. That engine does nothing else, so the time
is that of the transport. A server also packs weights for its kernels. Before each publish, untimed, every weight is
changed and the engine's weights are zeroed. After it, every weight is compared by a hash of its bytes.

    alias    to an engine of this process that shares the trainer's memory; nothing is copied or compared
    local    to an engine of this process with its own weights
    shm      through two buckets of shared memory
    disk     through files
    gloo     by a broadcast over the loopback interface

The yardstick is one copy of all weights, in memory; the share of its bandwidth is the inverse of the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import Case, machine, measure, table, write_json
from bench.sync_worker import digest
from bench.workers import Worker
from etude.models import create, tiny_config
from etude.observe import Metrics, make_console, progress
from etude.rollout.vllm import VllmBackend
from etude.sync import ReplicaWeightSync, WeightTransport, publish_to_engine
from etude.sync.broadcast import BroadcastTransport
from etude.sync.disk import DiskTransport
from etude.sync.shm import ShmTransport

KINDS = ("alias", "local", "shm", "disk", "gloo")
LIMITS = {"alias": 0.1, "local": 1.2, "shm": 2.0, "disk": 40.0, "gloo": 20.0}
"""Limits: the largest time of each transport, in copies of the weights."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"vocabulary": 64, "layers": 2, "hidden": 32},
    "75m": {
        "vocabulary": 32_768,
        **{"layers": 18, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536},
    },
    "0.6b": {
        "vocabulary": 151_936,
        **{"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "intermediate": 3072},
    },
}


class Receiver:
    """The other process, with the interface of a server (`WeightReceiver`)."""

    def __init__(self, log: Path, threads: int) -> None:
        self.url, self.ranks, self.version = "a separate process", 1, 0
        self.backend = VllmBackend()
        command = [sys.executable, "-m", "bench.sync_worker", str(threads)]
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        self._worker = Worker("the receiver", command, log, {"GLOO_SOCKET_IFNAME": loopback})
        self._worker.hear()

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Forward requests about weights."""
        if path in ("/update_weights", "/init_weight_transfer_engine") and body is not None:
            (request,) = body.values()
            return await asyncio.to_thread(self._asked, request)
        return {"success": True}

    def digests(self) -> dict[str, str]:
        """Return the hashes of its weights."""
        digests: dict[str, str] = self._asked({"digests": True})["digests"]
        return digests

    def forget(self) -> None:
        """Zero its weights."""
        self._asked({"forget": True})

    async def abort(self) -> None:
        """Do nothing: there are no requests."""

    async def pause_for_update(self) -> None:
        """Do nothing: there are no requests."""

    async def resume(self) -> None:
        """Do nothing: it was not paused."""

    async def drain(self) -> None:
        """Do nothing: there are no requests."""

    def withdraw(self) -> None:
        """Do nothing: there is no rotation."""

    async def set_version(self, version: int) -> None:
        """Store the version."""
        self.version = version

    def close(self) -> None:
        """End it."""
        self._worker.close()

    def _asked(self, request: dict[str, Any]) -> dict[str, Any]:
        self._worker.tell(json.dumps(request))
        return self._worker.hear()


class Held:
    """An engine of this process."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.model, self._weights = self, weights

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights of the engine."""
        return self._weights.items()

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy these weights over its own."""
        del version
        for name, weight in weights:
            self._weights[name].copy_(weight)

    def digests(self) -> dict[str, str]:
        """Return the hashes of its weights."""
        return {name: digest(weight) for name, weight in self._weights.items()}

    def forget(self) -> None:
        """Zero its weights."""
        for weight in self._weights.values():
            weight.zero_()


def weights_of(size: str) -> dict[str, Tensor]:
    """Return the weights of a random model in bf16."""
    shape = dict(SIZES[size])
    model = create(tiny_config(shape.pop("vocabulary"), **shape), seed=0, dtype=torch.bfloat16)
    return {name: weight.detach() for name, weight in model.named_weights()}


def copies(weights: dict[str, Tensor]) -> Callable[[], None]:
    """Copy all weights once, into existing memory."""
    others = {name: torch.empty_like(weight) for name, weight in weights.items()}

    def copy() -> None:
        for name, weight in weights.items():
            others[name].copy_(weight)

    return copy


class Published:
    """Repeated publishes by one transport, with different weights each time."""

    def __init__(
        self, name: str, weights: dict[str, Tensor], receiver: Receiver, directory: Path, bucket_mib: int
    ) -> None:
        self.name, self._weights, self._version = name, weights, 0
        self._loop = asyncio.new_event_loop()
        self._publish: Callable[[Iterable[tuple[str, Tensor]], int], Coroutine[Any, Any, Metrics]]
        if name in ("alias", "local"):
            own = weights if name == "alias" else {key: torch.zeros_like(weight) for key, weight in weights.items()}
            self._engine: Held | Receiver = Held(own)
            self._publish = partial(publish_to_engine, self._engine)
            return
        nbytes = bucket_mib * 2**20
        made: dict[str, Callable[[], WeightTransport]] = {
            "shm": lambda: ShmTransport(nbytes),
            "disk": lambda: DiskTransport(directory, nbytes),
            "gloo": lambda: BroadcastTransport("gloo", nbytes, address="127.0.0.1"),
        }
        self._engine = receiver
        self._publish = ReplicaWeightSync([receiver], made[name]()).publish

    def prepare(self) -> None:
        """Change every weight and zero the engine's, so its later weights come from this publish."""
        for weight in self._weights.values():
            weight.neg_()
        if self.name != "alias":
            self._engine.forget()

    def publish(self) -> None:
        """Publish the weights."""
        self._version += 1
        self._loop.run_until_complete(self._publish(self._weights.items(), self._version))

    def check(self) -> None:
        """Check that the engine has the published weights, to the last bit."""
        wanted = {name: digest(weight) for name, weight in self._weights.items()}
        if self._engine.digests() != wanted:
            raise RuntimeError(f"The engine has other weights than were published to it by {self.name}.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="75m", help="the model")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; medians are shown")
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS, help="time these alone")
    parser.add_argument("--bucket-mib", type=int, default=64, help="MiB of a bucket")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    console = make_console()
    weights = weights_of(arguments.size)
    total = sum(weight.nbytes for weight in weights.values())
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        receiver = stack.enter_context(closing(Receiver(directory / "receiver.log", torch.get_num_threads())))
        copy = copies(weights)
        cases = []
        for name in arguments.only:
            published = Published(name, weights, receiver, directory / "weights", arguments.bucket_mib)
            kind = f"a publish of {total / 2**20:.0f} MiB"
            cases.append(
                Case(name, kind, published.publish, copy, LIMITS[name], before=published.prepare, after=published.check)
            )
        with progress("timing", len(cases) * (arguments.rounds + 1), console) as bar:
            measured = measure(cases, arguments.rounds, bar.advance)
    console.print(f"Size {arguments.size}, bf16, {machine()['threads']} threads, median of {arguments.rounds} rounds.")
    console.print(table(measured, "copy"))
    for result in measured:
        console.print(f"{result.name}: {result.seconds:.3f} s, {1 / result.ratio:.0%} of a copy's bandwidth")
    if arguments.json:
        write_json(
            arguments.json, measured, {"size": arguments.size, "bytes": total, "bucket_mib": arguments.bucket_mib}
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
