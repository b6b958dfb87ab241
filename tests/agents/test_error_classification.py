"""The classification of client errors, with real clients and a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest
import requests

from etude.agents.error_classification import classify_error
from etude.errors import EngineError, IllegalTransitionError
from etude.records import Outcome
from tests.agents.sdks import anthropic, openai

DEAD = "http://127.0.0.1:1"
BLAMELESS = Outcome.INFRA_ERROR


class Answers(BaseHTTPRequestHandler):
    """A server that answers with the status in the path."""

    def do_POST(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def by_openai(base: str) -> None:
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0)
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])


def by_anthropic(base: str) -> None:
    client = anthropic.Anthropic(base_url=base, api_key="k", max_retries=0)
    client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "a"}])


def by_httpx(base: str) -> None:
    httpx2.post(f"{base}/v1/completions", json={}).raise_for_status()


def by_requests(base: str) -> None:
    requests.post(f"{base}/v1/completions", json={}, timeout=5).raise_for_status()


def blamed(call: Callable[[str], None], called_url: str, endpoint_url: str) -> Outcome:
    """Return the outcome of a call to one address, if the endpoint has another."""
    with pytest.raises(Exception) as raised:
        call(called_url)
    return classify_error(raised.value, {"endpoint": {"base_url": f"{endpoint_url}/v1", "model": "policy"}})


@pytest.mark.parametrize("call", [by_openai, by_anthropic, by_httpx, by_requests])
def test_a_failure_of_the_endpoint_is_an_infrastructure_error(call: Callable[[str], None], root: str) -> None:
    assert blamed(call, DEAD, DEAD) is BLAMELESS
    for status in (429, 500, 503):
        assert blamed(call, f"{root}/{status}", f"{root}/{status}") is BLAMELESS
    for status in (400, 403, 404):
        assert blamed(call, f"{root}/{status}", f"{root}/{status}") is Outcome.FAILED


@pytest.mark.parametrize("call", [by_openai, by_anthropic, by_httpx, by_requests])
def test_a_failure_of_another_server_counts_against_the_agent(call: Callable[[str], None], root: str) -> None:
    assert blamed(call, DEAD, root) is Outcome.FAILED
    assert blamed(call, f"{root}/503", DEAD) is Outcome.FAILED


def test_errors_of_etude_and_errors_raised_from_them() -> None:
    error = RuntimeError("my own words")
    error.__cause__ = EngineError("the engine died")
    assert classify_error(error, {}) is BLAMELESS
    assert classify_error(IllegalTransitionError("it is over"), {}) is Outcome.FAILED
    assert classify_error(ValueError("mine"), {"endpoint": "what is no address"}) is Outcome.FAILED
