"""The words of a search over rollouts: `reward<0.2 tool:search error:timeout "some text"`.

Each word is a condition, and a rollout is found if all of them hold. `-` before a word turns it around.

    WORD, "SEVERAL WORDS"    The prompt or an answer contains it.
    reward<0.2               A number (`NUMBERS`), with <, <=, >, >= or =. `reward/NAME` is a part of the reward.
    error:timeout            A text (`TEXTS`) contains it. Quotes hold spaces: error:"timed out".
    outcome:failed           One of a few values (`VALUES`).

Upper and lower case are the same.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from etude.errors import ConfigError
from etude.store import Status

NUMBERS = ("reward", "tokens", "turns", "attempts", "step", "task", "row", "rollout")
TEXTS = ("text", "prompt", "answer", "observation", "error", "tool", "tag", "source")
VALUES: Mapping[str, tuple[str, ...]] = {
    "outcome": tuple(status.value for status in Status),
    "batch": ("yes", "no"),
    "truncated": ("yes", "no"),
    "use": ("training", "evaluation"),
}
MOST_CONDITIONS = 20
PART = "reward/"
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}
_WITHOUT_VALUE = re.compile(r"([A-Za-z][\w/.-]*)?[-<>=:]+")
_WORD = re.compile(r'(-?)(?:([A-Za-z][\w/.-]*)(<=|>=|[<>=:]))?(?:"([^"]*)"|([^\s"]+))(?!\S)')


@dataclass(frozen=True)
class Condition:
    """One word of a search."""

    name: str
    operator: str
    """`:` for a text or a value, else the comparison of a number."""
    text: str
    """The text in lower case."""
    number: float = 0.0
    negated: bool = False

    def holds_for(self, value: float | None) -> bool:
        """Return True if the comparison holds for a number; None is no number."""
        return value is not None and _OPERATORS[self.operator](value, self.number)


def parse_search(query: str) -> list[Condition]:
    """Return the conditions of a search."""
    conditions: list[Condition] = []
    at = 0
    while rest := query[at:].lstrip():
        at = len(query) - len(rest)
        found = _WORD.match(query, at)
        if found is None:
            raise ConfigError(
                f'The search cannot read `{rest.split()[0]}`. Close each `"` with another one, and leave a space after '
                'it: `reward<0.2 error:"timed out" "some text"`.'
            )
        sign, name, sign_between, quoted, plain = found.groups()
        text = plain if quoted is None else quoted
        conditions.append(_condition(name, sign_between, text, negated=bool(sign), word=found[0]))
        at = found.end()
    if len(conditions) > MOST_CONDITIONS:
        raise ConfigError(f"The search has {len(conditions)} words. Use at most {MOST_CONDITIONS}.")
    return conditions


def _condition(name: str | None, sign: str | None, text: str, *, negated: bool, word: str) -> Condition:
    """Return a condition, or refuse a name, a value or a number that does not exist."""
    if name is None or sign is None:
        alone = None if word.endswith('"') else _WITHOUT_VALUE.fullmatch(text)
        if alone is not None and (alone[1] is None or _is_known(alone[1])):
            raise ConfigError(
                f"The search has `{word}` with nothing after it. Add a value, as in `reward<0.2`, `tool:search` or "
                f'`-error:timeout`, or put a text into quotes: `"{word}"`.'
            )
        return Condition("text", ":", text.lower(), negated=negated)
    if name in VALUES or (name in TEXTS and sign == ":"):
        known = VALUES.get(name, ())
        if known and (text.lower() not in known or sign not in ":="):
            raise ConfigError(f"The search has `{word}`. `{name}:` takes one of {', '.join(known)}.")
        return Condition(name, ":", text.lower(), negated=negated)
    if not _is_known(name) or name in TEXTS:
        raise ConfigError(
            f"The search has `{word}`, and knows no `{name}`. It knows {', '.join((*NUMBERS, *TEXTS, *VALUES))}. Put a "
            f'text into quotes: `"{word}"`.'
        )
    try:  # the ids of evaluations are exact as integers only, and all of them are smaller than 2^63
        number = min(int(text), 2**63) if text.isdecimal() else float(text)
        return Condition(name, "=" if sign == ":" else sign, "", number, negated)
    except ValueError:
        raise ConfigError(
            f"The search has `{word}`, and `{text}` is no number. Compare `{name}` with a number: `{name}<0.2`."
        ) from None


def _is_known(name: str) -> bool:
    return name in (*NUMBERS, *TEXTS, *VALUES) or (name.startswith(PART) and name != PART)
