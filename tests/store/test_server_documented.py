"""The page on the store over HTTP says what the server does."""

from __future__ import annotations

import re
from pathlib import Path

from etude.store import bounds
from etude.store.client import MOST, RemoteDesk
from etude.store.described import REFUSED
from etude.store.forms import LONGEST_POLL
from etude.store.once import KEPT_S
from etude.store.verbs import VERBS

PAGE = (Path(__file__).parents[2] / "docs" / "store-http.md").read_text(encoding="utf-8")


def test_the_verbs_and_their_keys_are_those_of_the_server() -> None:
    opens = {verb.name: set(verb.opens) for verb in VERBS}
    told = dict(re.findall(r"^\| `(\w+)` \|.*\| ([a-z, ]+) \|$", PAGE, re.MULTILINE))
    assert {name: set(keys.split(", ")) for name, keys in told.items()} == opens


def test_the_statuses_are_those_that_are_described() -> None:
    assert re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE) == sorted(REFUSED)


def test_the_numbers_are_those_of_the_code() -> None:
    patience = RemoteDesk.__init__.__kwdefaults__["patience_s"]
    assert f"`patience_s`, {patience:.0f} seconds" in PAGE and KEPT_S == 120 and "for two minutes" in PAGE
    assert f"more than {bounds.BODY_BYTES >> 20} MiB" in PAGE and f"within {bounds.BODY_S:.0f} seconds" in PAGE
    assert f"at most {MOST} rollouts" in PAGE and f"at most {LONGEST_POLL:.0f} seconds" in PAGE
