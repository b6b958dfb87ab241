"""Images are stored in a journal once, by the hash of their bytes, and a turn shows stored images only."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import NotFoundError, StoreError
from etude.images import ImageRef, ImageSpan, image_digest
from etude.records import Turn
from etude.store import AttemptStarted, Journal, TurnRecorded, open_store
from etude.store.journal import images
from etude.store.journal.images import StoredImage
from tests.store.made import group, turn
from tests.store.servers import new_database


def image(content: bytes, width: int = 3) -> StoredImage:
    return StoredImage(ImageRef(image_digest(content), width, 2), "image/png", content)


def showing(stored: StoredImage) -> Turn:
    return replace(turn(), images=(ImageSpan(stored.ref.digest, 1, 3, first=4),))


RED, BLUE, UNKNOWN = image(b"red" * 3000), image(bytes(range(256)), 5), image(b"unknown")


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    where = {"memory": None, "sqlite": tmp_path / "journal.db"}.get(request.param, request.param)
    with closing(open_store(new_database() if where == "postgres" else where)) as journal:
        yield journal


def test_an_image_is_stored_once_and_read_by_its_digest(store: Journal) -> None:
    store.put_images([RED, RED])
    store.put_images([BLUE, RED])
    wanted = [UNKNOWN.ref.digest, BLUE.ref.digest, RED.ref.digest]
    assert store.images(wanted) == {RED.ref.digest: RED, BLUE.ref.digest: BLUE}
    assert store.image_refs(wanted) == {RED.ref.digest: RED.ref, BLUE.ref.digest: BLUE.ref}
    assert store.position == 0


def test_a_turn_shows_stored_images_only(store: Journal) -> None:
    store.put_images([RED])
    store.append([*group(0), AttemptStarted(0, 0)])
    for _ in range(2):
        with pytest.raises(NotFoundError, match=f"A turn of rollout 0 shows the image {UNKNOWN.ref.digest}, which"):
            store.append([TurnRecorded(0, 0, showing(RED)), TurnRecorded(0, 0, showing(UNKNOWN))])
    assert store.turns(0) == []
    store.append([TurnRecorded(0, 0, showing(RED))])
    assert len(store.turns(0)) == 1


def test_digests_that_were_found_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_KNOWN", 2)
    asked: list[str] = []

    def find(digests: Sequence[str]) -> Sequence[str]:
        asked.extend(digests)
        return digests

    check = images.ImageCheck(find)
    stored = [image(bytes([number])) for number in range(3)]
    for each in (0, 1, 0, 2, 0, 1):
        check([TurnRecorded(0, 0, showing(stored[each]))])
    assert asked == [stored[each].ref.digest for each in (0, 1, 2, 1)]


def test_other_bytes_than_those_of_the_hash_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"The image {RED.ref.digest} has 4 bytes with the hash"):
        StoredImage(RED.ref, "image/png", b"blue")
    path = tmp_path / "journal.db"
    with closing(open_store(path)) as store:
        store.put_images([RED, BLUE])
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE images SET content = CAST(x'00' AS BLOB) WHERE width = 3")
        raw.execute("UPDATE images SET width = 6 WHERE width = 5")
    with closing(open_store(path, read_only=True)) as store:
        with pytest.raises(StoreError, match=f"The image {RED.ref.digest} has 1 bytes with the hash"):
            store.images([RED.ref.digest])
        for read in (store.images, store.image_refs):
            with pytest.raises(StoreError, match=f"its image {BLUE.ref.digest} does not match its checksum"):
                read([BLUE.ref.digest])


def test_a_turn_without_images_takes_no_more_bytes(tmp_path: Path) -> None:
    with closing(open_store(tmp_path / "journal.db")) as store:
        store.append([*group(0), AttemptStarted(0, 0), TurnRecorded(0, 0, turn())])
        ((body,),) = store.turn_bodies([0]).values()
        assert "image" not in body


def test_every_reader_sees_the_spans_of_a_turn(store: Journal) -> None:
    store.put_images([RED])
    shown = showing(RED)
    store.append([*group(0), AttemptStarted(0, 0), TurnRecorded(0, 0, shown)])
    assert store.turns(0)[0].images == shown.images == store.first_turns([0])[0].images
    (events,) = store.read_rollouts([0])
    assert [event.turn.images for event in events if isinstance(event, TurnRecorded)] == [shown.images]


def test_turns_with_images_are_read_without_the_others(store: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.store.journal.image_store.PAGE_TURNS", 2)
    store.put_images([RED])
    text = turn()
    quoting = replace(text, completion=replace(text.completion, text='{"images":[["'))
    for rollout in range(3):
        store.append([*group(rollout), AttemptStarted(rollout, 0), TurnRecorded(rollout, 0, quoting)])
        store.append([TurnRecorded(rollout, 0, replace(showing(RED), index=1))])
    found = [(rollout, json.loads(body)["turn"]["images"][0][0]) for rollout, body in store.image_turns()]
    assert found == [(rollout, RED.ref.digest) for rollout in range(3)]
