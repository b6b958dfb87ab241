"""A Hugging Face hub for tests: a server on loopback with the routes that huggingface_hub calls."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["COMMIT", "Hub", "hub"]

COMMIT = "c0ffee" * 6 + "c0ff"
TOKEN = "hf_of_the_tests"


@dataclass
class Hub:
    """The repositories of a hub, each a directory, and the requests it received."""

    repositories: dict[str, Path] = field(default_factory=dict)
    """Directories by `models/owner/name` and `datasets/owner/name`."""
    asked: list[str] = field(default_factory=list)
    """Each request: its method and path."""
    created: list[dict[str, Any]] = field(default_factory=list)
    """The repositories that a client asked to create."""
    uploaded: dict[str, bytes] = field(default_factory=dict)
    """Files by `owner/name/path`."""
    gated: set[str] = field(default_factory=set)
    """Repositories that require an agreement."""
    url: str = ""


@contextmanager
def hub() -> Iterator[Hub]:
    """Serve a hub until the block ends."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def _read(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.asked.append(f"{self.command} /{path}")
        words = path.split("/")
        if words[0] == "api":
            size = 2 if "/".join(words[1:3]) in self.hub.repositories else 3  # a model's name may be one word
            key, rest = "/".join(words[1 : 1 + size]), words[1 + size :]
        elif words[0] == "datasets":
            key, rest = "/".join(words[:3]), words[3:]
        else:
            size = 1 if f"models/{words[0]}" in self.hub.repositories else 2
            key, rest = "/".join(["models", *words[:size]]), words[size:]
        if key in self.hub.gated:
            return self._answer(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        if key not in self.hub.repositories:
            return self._answer(404, {"error": "no such repository"}, {"X-Error-Code": "RepoNotFound"})
        where = self.hub.repositories[key]
        files = sorted(file for file in where.rglob("*") if file.is_file())
        if words[0] != "api":
            return self._file(where / "/".join(rest[2:]))
        if rest[:1] == ["tree"]:
            return self._answer(200, [_entry(where, file) for file in files])
        siblings = [{"rfilename": file.relative_to(where).as_posix()} for file in files]
        return self._answer(200, {"id": "/".join(words[2:4]), "sha": COMMIT, "siblings": siblings, "private": False})

    def _file(self, file: Path) -> None:
        if not file.is_file():
            return self._answer(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
        return self._answer(200, file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT})

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append(f"POST {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials"})
        if path == "/api/repos/create":
            repository = json.loads(body)
            self.hub.created.append(repository)
            return self._answer(200, {"url": f"{self.hub.url}/{repository.get('organization')}/{repository['name']}"})
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            requested = json.loads(body)["files"]
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in requested]
            return self._answer(200, {"files": files})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                self.hub.uploaded[f"{name}/{entry['value']['path']}"] = base64.b64decode(entry["value"]["content"])
        return self._answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _answer(
        self, code: int, body: bytes | dict[str, Any] | list[Any], headers: dict[str, str] | None = None
    ) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(where: Path, file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"type": "file", "path": file.relative_to(where).as_posix(), "size": size, "oid": _digest(file)}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
