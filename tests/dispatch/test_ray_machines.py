"""The loss of a rank on another machine, as far as one machine can show it.

The second node of this Ray runs in its own namespaces. Its process ids differ from those outside, and its logs are
visible only inside. So ranks are killed, and logs are read, on their node.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.components import require
from tests.processes import descendants, gone
from tests.rays import a_head, a_node, actors, joining, output_of, program

pytestmark = pytest.mark.soak

APART = ("unshare", "--pid", "--fork", "--mount", "--mount-proc", "--kill-child")
"""The command that starts a process in new namespaces."""
HIDING = 'mount -t tmpfs none "$0" && exec "$@"'
"""The command that hides a directory there, and then becomes another command."""
PORTS = ("--min-worker-port=0", "--max-worker-port=0")
"""Free ports, because the two nodes share them."""

LOSES = """
import json, sys
from contextlib import closing
from pathlib import Path
from etude.data.partition import partition_rollouts
from etude.dispatch import CrewConfig, crew_of, ray_crew
from etude.errors import CrewError
from tests.dispatch.workers import CountingWorker, counted

ray_crew.EXIT_TIMEOUT = 120.0  # a machine that has much else to do takes its time
logs, how, config = Path(sys.argv[1]), sys.argv[2], CrewConfig(heartbeat_timeout=300, timeout=600)
with closing(crew_of("ray")(counted, ranks=2, share=partition_rollouts, logs=logs, config=config)) as crew:
    (far,) = (member for member in crew._handles if not member._is_here)
    report = {"rank": far.rank, "pid": far.pid, "address": far.address, "log": str(far.log), "seen": far.log.exists()}
    report |= {"rendezvous": [member.bind_address for member in crew._handles]}
    report |= {"heard": [each.tolist() for each in crew.call(CountingWorker.exchange, 2)]}
    print(json.dumps(report), flush=True)
    sys.stdin.readline()
    crew._config = CrewConfig(heartbeat_timeout=15, timeout=5)
    try:
        crew.call(CountingWorker.hang, far.rank) if how == "hang" else crew.call(CountingWorker.end, far.rank, how)
    except CrewError as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""


class Machines(NamedTuple):
    """A Ray of two nodes, the second in its own namespaces."""

    address: str
    apart: int
    """The process of the second node."""
    logs: Path
    """A directory that is another one on the second node."""

    def read_there(self, path: str) -> str:
        """Return the text of a file on the second node."""
        return Path(f"/proc/{descendants(self.apart)[0]}/root{path}").read_text()


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A Ray with room for one rank on each node."""
    require("ray")
    if subprocess.run([*APART, "true"], capture_output=True, check=False).returncode:
        pytest.skip("namespaces of their own are not for this user here")
    logs = tmp_path_factory.mktemp("logs")
    with a_head(*PORTS, cpus=1) as head:
        words = (f"--address={head.address}", "--node-ip-address=127.0.0.2", *PORTS)
        with a_node((*APART, "sh", "-c", HIDING, str(logs)), *words, cpus=1) as apart:
            yield Machines(head.address, apart, logs)


LAST = r" Its last lines, in .+these are its last words"
HOW = {
    "kill": r"ended while it was in CountingWorker\.end: its process is gone, as Ray reports: .+" + LAST,
    "stop": r"gave no sign of life for \d+\.\d s while it was in CountingWorker\.end\." + LAST,
    "hang": r"did not end CountingWorker\.hang within `crew\.timeout` = 5 s after another rank had\. "
    r"The stacks of their threads",
}
"""The faults of a rank, and a part of the error of each."""


@pytest.mark.parametrize("how", HOW)
def test_a_lost_rank_on_another_machine_is_named_and_ended_there(how: str, machines: Machines) -> None:
    """It is named by its process id there. Tasks on its node fetch its last output and the place where it hangs."""
    process = program(LOSES, machines.logs / how, how, **joining(machines.address))
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1][-4000:]
    report, (far,) = json.loads(line), actors(machines.apart)
    assert far != report["pid"], "it has another number here"
    assert not report["seen"] and len(set(report["rendezvous"])) == 2 and report["heard"] == [[10, 12]] * 2
    ended = output_of(process)["error"]
    named = f"Rank {report['rank']} of policy (process {report['pid']} on node {report['address']}) "
    assert ended.startswith(named) and re.search(HOW[how], ended), ended
    assert gone(far, 30)
    assert how != "hang" or "in hang" in machines.read_there(report["log"])
