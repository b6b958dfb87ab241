"""The grammars of turns, whose texts a journal stores once each, beside the large sets of tokens.

A grammar of many tools has 20 kB and comes with every turn of an agent. So the stored fields of a turn hold the name of
the text, a hash of its content. Checksums cover the name, and so the text: a reader compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from etude.store.journal.large_sets import NamedSet, set_name

TEXT = 255
"""The first byte of a stored text, where a set has its kind."""
_NAMED = re.compile(r'"grammar":\{"name":"([0-9a-f]{32})"\}')
"""The name in the stored fields. No text within them can look so, since its quotes are escaped."""


def move_grammar_out(fields: dict[str, Any]) -> tuple[NamedSet, ...]:
    """Put the name in place of the text of a turn's grammar, and return the text with it, if there is one."""
    turn = fields["turn"]
    if "grammar" not in turn:
        return ()
    stored = bytes([TEXT]) + turn["grammar"].encode("utf-8", "surrogatepass")
    name = set_name(stored)
    fields["turn"] = turn | {"grammar": {"name": name.hex()}}
    return ((name, stored),)


def grammar_name(body: str) -> bytes | None:
    """Return the name of the grammar in the stored fields of a turn; None if there is none."""
    found = _NAMED.search(body)
    return None if found is None else bytes.fromhex(found[1])


def put_grammar_back(fields: dict[str, Any], named: Mapping[bytes, bytes]) -> None:
    """Put the text of a turn's grammar in place of its name."""
    grammar = fields["turn"].get("grammar")
    if isinstance(grammar, Mapping):
        fields["turn"]["grammar"] = named[bytes.fromhex(grammar["name"])][1:].decode("utf-8", "surrogatepass")
