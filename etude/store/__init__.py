"""The store: the journal of a run's events, and the states that follow from them.

with closing(open_store(directory / "journal.db")) as store:
    store.append([TaskIssued(0, 17, "gsm8k", {"prompt": "2+2?"}), RolloutQueued(0, task=0, sample=0)])
    store.append([AttemptStarted(0, 0), TurnRecorded(0, 0, turn)])
    store.append([AttemptRewarded(0, 0, 1.0), AttemptEnded(0, 0, "succeeded")])
    store.append([RolloutsAdmitted(step=1, rollouts=(0,), end=1, version=0)])
"""

from __future__ import annotations

from pathlib import Path

from etude.errors import MissingPackageError
from etude.store.journal.blobs import TurnShape
from etude.store.journal.event_records import JournalMark
from etude.store.journal.events import (
    AdvantagesEstimated,
    AttemptEnded,
    AttemptReady,
    AttemptRewarded,
    AttemptStarted,
    Event,
    LateResultRecorded,
    NoteRecorded,
    PolicyEvaluated,
    PolicyPublished,
    ResourcePut,
    RolloutCancelled,
    RolloutExpired,
    RolloutQueued,
    RolloutsAdmitted,
    TaskDropped,
    TaskIssued,
    TurnRecorded,
    TurnRewarded,
)
from etude.store.journal.images import StoredImage
from etude.store.journal.journal import Journal
from etude.store.journal.memory import MemoryJournal
from etude.store.journal.states import AttemptState, Phase, RolloutState, Status, TaskState

__all__ = [
    "AdvantagesEstimated",
    "AttemptEnded",
    "AttemptReady",
    "AttemptRewarded",
    "AttemptStarted",
    "AttemptState",
    "Event",
    "Journal",
    "JournalMark",
    "LateResultRecorded",
    "MemoryJournal",
    "NoteRecorded",
    "Phase",
    "PolicyEvaluated",
    "PolicyPublished",
    "ResourcePut",
    "RolloutCancelled",
    "RolloutExpired",
    "RolloutQueued",
    "RolloutState",
    "RolloutsAdmitted",
    "Status",
    "StoredImage",
    "TaskDropped",
    "TaskIssued",
    "TaskState",
    "TurnRecorded",
    "TurnRewarded",
    "TurnShape",
    "check_serving_installed",
    "open_store",
]


def check_serving_installed() -> None:
    """Raise `MissingPackageError` if the packages that serve a store, and a model to agents, are not installed."""
    try:
        import etude.store.http.server  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"A store, and a model for agents, are served with the packages fastapi and uvicorn, which cannot be "
            f"imported here ({error}). Install them with `pip install 'etude[agents]'`."
        ) from error


def open_store(where: Path | str | None = None, *, read_only: bool = False, answer_s: float | None = None) -> Journal:
    """Open the journal in a file, or in the PostgreSQL database of an address (`postgresql://…`); create it if it is
    missing. Without either, return one in memory that ends with the process.

    With `read_only` it must exist, and another process may write it meanwhile. answer_s: the seconds, 2 or more, to
    connect to a database server; None for its default.
    """
    if where is None:
        return MemoryJournal()
    from etude.store.journal.sql import SqlJournal

    if isinstance(where, str) and "://" in where:
        from etude.store.journal.postgres import PostgresDatabase

        return SqlJournal(PostgresDatabase(where, answer_s), read_only=read_only)
    from etude.store.journal.sqlite import SqliteDatabase

    return SqlJournal(SqliteDatabase(Path(where), read_only=read_only), read_only=read_only)
