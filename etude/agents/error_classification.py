"""The cause of an agent's error: the agent itself, or the infrastructure, which does not count as the agent's failure.

The errors of OpenAI's and Anthropic's clients, httpx and requests name the request that failed. The agent is not at
fault if that request went to the model endpoint and got no response, a 429, or a server error. The agent has to handle
the failure of any other request. Nor is it at fault if the process of a hub's environment ended.

Some agents handle all errors, and succeed without a single answer. So if the endpoint is unreachable when an attempt
ends, its outcome does not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from etude.errors import EngineError, EnvError, GuestLostError, IllegalTransitionError, StoreError
from etude.records import Outcome
from etude.store.queue.rollout_queue import AttemptReport

BUSY, DEFECT = 429, 500
CONNECT_TIMEOUT = 2.0
"""Seconds for a connection to the endpoint, when its reachability is tested."""


def classify_error(error: BaseException, resources: Mapping[str, Any]) -> Outcome:
    """Return the outcome of an attempt that raised this error. resources: those of the claim, the endpoint among
    them."""
    endpoint = resources.get("endpoint")
    root = str(endpoint.get("base_url", "")).removesuffix("/v1") if isinstance(endpoint, Mapping) else ""
    is_infrastructure = any(_is_infrastructure_error(cause, root) for cause in _chain(error))
    return Outcome.INFRA_ERROR if is_infrastructure else Outcome.FAILED


async def excuse_if_unreachable(report: AttemptReport, resources: Mapping[str, Any]) -> AttemptReport:
    """Return the report of an attempt that called the model, or an infrastructure error if the endpoint is unreachable
    now."""
    endpoint = resources.get("endpoint")
    has_result = report.outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
    if not has_result or endpoint is None or await _is_reachable(endpoint["base_url"]):
        return report
    return AttemptReport(Outcome.INFRA_ERROR, f"The model endpoint could not be reached. {report.error or ''}".rstrip())


async def _is_reachable(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(parts.hostname, port)
        writer.close()
    except (OSError, TimeoutError):
        return False
    return True


def _is_infrastructure_error(error: BaseException, root: str) -> bool:
    if isinstance(error, EngineError | StoreError | EnvError | GuestLostError):
        return not isinstance(error, IllegalTransitionError)
    request = _read_attribute(error, "request")
    if not root or not str(_read_attribute(request, "url") or "").startswith(f"{root}/"):
        return False
    status = _read_attribute(error, "status_code") or _read_attribute(_read_attribute(error, "response"), "status_code")
    return status is None or status == BUSY or status >= DEFECT


def _read_attribute(value: object, name: str) -> Any:
    """Return an attribute, or None: some properties raise where they have no value."""
    with suppress(Exception):
        return getattr(value, name, None)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
