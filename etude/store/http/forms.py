"""The form of each value in a request or a reply, as plain JSON values, from its type.

Both ends use it. A runner imports it at its start, so it imports no library that checks values: the server does that
(`checks`). A record is an object of its fields. `FORMS` has the types with another form.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

from etude.errors import DataError, StoreError
from etude.images import ImageSpan
from etude.records import Completion, Task, Turn
from etude.store.journal.blobs import pack_turn, unpack_turn
from etude.store.journal.event_records import EventRecord, decode, encode_whole
from etude.store.journal.events import TURN_FIELDS, Event
from etude.store.journal.json_values import check_finite, to_json, to_json_value
from etude.store.queue.bounds import Bounds, Id, Number
from etude.store.queue.records import Reward
from etude.store.queue.verbs import Arguments, Verb

Convert: TypeAlias = Callable[[Any], Any]
LISTS = (list, tuple, Sequence)
MAPPINGS = (dict, Mapping)


class Codec(NamedTuple):
    """The conversions of a type to plain values and back. None leaves a value as it is."""

    encode: Convert | None
    decode: Convert | None


class Form(NamedTuple):
    """A form that does not follow from the type: its conversions, and the type of the plain values."""

    codec: Codec
    plain: Any


class Column(NamedTuple):
    """A field of a record: its name, its type, and whether it may be left out."""

    name: str
    kind: Any
    is_optional: bool


def columns_of(kind: Any) -> list[Column] | None:
    """Return the fields of a dataclass or a named tuple; None for any other type."""
    if is_dataclass(kind):
        optional = {
            each.name: each.default is not MISSING or each.default_factory is not MISSING for each in fields(kind)
        }
    elif isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        optional = {name: name in kind._field_defaults for name in kind._fields}  # type: ignore[attr-defined]
    else:
        return None
    hints = get_type_hints(kind, include_extras=True)
    return [Column(name, hints[name], may_lack) for name, may_lack in optional.items()]


def union_of(kinds: Sequence[Any]) -> Any:
    """Return the union of some types."""
    return Union.__getitem__(tuple(kinds))


@cache
def codec(kind: Any, where: str = "") -> Codec:
    """Return how a value of a type becomes plain JSON values, and back. where: its name in errors."""
    if kind in FORMS:
        return FORMS[kind].codec
    if kind is Any:
        return Codec(lambda value: to_json_value(value, where), None)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return codec(args[0], where)
    if origin in (Union, UnionType):
        return _optional_codec(args, where)
    if origin in LISTS:
        return _list_codec(origin, codec(args[0], where))
    if origin in MAPPINGS:
        return _mapping_codec(args[1], where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Codec(None, kind)
    columns = columns_of(kind)
    return Codec(None, None) if columns is None else _record_codec(kind, columns)


def _optional_codec(args: tuple[Any, ...], where: str) -> Codec:
    """Return the codec of a type that may be None. Of several other types, `FORMS` has the form."""
    inner = [each for each in args if each is not type(None)]
    rest = union_of(inner)
    write, read = codec(rest, where) if len(inner) == 1 or rest in FORMS else Codec(None, None)
    return Codec(
        None if write is None else lambda value: None if value is None else write(value),
        None if read is None else lambda value: None if value is None else read(value),
    )


def _list_codec(origin: Any, item: Codec) -> Codec:
    make = tuple if origin is tuple else list
    write, read = item
    return Codec(
        list if write is None else lambda value: [write(each) for each in value],
        make if read is None else lambda value: make(read(each) for each in value),
    )


def _mapping_codec(item: Any, where: str) -> Codec:
    if item is Any:
        return Codec(lambda value: to_json_value(value, where), None)
    write, read = codec(item, where)
    return Codec(
        dict if write is None else lambda value: {key: write(each) for key, each in value.items()},
        None if read is None else lambda value: {key: read(each) for key, each in value.items()},
    )


def _record_codec(kind: Any, columns: Sequence[Column]) -> Codec:
    """Return the codec of a record. A reply of a newer server may have more fields."""
    parts = [(column.name, *codec(column.kind, column.name)) for column in columns]

    def write(record: Any) -> dict[str, Any]:
        return {
            name: getattr(record, name) if inner is None else inner(getattr(record, name)) for name, inner, _ in parts
        }

    def read(document: Mapping[str, Any]) -> Any:
        return kind(
            **{
                name: document[name] if inner is None else inner(document[name])
                for name, _, inner in parts
                if name in document
            }
        )

    return Codec(write, read)


# -- the forms that do not follow from a type -------------------------------------------------------------------------


@dataclass
class TaskFields:
    """A task: its ordinal, the fields of its prompt, and the name of its source."""

    ordinal: Number
    fields: dict[str, Any]
    source: str = ""


def encode_task(task: Task) -> dict[str, Any]:
    """Return the fields of a task."""
    return {"ordinal": task.ordinal, "fields": to_json_value(task.fields, "fields"), "source": task.source}


def decode_task(document: Mapping[str, Any]) -> Task:
    """Return a task."""
    return Task(document["ordinal"], document["fields"], document.get("source", ""))


@dataclass
class TurnFields:
    """A model call. Its arrays are packed as the journal stores them (`etude.store.journal.blobs`), in base64."""

    finish_reason: Literal["stop", "length", "abort"]
    arrays: str
    index: Id = 0
    model: str = "policy"
    tags: list[str] = field(default_factory=list)
    reward: float | None = None
    anchor: Number | None = None
    observed: Id | None = None
    opened: Id = 0
    text: str = ""
    grammar: str | None = None
    images: list[ImageSpan] = field(default_factory=list)


def encode_turn(turn: Turn) -> dict[str, Any]:
    """Return the fields of a model call."""
    fields = {name: getattr(turn, name) for name in TURN_FIELDS}
    arrays = base64.b64encode(pack_turn(turn)).decode()
    completion = {"finish_reason": turn.completion.finish_reason, "text": turn.completion.text}
    images = encode_as(list[ImageSpan], turn.images)
    return (
        fields
        | completion
        | {
            "grammar": turn.grammar,
            "images": images,
            "tags": list(turn.tags),
            "arrays": arrays,
        }
    )


def decode_turn(document: Mapping[str, Any]) -> Turn:
    """Return a model call; raise `DataError` if it is malformed."""
    try:
        payload = base64.b64decode(document["arrays"], validate=True)
        prompt, columns = unpack_turn(payload)
        text = document.get("text", "")
        completion = Completion(finish_reason=document["finish_reason"], text=text, **columns)
        known = {"index": 0} | {name: document[name] for name in (*TURN_FIELDS, "grammar") if name in document}
        images = tuple(decode_as(list[ImageSpan], document.get("images", [])))
        turn = Turn(prompt, completion, images=images, **known | {"tags": tuple(document.get("tags", ()))})
        if len(pack_turn(turn)) != len(payload):
            raise ValueError(f"its arrays end before their {len(payload)} bytes do")
        return turn
    except (binascii.Error, StoreError, ValueError, OverflowError) as error:
        raise DataError(f"The turn is malformed: {str(error).rstrip('.')}.") from error


@dataclass
class EventFields:
    """An event: its kind, its rollout, its fields as the journal has them, and its payload in base64."""

    kind: str
    rollout: int | None
    body: dict[str, Any]
    payload: str


def encode_event(event: Event) -> dict[str, Any]:
    """Return the fields of an event, as the journal stores it, with large sets in its payload."""
    record = encode_whole(event)
    document = {"kind": record.kind, "rollout": record.rollout, "body": json.loads(record.body)}
    return document | {"payload": base64.b64encode(record.payload).decode()}


def decode_event(document: Mapping[str, Any]) -> Event:
    """Return an event."""
    payload = base64.b64decode(document["payload"], validate=True)
    return decode(EventRecord(document["kind"], document["rollout"], to_json(document["body"]), payload))


def encode_bytes(content: bytes) -> str:
    """Return bytes in base64."""
    return base64.b64encode(content).decode()


def decode_bytes(text: str) -> bytes:
    """Return the bytes of a text in base64; raise `DataError` if it is none."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"A text of {len(text)} characters is not base64: {str(error).rstrip('.')}.") from error


