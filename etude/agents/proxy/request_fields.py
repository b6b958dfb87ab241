"""The fields of a request, and the rules by which each is followed, ignored or refused.

Each dialect has one table of rules. The run decides how answers are sampled, so a field about sampling is accepted
without effect: the response names it in the header `x-etude-ignored`. A strict endpoint refuses it. A field that is in
no table is treated the same. A field that is part of the conversation is either followed or refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from etude.agents.proxy.request import APIDialect, APIError, FindAnswer, JSONObject, ModelRequest

Treatment: TypeAlias = Literal["obeyed", "sampling", "accepted", "ignored", "refused"]
"""obeyed: the answer follows it. sampling: the run's own value holds, unless the endpoint's `parameters` are `default`.
accepted: no answer depends on it. ignored: the answer does not follow it, and a strict endpoint refuses it. refused:
the conversation would lose its meaning without it."""
HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""The names that a header can show."""
MAX_NAMES = 32
"""The most ignored names that are kept for one request."""


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The treatment of one field."""

    treatment: Treatment
    reason: str = ""
    """The end of the sentence that refuses it, after the field's name."""
    neutral: tuple[Any, ...] = ()
    """Values without effect."""


FieldRules: TypeAlias = Mapping[str, FieldRule]
OBEYED = FieldRule("obeyed")
SAMPLING = FieldRule("sampling")
ACCEPTED = FieldRule("accepted")
UNKNOWN = FieldRule("ignored", "is not supported by this endpoint; leave it out.")


def field_rules(*, obeyed: str, sampling: str, accepted: str, others: FieldRules) -> FieldRules:
    """Return a table from three lists of names, and the rules with a reason."""
    lists = (obeyed, OBEYED), (sampling, SAMPLING), (accepted, ACCEPTED)
    return {name: rule for names, rule in lists for name in names.split()} | dict(others)


def ignored(reason: str, *neutral: Any) -> FieldRule:
    """Return the rule of a field that answers do not follow."""
    return FieldRule("ignored", reason, neutral)


def refused(reason: str, *neutral: Any) -> FieldRule:
    """Return the rule of a field without which the conversation would lose its meaning."""
    return FieldRule("refused", reason, neutral)


