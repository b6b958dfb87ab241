"""The viewer over HTTP: raw paths over a socket, the command as a process, and a reader that disturbs no writer."""

from __future__ import annotations

import re
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from etude.store import open_store
from etude.view.server import start_viewer
from tests.joined import started
from tests.store.made import group, tried
from tests.view.made import KEY, Viewer, write_run


def raw_request(url: str, head: str) -> str:
    """Send a request as these bytes, which no client has normalized, and return the reply."""
    host, port = re.fullmatch(r"http://(.*):(\d+)", url).groups()  # type: ignore[union-attr]
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"{head}\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode(errors="replace")


def test_raw_paths_reach_nothing_but_the_pages(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1)
    server, address = start_viewer(tmp_path, key=KEY)
    with server:
        assert httpx2.get(address + "api/runs").json()["run"] == ["run"]
        assert "<title>Etude</title>" in httpx2.get(address + "run?run=run").text
        for path in ("static/../../__init__.py", "static/%2e%2e/server.py", "../etc/passwd", "./../x/api/runs"):
            reply = raw_request(server.url, f"GET /{KEY}/{path} HTTP/1.1")
            assert re.match(r"HTTP/1.1 40[34] ", reply) and "import" not in reply, path
        for path in ("", "..", f"x/../{KEY}/api/runs", "%2e"):
            assert raw_request(server.url, f"GET /{path} HTTP/1.1").startswith("HTTP/1.1 403"), path


@pytest.mark.slow
def test_the_command_prints_an_address_with_a_new_key_and_ends_with_a_signal(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1)
    keys = set()
    for number in range(2):
        with started(
            ["view", str(tmp_path), "--listen", "127.0.0.1:0", "--no-browser"], tmp_path / f"log{number}"
        ) as view:
            view.says("Ctrl-C ends the viewer")
            (address,) = re.findall(r"http://\S+/", view.said)
            keys.add(address.split("/")[3])
            assert httpx2.get(address + "api/runs").json()["status"] == ["done"]
            assert httpx2.get(address.replace(address.split("/")[3], "x") + "api/runs").status_code == 403
            view.send_signal(signal.SIGTERM)
            assert view.ends() == 0
    assert len(keys) == 2 and all(len(key) == 32 for key in keys)


def test_a_run_is_written_while_it_is_read(tmp_path: Path) -> None:
    viewer, done = Viewer(tmp_path), threading.Event()
    write_run(tmp_path / "run", steps=2)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                viewer.get("steps", run="run")
                viewer.get("step", run="run", step=2)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    with closing(open_store(tmp_path / "run" / "journal.sqlite")) as store:
        for reader in readers:
            reader.start()
        for task in range(100, 140):
            store.append([*group(task), *tried(2 * task), *tried(2 * task + 1)])
        done.set()
        for reader in readers:
            reader.join()
    assert not failures
    with pytest.raises(AssertionError, match="no step 3"):
        viewer.get("step", run="run", step=3)
