"""The images of a task and the spans of an agent: on the page of a rollout, and in a page that is exported."""

from __future__ import annotations

import base64
import gzip
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from etude.store import AttemptStarted, Journal, NoteRecorded, RolloutQueued, TaskIssued, open_store
from etude.store.http.otlp import JSON, parse_spans
from etude.store.journal.states import TaskState
from etude.view.export import export_page
from tests.view.made import Viewer, rollout_events, turn, write_run
from tests.view.pictures import data_url, png

SVG = data_url(b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "svg+xml")


def issue(run: Path, prompt: Any, **fields: Any) -> None:
    """Write task 9 with rollout 99 to the journal of a run."""
    with closing(open_store(run / "journal.sqlite")) as store:
        store.append([TaskIssued(9, 0, "", {"prompt": prompt, **fields}), RolloutQueued(99, 9, 0)])
        store.append(rollout_events(99, 1.0, turn(3, 0)))


def test_images_have_addresses_and_are_named_in_a_prompt_that_cannot_be_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first, second = write_run(tmp_path / "a run", steps=1), png(2, 2), b"RIFF and no more"
    address = "https://example.org/a.png"
    content = [
        {"type": "image_url", "image_url": {"url": data_url(first)}},
        *({"type": "text", "text": "What is it?"}, {"type": "image", "url": address}, {"type": "audio"}, 7),
    ]
    issue(run, [{"role": "user", "content": content}], shown={"after": data_url(second, "webp")}, other=["data:"])
    viewer = Viewer(tmp_path)
    page = viewer.get("rollout", run="a run", rollout=99)
    (prompt, _) = page["conversation"]
    assert prompt == {"by": "prompt of the task", "text": f"user: [image 1] What is it? [{address}] [audio] 7"}
    assert page["fields"]["shown"] == {"after": "image 2"} and page["fields"]["other"] == ["data:"]
    assert viewer.get("group", run="a run", task=9)["images"] == page["images"]
    found = viewer.get("search", run="a run", q='"[image 1]"', seconds=10)["rollouts"]
    assert found["rollout"] == [99] and viewer.get("search", run="a run", q="base64")["rollouts"]["rollout"] == []
    read = Journal.task
    tasks = list[int]()

    def noted(journal: Journal, id: int) -> TaskState:
        tasks.append(id)
        return read(journal, id)

    monkeypatch.setattr(Journal, "task", noted)
    replies = [viewer.ask(image) for image in page["images"]]
    assert tasks == [9], "read once for both images"
    assert [reply.content for reply in replies] == [first, second]
    assert [reply.headers["content-type"] for reply in replies] == ["image/png", "image/webp"]
    assert "no image 2" in viewer.ask(page["images"][1].replace("image=1", "image=2")).json()["error"]


@pytest.mark.parametrize("text", [SVG, data_url(b"<script>", "png;x"), "data:image/png;base64,A", "data:image/png,A"])
def test_what_is_no_picture_stays_a_text_and_is_never_served(tmp_path: Path, text: str) -> None:
    issue(write_run(tmp_path / "run", steps=1), "?", image=text)
    viewer = Viewer(tmp_path)
    page = viewer.get("rollout", run="run", rollout=99)
    assert page["images"] == [] and page["fields"]["image"] == text
    reply = viewer.ask("api/image?run=run&task=9&image=0")
    assert reply.status_code == 404 and reply.headers["content-type"] == "application/json"


def test_an_exported_rollout_has_its_images_in_the_file(tmp_path: Path) -> None:
    run, image = write_run(tmp_path / "run", steps=1), data_url(png(2, 2))
    issue(run, "?", image=image)
    export_page(run, tmp_path / "page.html", None, 99)
    saved = json.loads((tmp_path / "page.html").read_text().partition('id="saved">')[2].partition("</script>")[0])
    (reply, _) = saved["replies"].values()
    assert json.loads(gzip.decompress(base64.b64decode(reply)))["images"] == [image]


def span(name: str, parent: str, start: int, end: int, status: Any = None) -> Any:
    """Return a span as an exporter sends it; its id is the first byte of its name. start, end: milliseconds."""
    times = {"startTimeUnixNano": str(start * 10**6), "endTimeUnixNano": str(end * 10**6)}
    ids = {"traceId": "5b" * 16, "spanId": f"{ord(name[0]):016x}", "parentSpanId": f"{ord(parent):016x}"}
    tool = {"key": "tool", "value": {"stringValue": name}}
    return {"name": name, **ids, **times, "attributes": [tool], "status": status or {}}


def test_spans_stand_in_their_order_with_times_since_the_attempt_began(tmp_path: Path) -> None:
    sent = [
        span("c", "b", 100_400, 100_300, {"code": 2, "message": "broke"}),
        span("a", "x", 100_250, 100_500, {"code": 1}),
        span("b", "a", 100_300, 100_450),
        span("b", "a", 100_300, 100_450),
        *(span("y", "z", 101_000, 101_000), span("z", "y", 101_000, 101_000)),
    ]
    body = json.dumps({"resourceSpans": [{"scopeSpans": [{"scope": {"name": "mine"}, "spans": sent}]}]}).encode()
    notes = [NoteRecorded(99, 0, "span", parsed.data) for parsed in parse_spans(body, JSON)]
    forged = {"trace_id": [], "span_id": {}, "start_ns": "x"}
    endless = {**notes[0].data, "start_ns": 10**400}
    run = write_run(tmp_path / "run", steps=1)
    with closing(open_store(run / "journal.sqlite")) as store:
        store.append([TaskIssued(9, 0, "", {"prompt": "?"}), RolloutQueued(99, 9, 0), AttemptStarted(99, 0, at=100.0)])
        store.append([*notes, *(NoteRecorded(99, 0, "span", data) for data in (forged, endless))])
    (attempt,) = Viewer(tmp_path).get("rollout", run="run", rollout=99)["attempts"]
    spans = attempt["spans"]
    assert spans["name"] == ["a", "b", "c", "y", "z"] and spans["depth"][:3] == [0, 1, 2]
    assert spans["start"] == [0.25, 0.3, 0.4, 1.0, 1.0] and spans["seconds"] == [0.25, 0.15, 0.0, 0.0, 0.0]
    assert spans["status"] == ["ok", "", "error: broke", "", ""]
    assert spans["details"][0] == {"scope": "mine", "attributes": {"tool": "a"}, "events": []}
    assert attempt["span_count"] == 5
    own = [{"name": "span", "data": data} for data in (forged, {**endless, "start_ns": str(10**400)})]
    assert attempt["notes"] == own, "events of the agent under the same name"
