"""Ray for tests: one for all tests of a process, because starting it takes longer than most of them; and Rays that are
somebody else's, which runs and programs join: a head that was started by hand, two nodes of Ray's own test cluster."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from etude.dispatch import crew_of
from tests.components import require
from tests.processes import descendants

CPUS = 4
GUARDED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""By what those that are somebody else's, and whoever joins them, know each other."""

PATIENT = """
import time
from etude.config.env import silence_ray
silence_ray()
from ray._private import services

def waited_for(*asked, _found=services.get_node):
    until = time.monotonic() + 300
    while True:
        try:
            return _found(*asked)
        except RuntimeError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)

services.get_node = waited_for
"""
"""Ray gives a node half a minute to be there. On a machine that has much else to do it takes longer."""

RAY = (sys.executable, "-c", PATIENT + "from ray.scripts.scripts import main; main()")
"""The command `ray`."""

AGENTS = ("metrics_agent_port", "dashboard_agent_listen_port", "metrics_export_port", "runtime_env_agent_port")
"""What names the ports at which the parts of a node listen; the command calls one of them otherwise."""

TWO = """
import json, sys
from ray.cluster_utils import Cluster
from etude.dispatch.ray_cluster import LONG_TIMEOUTS
from tests.rays import agents

small = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
head = small | agents() | {"include_dashboard": False, "_system_config": LONG_TIMEOUTS}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = [cluster.head_node, cluster.add_node(**small | agents())]
raylets = [node.all_processes["raylet"][0].process.pid for node in nodes]
print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
    print(line, end="", flush=True)
for node in reversed(nodes):
    cluster.remove_node(node, allow_graceful=False)
"""


@contextmanager
def joined() -> Iterator[None]:
    """A small Ray on this machine, until the end."""
    require("ray")
    crew_of("ray")
    from etude.dispatch.ray_cluster import RayCluster

    with closing(RayCluster(CPUS)):
        yield


def free_ports(count: int) -> list[int]:
    """So many ports of the loopback interface that nobody listens at."""
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def agents() -> dict[str, int]:
    """Ports for the parts of a node. Those that choose for themselves are waited for, but half a minute at most."""
    return dict(zip(AGENTS, free_ports(len(AGENTS)), strict=True))


def program(text: str, *words: object, **environment: str) -> subprocess.Popen[str]:
    """A program of a test, in a process of its own that finds what the test finds."""
    command = [sys.executable, "-c", text, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=surroundings(**environment), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def surroundings(**environment: str) -> dict[str, str]:
    """This process's environment, and in it where its modules are found."""
    more = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600"}
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | more | environment


def joining(address: str) -> dict[str, str]:
    """What has a program join the Ray of an address."""
    return {"RAY_ADDRESS": address, **GUARDED}


def output_of(process: subprocess.Popen[str], within: float = 900.0) -> dict[str, Any]:
    """What a program printed last."""
    out, err = process.communicate(timeout=within)
    assert process.returncode == 0, err[-4000:]
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def actors(pid: int) -> list[int]:
    """The ranks among all that a process has started."""
    found = []
    for each in descendants(pid):
        with suppress(OSError):  # it has ended since
            found += [each] if b"ray::_RayRankActor" in Path(f"/proc/{each}/cmdline").read_bytes() else []
    return found


# -- those of somebody else -------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """A Ray that was started by hand."""

    address: str
    dashboard: str
    """Where its dashboard is, if it has one."""


@contextmanager
def a_head(*words: str, cpus: int = 4, dashboard: bool = False, guard: Mapping[str, str] = GUARDED) -> Iterator[Head]:
    """`ray start --head`, until the end. Its directory has a short name, because Ray's sockets lie in it."""
    from etude.dispatch.ray_cluster import LONG_TIMEOUTS

    port, shown = free_ports(2)
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        named = ("--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={place}", *words)
        named += (f"--system-config={json.dumps(LONG_TIMEOUTS)}", f"--include-dashboard={dashboard}")
        with a_node((), *named, f"--dashboard-port={shown}", cpus=cpus, guard=guard):
            yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{shown}")


@contextmanager
def a_node(before: tuple[str, ...], *words: str, cpus: int, guard: Mapping[str, str] = GUARDED) -> Iterator[int]:
    """`ray start` with these words, by a command that stands before it, until the end; the process."""
    command = [*before, *RAY, "start", "--block", f"--num-cpus={cpus}", "--object-store-memory=200000000", *words]
    ports = {name.replace("metrics_agent", "dashboard_agent_grpc"): port for name, port in agents().items()}
    command += [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
    pipe = subprocess.PIPE
    node = subprocess.Popen(command, env=surroundings(**guard), stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        assert node.stdout is not None
        said = []
        for line in node.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        assert node.poll() is None, "".join(said)
        yield node.pid
    finally:
        node.send_signal(signal.SIGKILL if before else signal.SIGTERM)  # which nobody passes on
        node.communicate(timeout=60)


class Two(NamedTuple):
    """Ray's own test cluster, of two nodes with a place for one rank each, which a program of its own looks after."""

    address: str
    raylets: tuple[int, int]
    """The process that each node is kept by."""
    process: subprocess.Popen[str]

    def ranks(self) -> list[int]:
        """The ranks on both of them."""
        return [rank for raylet in self.raylets for rank in actors(raylet)]

    def lose(self) -> None:
        """Kill the second node, with all that runs there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("lose\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "lose\n"


@contextmanager
def two_nodes() -> Iterator[Two]:
    """A Ray of two nodes on this machine, until the end."""
    require("ray")
    process = program(PATIENT + TWO, **GUARDED)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1][-4000:]
        addresses = json.loads(line)
        first, second = addresses["raylets"]
        yield Two(addresses["address"], (first, second), process)
    finally:
        try:
            process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
