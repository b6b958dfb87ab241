"""A small server with vLLM's HTTP interface, for tests of the code between an engine and its servers.

It is a program that needs only the standard library. It answers at once, without a model: the next token follows from
the sum of the tokens before it and from `salt`, a file in the model's directory. So any server with the same salt
continues an answer in the same way. Weights that come through shared memory are another salt.

Options: `--pace SECONDS` is the time of a token, `--version` the reported version, `--lists PATH …` the endpoints in
/openapi.json. `--dies` prints an error and ends before it serves, `--poor` refuses every change of weights. `--tells`
prints the key, `--child` starts a process that outlives the server. `--return-sampling-mask` and `--max-logprobs` are
vLLM's. The set of a token is the token and the one before it. If the environment holds a key, the server requires
it as vLLM does.

`/be` changes the behavior of a running server: `{"poor": true}` refuses weights, `{"deaf": true}` refuses to end
answers, `{"gives_up": 2}` ends two answers half-way, `{"ill": true}` fails the health check. `{"hangs": true}` lets
calls of the engine hang, and `{"closed": true}` knows no training endpoint. `{"astray": true}` leaves the drawn token
out of its set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import prod
from pathlib import Path
from typing import Any

V = 97
BYTES = {"float32": 4, "bfloat16": 2}
KEY = os.environ.get("VLLM_API_KEY", "")
GUARDED = ("/v1", "/v2", "/inference")


def next_token(context: list[int], salt: int) -> int:
    """Return the next token."""
    return (31 * sum(context) + 7 * len(context) + salt) % V


def set_of(token: int) -> list[int]:
    """Return the tokens that could be drawn where this one was."""
    return [(token - 1) % V, token]


def logp_of(token: int) -> float:
    """Return the log-prob that is reported for a token."""
    return -(1 + token % 7) / 8


class State:
    """The state of the server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.label, self.running = options, "default", 0
        self.asleep = False
        self.orders: list[str] = []
        """The requests that changed its memory or its weights, in order."""
        self.carried: dict[str, int] = {}
        """What each weight that was brought sums up to, and below, the buckets that they were brought in."""
        self.buckets: set[str] = set()
        self.load(Path(options.model))
        self.goes_on = threading.Event()
        self.goes_on.set()

    def load(self, model: Path) -> None:
        """Load other weights."""
        self.model, file = str(model), model / "salt"
        self.salt = int(file.read_text()) if file.exists() else 0

    def carry(self, pieces: list[tuple[str, str, list[int], int]], where: dict[str, Any]) -> None:
        """Load the weights in a bucket of shared memory."""
        self.buckets.add(where["path"])
        with Path(where["path"]).open("rb") as file:
            for name, dtype, shape, offset in pieces:
                file.seek(where["base"] + offset)
                self.carried[name] = zlib.crc32(file.read(prod(shape) * BYTES[dtype]))
        self.salt = sum(self.carried.values()) % V


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: State

    def do_GET(self) -> None:
        """Answer questions about the state."""
        answers: dict[str, Any] = {
            "/version": {"version": self.state.options.version},
            "/openapi.json": {"paths": {path: {} for path in self.state.options.lists}},
            "/v1/models": {"data": [{"max_model_len": 64}]},
            "/health": {},
            "/state": {
                "paused": not self.state.goes_on.is_set(),
                "asleep": self.state.asleep,
                "model": self.state.model,
                "orders": self.state.orders,
            },
            "/is_sleeping": {"is_sleeping": self.state.asleep or not self.state.goes_on.is_set()},
            "/weight_info": {"weight_version": self.state.label},
            "/carried": {"weights": self.state.carried, "buckets": sorted(self.state.buckets)},
        }
        if self.unknown():
            return
        while self.path == "/is_sleeping" and self.state.options.hangs:
            time.sleep(0.02)
        if self.path == "/is_sleeping" and self.state.options.closed:
            self.say(b"there is no such thing", 404)
        elif self.path == "/health" and self.state.options.ill:
            self.say(b"", 503)
        elif self.path == "/metrics":
            self.say(f'vllm:num_requests_running{{engine="0"}} {self.state.running}.0\n'.encode())
        else:
            self.say(json.dumps(answers[self.path]).encode())

    def do_POST(self) -> None:
        """Generate, or change the state."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        path, state = self.path.partition("?")[0], self.state
        if self.unknown():
            return
        if path in ("/sleep", "/wake_up", "/collective_rpc"):
            state.orders.append(self.path)
        if path == "/inference/v1/generate":
            self.write(body["token_ids"], body["sampling_params"])
            return
        if path == "/pause":
            state.goes_on.clear()
        elif path == "/resume":
            state.goes_on.set()
        elif path == "/update_weight_version":
            state.label = body["new_version"]
        elif path in ("/sleep", "/wake_up"):
            state.asleep = path == "/sleep"
        elif path == "/be":
            vars(state.options).update(body)
        elif path in ("/collective_rpc", "/update_weights") and state.options.poor:
            self.say(b"the weights do not fit", 500)
            return
        elif path == "/abort_requests" and state.options.deaf:
            self.say(b"what did you say?", 500)
            return
        elif path == "/update_weights":
            state.carry(body["update_info"]["pieces"], body["update_info"]["where"])
        elif path == "/collective_rpc":
            state.load(Path(body["kwargs"]["weights_path"]))
        self.say(b'{"success": true}')

    def refusal(self, params: dict[str, Any]) -> str:
        """Return vLLM's reason to refuse the request; empty if there is none."""
        options = self.state.options
        if options.return_sampling_mask and not (params["temperature"] > 0 and params["top_k"] > 0):
            return "sampling distribution replay requires top_k > 0"
        if params["logprobs"] > options.max_logprobs:
            asked = f"Requested sample logprobs of {params['logprobs']}"
            return f"{asked}, which is greater than max allowed: {options.max_logprobs}"
        return ""

    def describe(self, token: int, params: dict[str, Any]) -> dict[str, Any]:
        """Return a drawn token with its log-probs and its set. Only the tokens of its set have a probability."""
        likeliest = [{"token_id": token, "logprob": logp_of(token)}]
        if params["logprobs"]:
            others = [(token - 1 - place) % V for place in range(params["logprobs"] - 1)]
            likeliest += [{"token_id": id, "logprob": -9999.0 if place else -1.5} for place, id in enumerate(others)]
        entry = {"token_id": token, "logprob": logp_of(token), "top_logprobs": likeliest}
        mask = [[id for id in set_of(token) if id != token or not self.state.options.astray]]
        return {
            "token_ids": [token],
            "logprobs": {"content": [entry]},
            "sampling_mask": mask if self.state.options.return_sampling_mask else None,
        }

    def write(self, context: list[int], params: dict[str, Any]) -> None:
        """Stream an answer."""
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        if self.refusal(params):
            self.chunk(f"data: {json.dumps({'error': {'message': self.refusal(params)}})}\n\n".encode())
            self.chunk(b"")
            return
        begin, self.state.running = len(context), self.state.running + 1
        try:
            while True:
                self.state.goes_on.wait()
                time.sleep(self.state.options.pace)
                token = next_token(context, self.state.salt)
                context.append(token)
                drawn = len(context) - begin
                ends = "stop" if token in params["stop_token_ids"] else None
                if self.state.options.gives_up and drawn == 3:
                    self.state.options.gives_up -= 1
                    ends = "abort"
                finish = ends or ("length" if drawn == params["max_tokens"] else None)
                span = [{"version": self.state.label, "start": 0, "end": drawn}]
                choice = self.describe(token, params)
                choice |= {"finish_reason": finish, "weight_versions": span if finish else None}
                self.chunk(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                if finish:
                    break
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")
        except OSError:
            self.close_connection = True
        finally:
            self.state.running -= 1

    def unknown(self) -> bool:
        """Refuse a request without the key; return whether it was refused."""
        sent = self.headers.get("authorization", "")
        away = bool(KEY) and self.path.startswith(GUARDED) and sent != f"Bearer {KEY}"
        if away:
            self.say(f"Unauthorized: {sent}".encode(), 401)
        return away

    def chunk(self, data: bytes) -> None:
        """Send a chunk of a body of unknown length."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def say(self, body: bytes, code: int = 200) -> None:
        """Send a whole answer."""
        self.send_response(code)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


class Serving(ThreadingHTTPServer):
    """A server for many connections at once."""

    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    """Serve until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--version", default="0.32.0")
    parser.add_argument("--lists", nargs="*", default=[])
    parser.add_argument("--dies", action="store_true")
    parser.add_argument("--tells", action="store_true")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--poor", action="store_true")
    parser.add_argument("--return-sampling-mask", action="store_true")
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.set_defaults(astray=False, gives_up=0, ill=False, deaf=False, hangs=False, closed=False)
    options, _ = parser.parse_known_args()
    print("a server begins", flush=True)
    if options.tells:
        print(f"args: key='{KEY}'", flush=True)
    if options.child:
        print(f"child {subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid}", flush=True)
    if options.dies:
        print("there is no such kernel", flush=True)
        sys.exit(3)
    Handler.state = State(options)
    Serving(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
