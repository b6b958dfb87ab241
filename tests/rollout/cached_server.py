"""A small server with the HTTP interface of vLLM or SGLang, and with a cache that can go stale.

It runs on threads of the test's own process. The state of a position follows from the state before it, from its token,
and from the weights that computed it, as keys and values do. The next token and its log-prob follow from the last
state. So an answer shows which weights computed its cache. Requests share cached states of their longest common prefix
if they have the same salt. Weights are a number: that of the file `salt` in a directory.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["CachedServer", "cached_server"]

VOCABULARY, CONTEXT = 97, 512
SPANS = {"vllm": "0.32.0", "sglang": "0.5.23"}
"""The version of each kind's software."""


@dataclass(eq=False)
class Running:
    """A request under way."""

    tokens: list[int]
    salt: str
    states: list[int] = field(default_factory=list)
    """The cached state of each computed position."""
    aborted: bool = False


class CachedServer:
    """The state of the server. One lock guards it; a token is drawn while the lock is held."""

    def __init__(self, kind: str, pace: float) -> None:
        self.kind, self.pace = kind, pace
        self.weights, self.label = 0, "0"
        self.refuses_reset = self.overlaps = False
        self.posts: list[str] = []
        """The paths of the requests other than those for answers and reports."""
        self.url = ""
        self._cached: dict[tuple[str, tuple[int, ...]], int] = {}
        self._running: list[Running] = []
        self._lock = threading.Lock()
        self._is_open = threading.Event()
        self._is_open.set()

    def draw(self, request: Running) -> tuple[int, float, str] | None:
        """Compute what is missing, and draw one token; None if the request was aborted or the server is paused."""
        with self._lock:
            if request.aborted or not self._is_open.is_set():
                return None
            tokens = tuple(request.tokens)
            for position in range(len(request.states), len(tokens)):
                prefix = (request.salt, tokens[: position + 1])
                known = self._cached.get(prefix) if position < len(tokens) - 1 else None
                before = request.states[-1] if request.states else 0
                state = zlib.crc32(f"{before} {tokens[position]} {self.weights}".encode()) if known is None else known
                request.states.append(state)
                self._cached[prefix] = state
            token, logp = request.states[-1] % (VOCABULARY - 2) + 2, -(1 + request.states[-1] % 1009) / 1009
            request.tokens.append(token)
            return token, logp, self.label

    def answer(self, tokens: list[int], salt: str, count: int) -> Iterator[dict[str, Any]]:
        """Yield the events of an answer."""
        request = Running(list(tokens), salt)
        self._running.append(request)
        spans: list[dict[str, Any]] = []
        try:
            done = 0
            while done < count and not request.aborted:
                self._is_open.wait(0.05)
                drawn = self.draw(request)
                if drawn is None:
                    continue
                done += 1
                if not spans or spans[-1]["version"] != drawn[2]:
                    spans.append({"version": drawn[2], "start": done - 1, "end": done})
                spans[-1]["end"] = done
                yield self._event(drawn, "length" if done == count else None, spans)
                time.sleep(self.pace)
            if done < count:
                yield self._event(None, "abort", spans)
        finally:
            self._running.remove(request)

    def post(self, path: str, query: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Change the state; return the status and the reply."""
        with self._lock:
            self.posts.append(path)
            if path in ("/pause", "/pause_generation"):
                self._is_open.clear()
                if body.get("mode") == "retract":
                    self._drop_running()
            elif path in ("/resume", "/continue_generation"):
                self._is_open.set()
            elif path in ("/abort_requests", "/abort_request"):
                for request in self._running:
                    request.aborted = True
            elif path == "/update_weight_version":
                self.label = body["new_version"]
            elif path == "/collective_rpc":
                self._load(body["kwargs"]["weights_path"])
            elif path == "/update_weights_from_disk":
                self._load(body["model_path"])
                self.label = body["weight_version"]
                return 200, {"success": not body["flush_cache"] or self._reset(), "message": "not flushed"}
            elif path == "/reset_prefix_cache":
                if "reset_running_requests=true" in query and not self.refuses_reset:
                    self._drop_running()
                return 200, {"success": self._reset()}
            elif path == "/flush_cache":
                return (200 if self._reset() else 400), {}
        return 200, {"success": True}

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the reply to a question about the state; None where the state is text."""
        version = {"version": SPANS[self.kind]}
        replies: dict[str, dict[str, Any]] = {
            "/version": version,
            "/server_info": version | {"disable_overlap_schedule": not self.overlaps},
            "/health": {},
            "/v1/models": {"data": [{"max_model_len": CONTEXT}]},
            "/is_sleeping": {"is_sleeping": False},
            "/weight_info": {"weight_version": self.label},
            "/model_info": {"weight_version": self.label},
            "/v1/loads": {"loads": []},
        }
        return replies.get(path)

    def _load(self, directory: str) -> None:
        self.weights = int((Path(directory) / "salt").read_text())

    def _drop_running(self) -> None:
        for request in self._running:
            request.states.clear()

    def _reset(self) -> bool:
        """Forget the prefixes, unless a running request holds states or the test lets it refuse."""
        if self.refuses_reset or any(request.states for request in self._running):
            return False
        self._cached.clear()
        return True

    def _event(
        self, drawn: tuple[int, float, str] | None, finish: str | None, spans: list[dict[str, Any]]
    ) -> dict[str, Any]:
        ids, logps = ([drawn[0]], [drawn[1]]) if drawn else ([], [])
        if self.kind == "vllm":
            content = [{"token_id": ids[0], "logprob": logps[0], "top_logprobs": []}] if drawn else []
            choice = {"token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}
            return {"choices": [choice | ({"weight_versions": spans} if finish else {})]}
        meta: dict[str, Any] = {"output_token_logprobs": [[logp, ids[0]] for logp in logps]}
        meta |= {"finish_reason": {"type": finish}, "weight_versions": spans} if finish else {"finish_reason": None}
        return {"output_ids": ids, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        """Answer a question about the state."""
        path = self.path.partition("?")[0]
        if path == "/flush_cache":
            self.reply(*self.server.state.post(path, "", {}))
            return
        self.reply(200, self.server.state.get(path) or {})

    def do_POST(self) -> None:
        """Stream an answer, or change the state."""
        state: CachedServer = self.server.state
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
        path, _, query = self.path.partition("?")
        if not path.endswith("/generate"):
            self.reply(*state.post(path, query, body))
            return
        tokens = body["token_ids"] if state.kind == "vllm" else body["input_ids"]
        salt = body["cache_salt"] if state.kind == "vllm" else body["extra_key"]
        sampling = body["sampling_params"]
        count = sampling["max_tokens"] if state.kind == "vllm" else sampling["max_new_tokens"]
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for event in state.answer(tokens, salt, count):
                data = f"data: {json.dumps(event)}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client has left
            self.close_connection = True

    def reply(self, status: int, body: dict[str, Any]) -> None:
        """Send a reply."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def cached_server(kind: str, pace: float = 0.002) -> Iterator[CachedServer]:
    """Run a server of this kind; a token takes `pace` seconds."""
    state = CachedServer(kind, pace)
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads, listener.state = True, state  # type: ignore[attr-defined]
    state.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
