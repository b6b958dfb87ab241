"""The reaper ends the groups of a process that was killed: those with a grace period may clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.processes import gone

OWNER = """
import subprocess, sys
from etude.child_process import reaper

def start(line):
    process = subprocess.Popen(["/bin/sh", "-c", line], start_new_session=True, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process.pid

loop = "; echo; while :; do sleep 0.05; done"
tidy, stubborn = start(f"trap 'touch {sys.argv[1]}; exit' TERM{loop}"), start(f"trap '' TERM{loop}")
reaper.add(tidy, 20.0)
reaper.add(stubborn)
print(tidy, stubborn, reaper._process.pid, flush=True)
sys.stdin.readline()
reaper.ensure_running()
print("there", flush=True)
sys.stdin.readline()
"""


def test_a_killed_owner_leaves_nothing_even_if_its_reaper_was_killed_before(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "tidied")], stdin=pipe, stdout=pipe)
    try:
        assert owner.stdin is not None and owner.stdout is not None
        tidy, stubborn, reaper = map(int, owner.stdout.readline().split())
        os.kill(reaper, signal.SIGKILL)
        assert gone(reaper)
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == b"there\n" and not gone(tidy, 0.1)
    finally:
        owner.kill()
        owner.communicate()
    assert gone(tidy) and gone(stubborn) and (tmp_path / "tidied").exists()
