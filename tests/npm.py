"""The npm packages that tests need, pinned by the lock file of a folder and installed once on a machine.

`tests/clients` has agent clients, its folder `coding` two more, which are large, and `tests/view` the linter of the
viewer's pages. The lock file of `coding` leaves out the optional packages of Qwen Code, which its tests do not need.
The packages are in the user's cache directory, in a folder named by a hash of the lock file and of the Node.js that
runs them. The last file that is written marks it complete. No script of a package runs during the installation.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from etude.config.env import cache_directory

CLIENTS = Path(__file__).parent / "clients"
CODING = CLIENTS / "coding"
FILES = "package.json", "package-lock.json"
PATIENCE_S = 900.0
"""Seconds that an installation may take: the clients are 800 MB."""


def versions(pins: Path = CLIENTS) -> dict[str, str]:
    """Return the pinned packages, and the version of each."""
    dependencies: dict[str, str] = json.loads((pins / "package.json").read_text(encoding="utf-8"))["dependencies"]
    return dependencies


def place(pins: Path = CLIENTS) -> Path | None:
    """Return the folder of the packages, whether it exists or not; None without Node.js."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None
    node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    contents = [node, platform.system(), platform.machine(), *((pins / name).read_text() for name in FILES)]
    key = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:12]
    return cache_directory() / "environments" / f"npm-{pins.name}-{key}"


def installed(pins: Path = CLIENTS) -> Path:
    """Return the folder of the packages; install them if needed."""
    folder = place(pins)
    if folder is None:
        pytest.fail("ETUDE_REQUIRE names 'npm', but there is no Node.js with npm here.", pytrace=False)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(folder.name + ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released at the end of this process
        if not (folder / "whole.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name in FILES:
                shutil.copy(pins / name, folder)
            command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
            if done.returncode:
                pytest.fail(f"npm cannot install {pins.name} into {folder}:\n{done.stderr[-2000:]}", pytrace=False)
            (folder / "whole.json").write_text(json.dumps(versions(pins)))
    return folder
