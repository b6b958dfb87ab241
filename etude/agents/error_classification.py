"""Whose fault it is when an agent raises: its own, or that of the machines it was given, which blames nobody.

The clients of OpenAI and Anthropic, httpx and requests all say in their errors which request came to nothing. One to
the model endpoint that got no answer, or was told to come again, or met a defect, says nothing of the agent. One to
anybody else is the agent's to handle.

Some agents handle all errors, and end well without ever having had an answer. So where nobody listens at the endpoint
once an attempt has ended, what the attempt came to is not believed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from etude.errors import EngineError, IllegalTransitionError, StoreError
from etude.records import Outcome
from etude.store.rollout_queue import AttemptReport

__all__ = ["classify_error", "excuse_if_unreachable"]

BUSY, DEFECT = 429, 500
CONNECT_TIMEOUT = 2.0
"""Seconds that it may take to connect to the endpoint, where it is asked whether somebody is there."""


def classify_error(error: BaseException, resources: Mapping[str, Any]) -> Outcome:
    """What an attempt came to that raised this. resources: what it was given, the endpoint among it."""
    endpoint = resources.get("endpoint")
    root = str(endpoint.get("base_url", "")).removesuffix("/v1") if isinstance(endpoint, Mapping) else ""
    is_infrastructure = any(_is_infrastructure_error(cause, root) for cause in _chain(error))
    return Outcome.INFRA_ERROR if is_infrastructure else Outcome.FAILED


async def excuse_if_unreachable(report: AttemptReport, resources: Mapping[str, Any]) -> AttemptReport:
    """How an attempt ended that was given the model: nobody's failure, and no success, where that is gone."""
    endpoint = resources.get("endpoint")
    has_result = report.outcome in (Outcome.SUCCEEDED, Outcome.FAILED)
    if not has_result or endpoint is None or await _is_reachable(endpoint["base_url"]):
        return report
    return AttemptReport(
        Outcome.INFRA_ERROR, f"The model's endpoint could not be reached. {report.error or ''}".rstrip()
    )


async def _is_reachable(url: str) -> bool:
    """Whether somebody listens there."""
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
    if isinstance(error, EngineError | StoreError):
        return not isinstance(error, IllegalTransitionError)
    request = _read_attribute(error, "request")
    if not root or not str(_read_attribute(request, "url") or "").startswith(f"{root}/"):
        return False
    status = _read_attribute(error, "status_code") or _read_attribute(_read_attribute(error, "response"), "status_code")
    return status is None or status == BUSY or status >= DEFECT


def _read_attribute(value: object, name: str) -> Any:
    """What it says of this, if anything: some raise where they have nothing to say."""
    with suppress(Exception):
        return getattr(value, name, None)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