class IgnoredFields:
    """The fields of one request that the answer does not follow."""

    def __init__(self, table: FieldRules | None = None, *, strict: bool = False) -> None:
        self.table = table or {}
        self.strict = strict
        self._names: dict[str, None] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, each once."""
        return tuple(self._names)

    def add(self, name: str) -> None:
        """Add a field or a part."""
        if len(self._names) < MAX_NAMES:
            self._names[name if HEADER_NAME.fullmatch(name) else "another"] = None

    def drop(self, name: str, refusal: APIError) -> None:
        """Add a part that is left out. A strict endpoint refuses the request instead."""
        if self.strict:
            raise refusal
        self.add(name)


class RequestFields:
    """The fields of a request. The parser takes fields one by one; the rules apply to the rest. A null counts as
    absent."""

    def __init__(self, body: Any, where: str = "", ignored_fields: IgnoredFields | None = None) -> None:
        if not isinstance(body, Mapping):
            raise APIError(f"{where or 'The body'} must be a JSON object; it is {_kind(body)}.", param=where or None)
        self.sent: JSONObject = body
        """All fields, as they were sent."""
        self._body = {name: value for name, value in body.items() if value is not None}
        self._where = f"{where}." if where else ""
        self.ignored_fields = ignored_fields or IgnoredFields()

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def path(self, name: str) -> str:
        """Return the name of a field, with those of the objects that it is in."""
        return f"{self._where}{name}"

    def error(self, name: str, reason: str, code: str | None = None) -> APIError:
        """Return an error about this field."""
        return APIError(f"'{self.path(name)}' {reason}", param=self.path(name), code=code)

    def value(self, name: str) -> Any:
        """Take any value; None if it is absent."""
        return self._body.pop(name, None)

    def string(self, name: str, default: str | None = None) -> str:
        """Take a string. Without a default it is required."""
        return str(self._typed(name, str, "a string", default))

    def boolean(self, name: str, default: bool = False) -> bool:
        """Take a boolean."""
        return bool(self._typed(name, bool, "a boolean", default))

    def array(self, name: str, *, required: bool = False) -> list[Any]:
        """Take a list; an empty one if it is absent and not required."""
        return list(self._typed(name, list, "a list", None if required else []))

    def integer(self, name: str, low: int, high: int, hint: str = "") -> int | None:
        """Take an integer within bounds; None if it is absent. hint: a last sentence for the error, after a space."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be an integer from {low} to {high}; it is {_brief(value)}.{hint}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """Take a number within bounds; None if it is absent."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}; it is {_brief(value)}.")
        return float(value)

    def strings(self, name: str, max_items: int) -> tuple[str, ...]:
        """Take one string or a list of strings."""
        value = self.value(name)
        items = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(items, list) or len(items) > max_items or not all(isinstance(item, str) for item in items):
            raise self.error(name, f"must be a string or a list of at most {max_items} strings; it is {_brief(value)}.")
        return tuple(item for item in items if item)

    def section(self, name: str) -> Self:
        """Take the fields of an object; none if it is absent."""
        return self.nested(self.value(name) or {}, f"{self._where}{name}")

    def nested(self, body: Any, where: str) -> Self:
        """Return the fields of a part of this request."""
        return type(self)(body, where, self.ignored_fields)

    def require(self, name: str, *values: Any, reason: str) -> None:
        """Take a field that may only have these values."""
        value = self.value(name)
        if value is not None and value not in values:
            raise self.error(name, reason)

    def apply_rules(self) -> tuple[str, ...]:
        """Apply the rules to the fields that were not taken; return all names that the answer does not follow."""
        for name, value in self._body.items():
            path = f"{self._where}{name}"
            # a dot in a table's name means a nested object
            rule = self.ignored_fields.table.get(path, UNKNOWN) if "." not in name else UNKNOWN
            assert rule.treatment not in ("obeyed", "sampling"), f"the dialect does not read {path}"
            if value in rule.neutral:
                continue
            if rule.treatment == "refused" or (rule.treatment == "ignored" and self.ignored_fields.strict):
                raise self.error(name, rule.reason, "unsupported_parameter")
            self.ignored_fields.add(path)
        return self.ignored_fields.names

    def _typed(self, name: str, kind: type, description: str, default: Any) -> Any:
        value = self.value(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing.", "missing_required_parameter")
            return default
        if not isinstance(value, kind):
            raise self.error(name, f"must be {description}; it is {_brief(value)}.")
        return value


def parse_request(
    dialect: APIDialect, body: JSONObject, find_answer: FindAnswer, *, strict: bool = False
) -> ModelRequest:
    """Parse a request by its dialect, and note the fields that the answer does not follow. strict: refuse those."""
    fields = RequestFields(body, ignored_fields=IgnoredFields(dialect.rules, strict=strict))
    request = dialect.parse(fields, find_answer)
    return replace(request, ignored=fields.apply_rules())


def nonzero_penalties(fields: RequestFields, *names: str) -> tuple[str, ...]:
    """Return those of these penalties that are not 0."""
    return tuple(name for name in names if fields.number(name, -2, 2))


def parse_sampling(fields: RequestFields) -> dict[str, Any]:
    """Take the sampling parameters that OpenAI's older dialects share, and those that servers of open models add."""
    numbers: dict[str, Callable[[str], Any]] = {
        "temperature": lambda name: fields.number(name, 0, 2),
        "top_p": lambda name: fields.number(name, 1e-9, 1),
        "min_p": lambda name: fields.number(name, 0, 1),
        "repetition_penalty": lambda name: fields.number(name, 1e-3, 1e3),
        "min_tokens": lambda name: fields.integer(name, 0, 2**31 - 1),
        "seed": lambda name: fields.integer(name, -(2**63), 2**63 - 1),
    }
    parameters = {name: value for name, read in numbers.items() if (value := read(name)) is not None}
    top_k = fields.integer("top_k", -1, 2**31 - 1)
    if top_k is not None:
        parameters["top_k"] = max(top_k, 0)
    if stop := fields.strings("stop", 16):
        parameters["stop"] = stop
    stop_ids = fields.array("stop_token_ids")
    if any(isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < 2**31 for id in stop_ids):
        raise fields.error("stop_token_ids", "must be a list of token ids.")
    bias = _bias(fields)
    return parameters | ({"stop_ids": tuple(stop_ids)} if stop_ids else {}) | ({"logit_bias": bias} if bias else {})


def _bias(fields: RequestFields) -> dict[int, float]:
    biases = fields.value("logit_bias") or {}
    try:
        bias = {int(id): float(amount) for id, amount in biases.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        bias = {-1: 0.0}
    if not all(0 <= id < 2**31 and math.isfinite(amount) for id, amount in bias.items()):
        raise fields.error("logit_bias", "must be an object that maps token ids to numbers.")
    return {id: amount for id, amount in bias.items() if amount}


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else _kind(value)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")
