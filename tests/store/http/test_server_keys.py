"""The access of every kind of key to every route."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from etude.store.http.checks import VERBS
from etude.store.http.forms import encode_turn
from etude.store.queue.keys import Keyring
from etude.store.queue.rollout_queue import AttemptId
from tests.store.http.served import Served, served
from tests.store.made import turn

KEYS = ("none", "garbage", "another store's", "expired", "model", "another attempt's", "reward", "runner", "admin")
STRANGERS = ("none", "garbage", "another store's", "expired")
OPENS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("enqueue", "cancel", "wait", "find", "notes", "record_turn", "put_resource"), ("admin",)),
    **dict.fromkeys(("acquire_lease", "seal", "history", "put_images", "runners", "statistics"), ("admin",)),
    **dict.fromkeys(("claim", "heartbeat", "ready", "finish", "turns", "get_images"), ("admin", "runner")),
    "get_resource": ("admin", "runner"),
    **dict.fromkeys(("record_reward", "record_note"), ("admin", "runner", "reward")),
}
"""The keys that open each request, written a second time, so that no change happens by mistake."""


@pytest.fixture(scope="module")
def store() -> Iterator[Served]:
    with served() as made:
        yield made


def keys_of(keyring: Keyring, key: AttemptId) -> dict[str, str | None]:
    return {
        "none": None,
        "garbage": "etude.admin.AAAA",
        "another store's": Keyring("another-secret,-not-this-one").admin,
        "expired": keyring.reward_key(key, -10.0),
        "model": keyring.model_key(key, 60.0),
        "another attempt's": keyring.reward_key(AttemptId(key.rollout, key.attempt + 1), 60.0),
        "reward": keyring.reward_key(key, 60.0),
        "runner": keyring.runner,
        "admin": keyring.admin,
    }


def body_of(verb: str, key: AttemptId) -> dict[str, Any]:
    """Return a valid body of each verb, which would be executed if the key allowed it."""
    own = {"attempt": key._asdict()}
    bodies: dict[str, dict[str, Any]] = {
        "enqueue": {"wanted": []},
        "cancel": {"rollouts": [], "why": "not needed"},
        "acquire_lease": {"owner": {"run": "a run", "where": "its directory"}},
        "seal": {"rollouts": []},
        "history": {"rollout": key.rollout},
        "turns": {"rollout": key.rollout},
        "notes": {"rollout": key.rollout},
        "claim": {"runner": "another"},
        "heartbeat": {"runner": "runner", "running": [key._asdict()]},
        "ready": own,
        "finish": own | {"report": {"outcome": "succeeded"}},
        "record_reward": own | {"reward": 0.5, "turn": 0},
        "record_note": own | {"name": "seen"},
        "record_turn": own | {"turn": encode_turn(turn())},
        "put_images": {"contents": []},
        "get_images": {"digests": []},
        "put_resource": {"name": "prompt", "value": 1},
        "get_resource": {"name": "prompt"},
    }
    return bodies.get(verb, {"query": {}} if verb == "find" else {})


def wanted(verb: str, key: str) -> int:
    if key in STRANGERS:
        return 401
    return 200 if key in OPENS[verb] else 403


@pytest.mark.parametrize("verb", VERBS)
def test_every_key_opens_what_it_is_for_and_nothing_else(store: Served, verb: str) -> None:
    (claim,) = store.claimed()
    assert store.verb("record_turn", body_of("record_turn", claim.attempt_id)).status_code == 200
    assert store.verb("put_resource", body_of("put_resource", claim.attempt_id)).status_code == 200
    keys = keys_of(store.keyring, claim.attempt_id)
    assert tuple(keys) == KEYS
    for name, key in keys.items():
        answer = store.ask(f"/v1/store/{verb}", body_of(verb, claim.attempt_id), key)
        assert answer.status_code == wanted(verb, name), (name, answer.text)
        assert ("www-authenticate" in answer.headers) == (answer.status_code == 401)
        if answer.status_code in (401, 403):
            assert answer.json()["error"]["kind"] == "InvalidKeyError"


def test_each_write_of_a_batch_is_checked_against_the_key(store: Served) -> None:
    names = [verb for verb in OPENS if verb in ("ready", "record_reward", "record_note", "record_turn", "finish")]
    for name in KEYS:
        (claim,) = store.claimed()
        store.verb("record_turn", body_of("record_turn", claim.attempt_id))
        key = keys_of(store.keyring, claim.attempt_id)[name]
        body = {"writes": [{"verb": verb} | body_of(verb, claim.attempt_id) for verb in names]}
        answer = store.ask("/v1/store/batch", body, key)
        if name in STRANGERS or name == "model":
            assert answer.status_code == (403 if name == "model" else 401)
            continue
        statuses = [reply.get("status", 200) for reply in answer.json()["replies"]]
        assert statuses == [wanted(verb, name) for verb in names], name


def test_spans_are_taken_from_an_attempt_and_from_the_admin(store: Served) -> None:
    (claim,) = store.claimed()
    for name, key in keys_of(store.keyring, claim.attempt_id).items():
        answer = store.ask("/v1/traces", {"resourceSpans": []}, key, content_type="application/json")
        # The key of another attempt notes its spans on that attempt.
        accepted = name in ("admin", "reward", "another attempt's")
        assert answer.status_code == (401 if name in STRANGERS else 200 if accepted else 403), name


def test_routes_without_data_of_a_run_need_no_key(store: Served) -> None:
    for path in ("/healthz", "/openapi.json"):
        assert store.ask(path, method="GET").status_code == 200
    for header in ("Basic YTpi", "Bearer", "Bearer  ", store.keyring.admin):
        assert store.ask("/v1/store/statistics", {}, authorization=header).status_code == 401


def test_every_route_is_in_the_matrix(store: Served) -> None:
    """A new route must be described, and is tried with every key."""
    paths = set(store.ask("/openapi.json", method="GET").json()["paths"])
    assert paths == {f"/v1/store/{verb}" for verb in (*OPENS, "batch")} | {"/v1/traces", "/healthz"}
