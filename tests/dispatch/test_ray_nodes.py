"""Crews on a Ray of several nodes, and on one that is joined; each in its own process."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.components import require
from tests.processes import gone
from tests.rays import GUARDED, PATIENT, a_head, joining, output_of, program

pytestmark = pytest.mark.soak

ENDS = 120.0
"""Seconds within which Ray notices the loss of a node, and the crew that Ray did."""

NODES = """
import json, sys, threading, time
from contextlib import closing
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, crew_of
from etude.dispatch.ray_cluster import LONG_TIMEOUTS
from etude.errors import CrewError
from tests.batches import random_batch, same
from tests.dispatch.workers import CountingWorker, Maker, counted
from tests.rays import agents

if __name__ == "__main__":
    small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    head = small | agents() | {"include_dashboard": False, "_system_config": LONG_TIMEOUTS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(**small | agents())
    ray.init(address=cluster.address, log_to_driver=False)
    config = CrewConfig(heartbeat_timeout=300, timeout=600)
    report = {}
    with closing(crew_of("ray")(Maker, ranks=2, share=partition_rollouts, config=config,
                                logs=Path(sys.argv[1]) / "a")) as crew:
        report["nodes"] = crew.nodes
        batch = random_batch(0, (3, 4, 2))
        found = crew.call(Maker.narrow, crew.call_for_ref(Maker.widen, batch))
        report["same"] = same(found, Maker().narrow(Maker().widen(batch)))
    crew = crew_of("ray")(counted, ranks=2, share=partition_rollouts, logs=Path(sys.argv[1]) / "b", config=config)
    lost = next(handle for handle in crew._handles if handle.location.node == other.node_id)
    report["lost"] = [lost.rank, lost.pid]
    crew.call(CountingWorker.add, 1)
    threading.Timer(1.0, cluster.remove_node, (other,), {"allow_graceful": False}).start()
    began = time.monotonic()
    try:
        crew.call(CountingWorker.hang, 0, 1)
    except CrewError as error:
        report["error"], report["after"] = str(error), time.monotonic() - began
    pids = crew.pids
    crew.close()
    report["pids"] = pids
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(report), flush=True)
"""

JOINS = """
import json, os, sys
from pathlib import Path
from contextlib import closing
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, crew_of
from tests.dispatch.workers import CountingWorker, Maker, counted

config = CrewConfig(heartbeat_timeout=300, timeout=600)
with closing(crew_of("ray")(counted, ranks=2, share=partition_rollouts, logs=Path(sys.argv[1]), config=config)) as crew:
    report = {"count": crew.call(CountingWorker.add, 1), "pids": crew.pids, "nodes": crew.nodes}
    report["given"] = crew.call(CountingWorker.given, "HF_HOME", "HF_TOKEN")
    print(json.dumps(report), flush=True)
    if len(sys.argv) > 2:
        crew.call(CountingWorker.stop_here)
"""


def test_ranks_on_two_nodes_share_data_and_a_lost_one_is_named(tmp_path: Path) -> None:
    """Each rank reads data of the other, and the rank of the lost node is named."""
    require("ray")
    report = output_of(program(PATIENT + NODES, tmp_path, **GUARDED))
    assert len(set(report["nodes"])) == 2 and report["same"]
    rank, pid = report["lost"]
    assert report["error"].startswith(f"Rank {rank} of policy (process {pid} on node "), report["error"]
    assert "ended while it was in CountingWorker.hang" in report["error"] and report["after"] < ENDS
    assert all(gone(pid, 30) for pid in report["pids"])


def test_a_running_ray_is_joined_and_left_unchanged(tmp_path: Path) -> None:
    require("ray")
    with a_head() as head:
        address = head.address
        first = output_of(program(JOINS, tmp_path, HF_HOME="/models", HF_TOKEN="mine", **joining(address)))
        assert first["given"] == [{"HF_HOME": "/models"}] * 2, "what opens something stays"
        assert first["count"] == 11 and all(gone(pid, 30) for pid in first["pids"])
        again = output_of(program(JOINS, tmp_path, **joining(address)))
        assert again["nodes"] == first["nodes"] and again["pids"] != first["pids"]
        waits = program(JOINS, tmp_path, "and waits", **joining(address))
        assert waits.stdout is not None
        pids = json.loads(waits.stdout.readline())["pids"]
        waits.kill()
        waits.communicate(timeout=60)
        assert all(gone(pid, 60) for pid in pids), "a controller that is killed leaves no rank"


def test_a_missing_ray_is_reported(tmp_path: Path) -> None:
    require("ray")
    process = program(JOINS, tmp_path, RAY_ADDRESS="127.0.0.1:1")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "`RAY_ADDRESS` = 127.0.0.1:1 cannot be joined" in err


def test_breakpoint_in_a_rank_waits_for_a_debugger_and_goes_on(tmp_path: Path) -> None:
    """A debugpy client finds the rank by its log, stops it at the breakpoint, and lets it continue."""
    require("ray")
    require("debugpy")
    with a_head() as head:
        stops = program(JOINS, tmp_path, "and stops", **joining(head.address))
        log, until = tmp_path / "rank-0.log", time.monotonic() + 300
        while not (listening := re.search(r"listening on ([\d.]+):(\d+)", log.read_text() if log.exists() else "")):
            assert stops.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        with socket.create_connection((listening[1], int(listening[2])), timeout=120) as client:
            assert attached(client) == "breakpoint"
        _, err = stops.communicate(timeout=120)
        assert stops.returncode == 0, err[-4000:]


def attached(client: socket.socket) -> str:
    """Attach by the debug adapter protocol, wait until a thread has stopped, and let it continue; return the reason."""
    stream = client.makefile("rwb")

    def ask(number: int, command: str, **arguments: object) -> None:
        body = json.dumps({"seq": number, "type": "request", "command": command, "arguments": arguments}).encode()
        stream.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        stream.flush()

    def next_message() -> dict[str, Any]:
        size = 0
        while line := stream.readline().strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        message: dict[str, Any] = json.loads(stream.read(size))
        return message

    ask(1, "initialize", adapterID="python")
    ask(2, "attach", justMyCode=False)  # it requires some argument
    why, done = "", False
    while not done:
        message = next_message()
        assert message.get("success", True), message
        if message.get("event") == "initialized":
            ask(3, "configurationDone")
        elif message.get("event") == "stopped":
            why = message["body"]["reason"]
            ask(4, "continue", threadId=message["body"]["threadId"])
        done = message.get("command") == "continue"
    ask(5, "disconnect")
    return why
