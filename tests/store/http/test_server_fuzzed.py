"""Random requests by the OpenAPI description: the server answers each as described and never with 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from etude.store.http.openapi import build_openapi
from tests.store.http.served import Served, served

pytestmark = pytest.mark.slow  # its plug-in takes a second to load
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
PATHS, _ = build_openapi()
WAITS = ("timeout_s", "wait_s")


@pytest.fixture(scope="module")
def store() -> Iterator[Served]:
    with served() as made:
        made.claimed(3)
        yield made


@pytest.fixture(scope="module")
def schema(store: Served) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", store.app)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", sorted(PATHS))
def test_random_requests_are_answered_as_described(
    store: Served, schema: schemathesis.BaseSchema, path: str, mode: GenerationMode
) -> None:
    (method,) = PATHS[path]
    if method == "get" and mode is GenerationMode.NEGATIVE:
        return  # the body has nothing that could be wrong

    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=5, suppress_health_check=list(HealthCheck))
    def sent(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):  # requests must not wait long for events that do not happen
            attempt = case.body.get("attempt")
            for holder in (case.body, attempt if isinstance(attempt, dict) else {}):
                for name in ("rollout", "attempt"):  # some of them exist
                    if isinstance(holder.get(name), int):
                        holder[name] %= 3
            case.body |= {name: 0.01 for name in WAITS if isinstance(case.body.get(name), int | float)}
        case.call_and_validate(headers={"authorization": f"Bearer {store.keyring.admin}"}, checks=CHECKS)

    sent()
