"""What a journal gets in each of its transactions, to cut it off there as a kill does."""

from __future__ import annotations

from etude.store import Event, Journal
from etude.store.journal.event_records import decode
from etude.store.journal.journal import Transaction


def record_commits(store: Journal) -> list[list[Event]]:
    """Return a list to which each later transaction adds the list of its events."""
    commits: list[list[Event]] = []
    commit = store._commit

    def record(txn: Transaction) -> None:
        commit(txn)
        commits.append([decode(record) for record in txn.records])

    store._commit = record  # type: ignore[method-assign]
    return commits