def encode_reward(reward: Reward) -> float | dict[str, float]:
    """Return a reward as plain numbers; all must be finite."""
    if isinstance(reward, Mapping):
        return {str(name): check_finite(value, f"The part '{name}' of a reward") for name, value in reward.items()}
    return check_finite(reward, "A reward")


PartName: TypeAlias = Annotated[str, Bounds(max_length=200)]
FORMS: Mapping[Any, Form] = {
    Task: Form(Codec(encode_task, decode_task), TaskFields),
    Turn: Form(Codec(encode_turn, decode_turn), TurnFields),
    Event: Form(Codec(encode_event, decode_event), EventFields),
    bytes: Form(Codec(encode_bytes, decode_bytes), str),
    Reward: Form(Codec(encode_reward, None), float | Annotated[dict[PartName, float], Bounds(max_length=100)]),
}
"""The types whose form does not follow from their fields."""


# -- requests and replies ---------------------------------------------------------------------------------------------


def encode_as(kind: Any, value: Any, where: str = "") -> Any:
    """Return the plain values of a value of this type. where: its name in errors."""
    write = codec(kind, where).encode
    return value if write is None else write(value)


def decode_as(kind: Any, plain: Any) -> Any:
    """Return the value of this type that has these plain values."""
    read = codec(kind).decode
    return plain if read is None else read(plain)


def encode_arguments(verb: Verb, arguments: Arguments) -> dict[str, Any]:
    """Return the body of the request that calls a verb with these arguments."""
    return {name: encode_as(verb.parameters[name], value, name) for name, value in arguments.items()}


def decode_arguments(verb: Verb, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the body of a request, with the defaults of those that it leaves out."""
    given = {name: decode_as(verb.parameters[name], value) for name, value in fields.items()}
    return {**verb.defaults, **given}


def encode_reply(verb: Verb, result: Any) -> dict[str, Any]:
    """Return the body of a reply."""
    return {"reply": encode_as(verb.reply, result)}


def decode_reply(verb: Verb, body: Mapping[str, Any]) -> Any:
    """Return the result in the body of a reply."""
    return decode_as(verb.reply, body["reply"])
