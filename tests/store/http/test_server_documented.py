"""The page on the store over HTTP agrees with the server."""

from __future__ import annotations

import re
from pathlib import Path

from etude.store.http import request_limits as bounds
from etude.store.http.checks import VERBS
from etude.store.http.openapi import ERROR_RESPONSES
from etude.store.http.remote_queue import RemoteRolloutQueue
from etude.store.http.reply_cache import REPLY_TTL_S
from etude.store.queue.bounds import LONGEST_POLL_S, MAX_ITEMS

PAGE = (Path(__file__).parents[3] / "docs" / "reference/store-http.md").read_text(encoding="utf-8")


def test_the_requests_and_their_keys_are_those_of_the_server() -> None:
    opens = {name: set(verb.rules.scopes) for name, verb in VERBS.items()}
    documented = dict(re.findall(r"^\| `(\w+)` \|.*\| ([a-z, ]+) \|$", PAGE, re.MULTILINE))
    assert {name: set(keys.split(", ")) for name, keys in documented.items()} == opens


def test_the_statuses_are_those_that_are_described() -> None:
    assert re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE) == sorted(ERROR_RESPONSES)


def test_the_numbers_are_those_of_the_code() -> None:
    patience = RemoteRolloutQueue.__init__.__kwdefaults__["patience_s"]
    assert f"`patience_s`, {patience:.0f} seconds" in PAGE and REPLY_TTL_S == 120 and "for two minutes" in PAGE
    assert f"more than {bounds.BODY_BYTES >> 20} MiB" in PAGE and f"within {bounds.BODY_S:.0f} seconds" in PAGE
    assert f"at most {MAX_ITEMS} rollouts" in PAGE and f"at most {LONGEST_POLL_S:.0f} seconds" in PAGE
