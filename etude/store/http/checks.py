"""The check of a request, from the signature of its verb: no unknown field, no text in place of a number, no NaN.

pydantic checks the plain values of a body, and the codec that a client uses (`forms`) makes the arguments of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Union, get_args, get_origin

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from etude.errors import DataError
from etude.store.http.forms import FORMS, LISTS, MAPPINGS, columns_of, decode_arguments, union_of
from etude.store.http.responses import UnreadableError
from etude.store.queue.bounds import Bounds
from etude.store.queue.rollout_queue import RolloutQueue
from etude.store.queue.verbs import Arguments, Verb, verbs_of

VERBS = verbs_of(RolloutQueue)
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Call(NamedTuple):
    """A call of a verb, with arguments that are checked."""

    verb: Verb
    arguments: Arguments


@cache
def plain_type(kind: Any, strict: bool) -> Any:
    """Return the type of the plain values of a type, for pydantic. strict: refuse other fields than those of it."""
    if kind in FORMS:
        return plain_type(FORMS[kind].plain, strict)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        bounds = [Field(**_named(each)) for each in args[1:] if isinstance(each, Bounds)]
        return annotated(plain_type(args[0], strict), *bounds)
    if origin in (Union, UnionType):
        return _plain_union(args, strict)
    if origin in LISTS:
        return list_of(plain_type(args[0], strict))
    if origin in MAPPINGS:
        return dict[plain_type(args[0], strict), plain_type(args[1], strict)]  # type: ignore[misc]
    columns = columns_of(kind)
    if columns is None:
        return kind
    members = {each.name: (each.kind, each.is_optional and strict) for each in columns}
    return _object(kind.__name__, kind.__doc__, members, strict)


def annotated(kind: Any, *rules: FieldInfo) -> Any:
    """Return a type with rules that pydantic follows."""
    return Annotated[(kind, *rules)]


def list_of(kind: Any) -> Any:
    """Return the type of a list of these."""
    return list[kind]


def _plain_union(args: Sequence[Any], strict: bool) -> Any:
    """Return the union of plain types. Several types may have one form together."""
    kinds = [each for each in args if each is not type(None)]
    together = union_of(kinds)
    parts = [plain_type(each, strict) for each in ([together] if together in FORMS else kinds)]
    return union_of([*parts, *(each for each in args if each is type(None))])


def _named(bounds: Bounds) -> dict[str, Any]:
    return {name: bound for name, bound in asdict(bounds).items() if bound is not None}


def _object(name: str, text: str | None, members: Mapping[str, tuple[Any, bool]], strict: bool) -> Any:
    """Return the type of an object. members: the type of each, and whether it may be left out."""
    types = {
        member: NotRequired[plain_type(kind, strict)] if may_lack else plain_type(kind, strict)
        for member, (kind, may_lack) in members.items()
    }
    return object_type(name, text, types, strict)


def object_type(name: str, text: str | None, types: Mapping[str, Any], strict: bool) -> Any:
    """Return the type of an object with these members."""
    make: Any = TypedDict
    made = make(name, types)
    made.__doc__ = text
    made.__pydantic_config__ = STRICT if strict else ConfigDict()
    return made


@cache
def request_type(verb: Verb, *, in_batch: bool = False) -> Any:
    """Return the type of the body that calls a verb. in_batch: with the verb's name, for a list of several."""
    members = {name: (kind, name in verb.defaults) for name, kind in verb.parameters.items()}
    if in_batch:
        return _object(f"{verb.name}_write", verb.text, {"verb": (Literal[verb.name], False)} | members, True)
    return _object(f"{verb.name}_request", verb.text, members, True)


@cache
def reply_type(verb: Verb) -> Any:
    """Return the type of the body of a reply."""
    return _object(f"{verb.name}_reply", "The result, as `reply`.", {"reply": (verb.reply, False)}, False)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_body(kind: Any, body: bytes) -> Any:
    """Return the plain values of a body that has this type; raise an error that says what is wrong."""
    try:
        return _adapter(kind).validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if problem["type"] == "json_invalid":
            hint = " Remove or replace an unpaired surrogate in its text." if "hex escape" in problem["msg"] else ""
            raise UnreadableError(f"The body is not JSON: {problem['msg']}.{hint}") from None
        raise DataError(_describe(error)) from None


def read_call(verb: Verb, body: bytes) -> Call:
    """Return the call in the body of a request."""
    return make_call(verb, read_body(request_type(verb), body))


def make_call(verb: Verb, fields: Mapping[str, Any]) -> Call:
    """Return the call of a verb with plain values that were checked."""
    return Call(verb, decode_arguments(verb, fields))


def _describe(error: ValidationError) -> str:
    """Return the first problems of a request that is not valid, as a sentence."""
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    message = "; ".join(
        f"{'.'.join(map(str, problem['loc'])) or 'the body'}: {problem['msg']}" for problem in problems[:5]
    )
    more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
    return f"The body is not valid: {message}{more}."
