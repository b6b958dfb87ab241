"""Ray for tests. One Ray serves all tests of a process, because starting it takes longer than most tests. Other Rays,
which runs and programs join: a head that was started by hand, and two nodes of Ray's own test cluster."""

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
"""The token by which the nodes of another Ray, and programs that join it, know each other."""

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
"""Ray waits half a minute for a node. A busy machine takes longer."""

RAY = (sys.executable, "-c", PATIENT + "from ray.scripts.scripts import main; main()")
"""The command `ray`."""

AGENTS = ("metrics_agent_port", "dashboard_agent_listen_port", "metrics_export_port", "runtime_env_agent_port")
"""The options for the ports of a node's parts; the command has another name for one of them."""

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
    """Start a small Ray on this machine, until the end."""
    require("ray")
    crew_of("ray")
    from etude.dispatch.ray_cluster import RayCluster

    with closing(RayCluster(CPUS)):
        yield


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface."""
    with ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def agents() -> dict[str, int]:
    """Return ports for the parts of a node. Ray waits only half a minute for parts that choose their own."""
    return dict(zip(AGENTS, free_ports(len(AGENTS)), strict=True))


def program(text: str, *words: object, **environment: str) -> subprocess.Popen[str]:
    """Start a test's program in its own process, with this process's module path."""
    command = [sys.executable, "-c", text, *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=surroundings(**environment), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def surroundings(**environment: str) -> dict[str, str]:
    """Return this process's environment, with its module path."""
    more = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "600"}
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | more | environment


def joining(address: str) -> dict[str, str]:
    """Return the variables that let a program join the Ray of an address."""
    return {"RAY_ADDRESS": address, **GUARDED}


def output_of(process: subprocess.Popen[str], within: float = 900.0) -> dict[str, Any]:
    """Return the last line of a program's output, as JSON."""
    out, err = process.communicate(timeout=within)
    assert process.returncode == 0, f"exit code {process.returncode}: {err[-4000:]}"
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def actors(pid: int) -> list[int]:
    """Return the processes of ranks among all that a process has started."""
    pids = []
    for child in descendants(pid):
        with suppress(OSError):  # it may have ended meanwhile
            pids += [child] if b"ray::RankActor" in Path(f"/proc/{child}/cmdline").read_bytes() else []
    return pids


# -- other Rays -------------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """A Ray that was started by hand."""

    address: str
    dashboard: str
    """The address of its dashboard, if it has one."""


@contextmanager
def a_head(*words: str, cpus: int = 4, dashboard: bool = False, guard: Mapping[str, str] = GUARDED) -> Iterator[Head]:
    """Run `ray start --head`, until the end. Its directory has a short name, because Ray's sockets lie in it."""
    from etude.dispatch.ray_cluster import LONG_TIMEOUTS

    port, shown = free_ports(2)
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as place:
        named = ("--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={place}", *words)
        named += (f"--system-config={json.dumps(LONG_TIMEOUTS)}", f"--include-dashboard={dashboard}")
        with a_node((), *named, f"--dashboard-port={shown}", cpus=cpus, guard=guard):
            yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{shown}")


@contextmanager
def a_node(before: tuple[str, ...], *words: str, cpus: int, guard: Mapping[str, str] = GUARDED) -> Iterator[int]:
    """Run `ray start` with these words, after the words of another command, until the end; yield the process."""
    command = [*before, *RAY, "start", "--block", f"--num-cpus={cpus}", "--object-store-memory=200000000", *words]
    ports = {name.replace("metrics_agent", "dashboard_agent_grpc"): port for name, port in agents().items()}
    command += [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
    pipe = subprocess.PIPE
    node = subprocess.Popen(command, env=surroundings(**guard), stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        assert node.stdout is not None
        lines = []
        for line in node.stdout:
            lines.append(line)
            if "Ray runtime started" in line:
                break
        assert node.poll() is None, "".join(lines)
        yield node.pid
    finally:
        node.send_signal(signal.SIGKILL if before else signal.SIGTERM)  # the command before it passes no signal on
        node.communicate(timeout=60)


class Two(NamedTuple):
    """Ray's own test cluster of two nodes with room for one rank each, run by another process."""

    address: str
    raylets: tuple[int, int]
    """The process of each node."""
    process: subprocess.Popen[str]

    def ranks(self) -> list[int]:
        """Return the ranks on both nodes."""
        return [rank for raylet in self.raylets for rank in actors(raylet)]

    def lose(self) -> None:
        """Kill the second node, with all that runs there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("lose\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "lose\n"


@contextmanager
def two_nodes() -> Iterator[Two]:
    """Start a Ray of two nodes on this machine, until the end."""
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
