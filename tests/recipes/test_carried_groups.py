"""Several ranks and servers that join process groups. A rank keeps its servers; a restarted server gets a new group."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from etude.recipes.workers.weight_sender import SendPlan, WeightSender
from etude.rollout.server_client import ServerClient
from etude.rollout.vllm import VllmBackend
from etude.sync import SyncConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "vllm_weights"))

from etude_vllm_weights.fetching import Fetcher


class Taker(ThreadingHTTPServer):
    """A server that takes weights as vLLM does with the plug-in, and does nothing else."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.remote = ServerClient(f"http://127.0.0.1:{self.server_port}", VllmBackend())
        self.joined = 0
        self.begin()

    def begin(self) -> None:
        """Reset to the state of a new process."""
        self.fetcher = Fetcher(torch.device("cpu"))
        self.holds = -1.0

    def ask(self, path: str, body: dict[str, Any]) -> None:
        """Handle a request about weights."""
        if path == "/init_weight_transfer_engine":
            self.joined += 1
            self.fetcher.join(body["init_info"]["group"])
        elif path == "/update_weights":
            ((_, weight),) = self.fetcher.fetch(**body["update_info"])
            self.holds = weight.mean().item()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Taker

    def do_POST(self) -> None:
        """Answer when the request is handled."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        reply, code = b'{"success": true}', 200
        try:
            self.server.ask(self.path.partition("?")[0], body)
        except (RuntimeError, ValueError) as error:
            reply, code = str(error).encode(), 500
        self.send_response(code)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def takers(count: int) -> Iterator[list[Taker]]:
    """Start this many servers."""
    with ExitStack() as stack:
        made = [stack.enter_context(Taker()) for _ in range(count)]
        for taker in made:
            threading.Thread(target=taker.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            stack.callback(taker.shutdown)
        yield made


def test_a_server_keeps_its_rank_and_gets_a_new_group_after_each_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback)
    how = SendPlan(SyncConfig(weight_transport="gloo", timeout=20, address="127.0.0.1"), (0, 1), untied=False)
    with ExitStack() as stack:
        ranks = [stack.enter_context(closing(WeightSender(how.sync, torch.device("cpu")))) for _ in how.ranks]
        three = stack.enter_context(takers(3))

        def publish(version: int, *places: int) -> None:
            """Publish to the servers at these places, by all ranks."""
            addresses = {place: three[place].remote.address for place in places}
            weights = [("layer.weight", torch.full((8, 8), float(version)))]
            updates = [
                update
                for rank in how.ranks
                for update in ranks[rank].send(how.share(addresses, rank), weights, version).servers
            ]
            assert [update.error for update in updates if not update.updated] == [] and len(updates) == len(places)
            assert all(three[place].holds == version for place in places)

        publish(1, 0, 1, 2)
        publish(2, 1, 2)  # the first is away, and no server changes its rank
        publish(3, 0, 1, 2)
        assert [taker.joined for taker in three] == [1, 1, 1]
        for place in (1, 2):
            three[place].begin()
            three[place].remote.relocate(three[place].remote.url)
        publish(3, 1)  # one gets the newest weights at once, and the other with all
        publish(4, 0, 1, 2)
        assert [taker.joined for taker in three] == [1, 2, 2]
