"""The tables of a journal in a database, and all statements on them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    func,
    insert,
    select,
    text,
)

from etude.store.journal.events import TurnRecorded
from etude.store.journal.images import IN_TURN

SCHEMA = "6"
"""Version of the table layout below. A journal with another one is refused."""
DERIVATION = "5"
"""Version of the rules by which `transitions` derives states. A writer that opens a journal with another one derives
its states again."""
LAST_ID = 2**63 - 1
"""The largest id."""
MAX_BOUND_VALUES = 10_000
"""Bound values in one statement. SQLite allows 32,766 and PostgreSQL 65,535."""

_NUMBER = BigInteger().with_variant(Integer, "sqlite")  # SQLite's row id must be a column of exactly this type

TABLES = MetaData()
FACTS = Table("facts", TABLES, Column("name", String, primary_key=True), Column("value", String, nullable=False))
"""schema and derivation: the versions above. writer: the process that opened it last. flushed: the last position that
`flush` made durable. end: the position and the chain checksum of the newest event."""
EVENTS = Table(
    "events",
    TABLES,
    Column("position", _NUMBER, primary_key=True, autoincrement=False),
    Column("kind", String, nullable=False),
    Column("rollout", BigInteger),
    Column("body", Text, nullable=False),
    Column("size", BigInteger, nullable=False),  # bytes of its payload
    Column("digest", BigInteger, nullable=False),  # checksum of the event and its payload
    Column("chain", BigInteger, nullable=False),  # checksum of its digest and the chain of the event before
    Index("events_of_kind", "kind", "position"),
    Index("events_of_rollout", "rollout", "position"),
)
BLOBS = Table(
    "blobs",
    TABLES,
    Column("position", _NUMBER, primary_key=True, autoincrement=False),
    Column("payload", LargeBinary, nullable=False),
)
SETS = Table(  # large sets of tokens (`large_sets`), and grammars (`grammar_texts`)
    "sets",
    TABLES,
    Column("digest", LargeBinary, primary_key=True),  # its name, a hash of its data
    Column("data", LargeBinary, nullable=False),
)
IMAGES = Table(  # the bytes of images (`images`)
    "images",
    TABLES,
    Column("digest", String, primary_key=True),  # SHA-256 of the bytes, in hex
    Column("media_type", String, nullable=False),
    Column("width", Integer, nullable=False),
    Column("height", Integer, nullable=False),
    Column("checksum", BigInteger, nullable=False),  # of the columns above
    Column("content", LargeBinary, nullable=False),
)
STATES = Table(
    "states",
    TABLES,
    Column("kind", String, primary_key=True),
    Column("id", BigInteger, primary_key=True),
    Column("phase", String, nullable=False),
    Column("use", String, nullable=False),  # of a task or a rollout
    Column("body", Text, nullable=False),
    Column("digest", BigInteger, nullable=False),
    Index("states_in_phase", "kind", "phase", "id"),
    Index("states_of_use", "kind", "use", "id"),
)

UPSERT_STATE = text(
    "INSERT INTO states (kind, id, phase, use, body, digest) VALUES (:kind, :id, :phase, :use, :body, :digest) "
    "ON CONFLICT (kind, id) DO UPDATE SET phase = excluded.phase, body = excluded.body, digest = excluded.digest"
)
INSERT_SET = text("INSERT INTO sets (digest, data) VALUES (:digest, :data) ON CONFLICT (digest) DO NOTHING")
INSERT_IMAGE = text(
    "INSERT INTO images (digest, media_type, width, height, checksum, content) "
    "VALUES (:digest, :media_type, :width, :height, :checksum, :content) ON CONFLICT (digest) DO NOTHING"
)
UPSERT_FACT = text(
    "INSERT INTO facts (name, value) VALUES (:name, :value) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)

# Statements are built once, since building one costs more than running it.
FIND_EVENTS = (
    select(EVENTS)
    .where(EVENTS.c.position > bindparam("after"), EVENTS.c.position <= bindparam("until"))
    .order_by(EVENTS.c.position)
    .limit(bindparam("limit"))
)
FIND_OF_KIND = FIND_EVENTS.where(EVENTS.c.kind == bindparam("kind"))
FIND_OF_ROLLOUT = FIND_EVENTS.where(EVENTS.c.rollout == bindparam("rollout"))
_OF_ROLLOUTS = EVENTS.c.rollout.in_(bindparam("rollouts", expanding=True))
FIND_SIZES = (
    select(EVENTS.c.rollout, func.sum(EVENTS.c.size + func.length(EVENTS.c.body)).label("bytes"))
    .where(_OF_ROLLOUTS)
    .group_by(EVENTS.c.rollout)
)
FIND_OF_ROLLOUTS = (
    select(EVENTS, BLOBS.c.payload)
    .join_from(EVENTS, BLOBS, EVENTS.c.position == BLOBS.c.position, isouter=True)
    .where(_OF_ROLLOUTS)
)
FIND_KINDS = select(EVENTS.c.rollout, EVENTS.c.position, EVENTS.c.kind).where(
    _OF_ROLLOUTS  # with kinds, SQLite would scan those
)
FIND_TURN_BODIES = select(EVENTS.c.position, EVENTS.c.rollout, EVENTS.c.body).where(
    _OF_ROLLOUTS,
    EVENTS.c.kind.concat("") == TurnRecorded.kind,  # of the column itself, SQLite would scan the index
)
FIND_IMAGE_TURNS = (
    select(EVENTS.c.position, EVENTS.c.rollout, EVENTS.c.body)
    .where(EVENTS.c.position > bindparam("after"), EVENTS.c.kind == TurnRecorded.kind)
    .where(EVENTS.c.body.contains(IN_TURN))
    .order_by(EVENTS.c.position)
    .limit(bindparam("limit"))
)
FIND_PAYLOADS = select(BLOBS).where(BLOBS.c.position.in_(bindparam("positions", expanding=True)))
FIND_SETS = select(SETS).where(SETS.c.digest.in_(bindparam("names", expanding=True)))
_OF_DIGESTS = IMAGES.c.digest.in_(bindparam("digests", expanding=True))
FIND_IMAGES = select(IMAGES).where(_OF_DIGESTS)
FIND_IMAGE_SIZES = select(IMAGES).with_only_columns(*list(IMAGES.c)[:-1]).where(_OF_DIGESTS)
_OF_KIND = select(STATES).where(STATES.c.kind == bindparam("kind"))
FIND_STATES = _OF_KIND.where(STATES.c.id.in_(bindparam("ids", expanding=True)))
FIND_PHASES = _OF_KIND.where(  # not ordered, since SQLite would then scan all rows
    STATES.c.phase.in_(bindparam("phases", expanding=True))
)
_PAGE = _OF_KIND.limit(bindparam("limit"))
FIND_LISTED = _PAGE.where(STATES.c.id > bindparam("after")).order_by(STATES.c.id)
FIND_LISTED_BACKWARDS = _PAGE.where(STATES.c.id < bindparam("after")).order_by(STATES.c.id.desc())
_OF_USE = STATES.c.use == bindparam("use")
FIND_USED = FIND_LISTED.where(_OF_USE)
FIND_USED_BACKWARDS = FIND_LISTED_BACKWARDS.where(_OF_USE)
COUNT_EVENTS = select(func.count(), func.min(EVENTS.c.position)).select_from(EVENTS)
FIND_END = select(EVENTS.c.position, EVENTS.c.chain).order_by(EVENTS.c.position.desc()).limit(1)
FIND_CHAIN = select(EVENTS.c.chain).where(EVENTS.c.position == bindparam("position"))
INSERT_EVENT, INSERT_PAYLOAD = insert(EVENTS), insert(BLOBS)
