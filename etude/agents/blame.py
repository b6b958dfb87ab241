"""Whose fault it is when an agent raises: its own, or that of the machines it was given, which blames nobody.

The clients of OpenAI and Anthropic, httpx and requests all say in their errors which request came to nothing. One to
the model endpoint that got no answer, or was told to come again, or met a defect, says nothing of the agent. One to
anybody else is the agent's to handle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from etude.errors import EngineError, IllegalMoveError, StoreError
from etude.records import Outcome

__all__ = ["outcome_of"]

BUSY, DEFECT = 429, 500


def outcome_of(error: BaseException, resources: Mapping[str, Any]) -> Outcome:
    """What an attempt came to that raised this. resources: what it was given, the endpoint among it."""
    endpoint = resources.get("endpoint")
    root = str(endpoint.get("base_url", "")).removesuffix("/v1") if isinstance(endpoint, Mapping) else ""
    ours = any(_of_machines(each, root) for each in _chain(error))
    return Outcome.INFRA_ERROR if ours else Outcome.FAILED


def _of_machines(error: BaseException, root: str) -> bool:
    if isinstance(error, EngineError | StoreError):
        return not isinstance(error, IllegalMoveError)
    request = _told(error, "request")
    if not root or not str(_told(request, "url") or "").startswith(f"{root}/"):
        return False
    status = _told(error, "status_code") or _told(_told(error, "response"), "status_code")
    return status is None or status == BUSY or status >= DEFECT


def _told(thing: object, name: str) -> Any:
    """What it says of this, if anything: some raise where they have nothing to say."""
    with suppress(Exception):
        return getattr(thing, name, None)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__
