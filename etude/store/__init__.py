"""The one store: what happened in a run, written down as it happens, and where everything stands because of it.

with closing(open_store(directory / "journal.db")) as store:
    store.append([TaskIssued(0, 17, "gsm8k", {"prompt": "2+2?"}), RolloutQueued(0, task=0, sample=0)])
    store.append([AttemptStarted(0, 0), TurnRecorded(0, 0, turn), Rewarded(0, 0, 1.0), AttemptEnded(0, 0, "succeeded")])
    store.append([Admitted(step=1, rollouts=(0,))])
"""

from __future__ import annotations

from pathlib import Path

from etude.errors import MissingPackageError
from etude.store.blobs import Blobs
from etude.store.events import (
    Admitted,
    AttemptEnded,
    AttemptReady,
    AttemptStarted,
    Evaluated,
    Event,
    LateEnd,
    Noted,
    Published,
    ResourcePut,
    Rewarded,
    RolloutAsked,
    RolloutCancelled,
    RolloutEvent,
    RolloutExpired,
    RolloutQueued,
    RolloutSealed,
    TaskDropped,
    TaskIssued,
    TurnPaid,
    TurnRecorded,
)
from etude.store.journal import Journal
from etude.store.memory import MemoryJournal
from etude.store.record import Mark
from etude.store.states import AttemptState, Phase, ResourceState, RolloutState, Status, TaskState

__all__ = [
    "Admitted",
    "AttemptEnded",
    "AttemptReady",
    "AttemptStarted",
    "AttemptState",
    "Blobs",
    "Evaluated",
    "Event",
    "Journal",
    "LateEnd",
    "Mark",
    "MemoryJournal",
    "Noted",
    "Phase",
    "Published",
    "ResourcePut",
    "ResourceState",
    "Rewarded",
    "RolloutAsked",
    "RolloutCancelled",
    "RolloutEvent",
    "RolloutExpired",
    "RolloutQueued",
    "RolloutSealed",
    "RolloutState",
    "Status",
    "TaskDropped",
    "TaskIssued",
    "TaskState",
    "TurnPaid",
    "TurnRecorded",
    "open_store",
    "serving_installed",
]


def serving_installed() -> None:
    """`MissingPackageError` where what serves a store, and the model to agents, is not installed."""
    try:
        import etude.store.server  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"A store is served, and a model to agents, by the packages fastapi and uvicorn, which cannot be imported "
            f"here ({error}). Install them with `pip install 'etude[agents]'`."
        ) from error


def open_store(where: Path | str | None = None, *, read_only: bool = False) -> Journal:
    """The journal in a file, or in the PostgreSQL database of an address (`postgresql://…`), made if it is not there;
    without either, one in memory that ends with the process.

    With `read_only` it may be written by another process meanwhile, and must exist.
    """
    if where is None:
        return MemoryJournal()
    try:
        from etude.store.sql import SqlJournal
    except ImportError as error:
        raise MissingPackageError(
            f"A journal on disk needs the package SQLAlchemy, which cannot be imported here ({error}). "
            "Install it with: pip install 'sqlalchemy>=2'"
        ) from error
    if isinstance(where, str) and "://" in where:
        from etude.store.postgres import InServer

        return SqlJournal(InServer(where), read_only=read_only)
    from etude.store.sqlite import InFile

    return SqlJournal(InFile(Path(where), read_only=read_only), read_only=read_only)
