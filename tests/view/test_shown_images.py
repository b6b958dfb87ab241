"""The images of turns are shown where the model saw them: in the user's message, and in the result of a tool."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from etude.chat import ChatRenderer, Tokenizer
from etude.images import ImageRef, ImageSpan, image_digest
from etude.records import Completion, Message, Turn
from etude.store import RolloutQueued, RolloutsAdmitted, StoredImage, TaskIssued, open_store
from etude.tools.answers import load_answers
from etude.view.export import export_page
from tests.chat.made import CHATML, CHATML_ENDS, byte_level, save
from tests.view.browser import READY, Browser, click, texts
from tests.view.made import Viewer, rollout_events, write_run
from tests.view.pictures import data_url, png

FIRST = png(60, 40)
SECOND = png(30, 50, (220, 90, 30))
HTML = b"<script>document.title='owned'</script>"
DIGESTS = [image_digest(content) for content in (FIRST, SECOND, HTML)]
NAMES = [f"[image {digest[:8]}]" for digest in DIGESTS]
ASKED = [Message("user", "Here:@ How many?")]
ZOOMED = [*ASKED, Message("assistant", "Zoom."), Message("tool", "Closer.@@ Again.", tool_call_id="1")]


def shown(chat: ChatRenderer, messages: Sequence[Message], digests: Sequence[str], answer: str, index: int) -> Turn:
    """Return a turn whose messages have four tokens of an image at each @."""
    pieces = chat.render_text(messages).split("@")
    ids = [chat.tokenizer.encode(piece) for piece in pieces]
    spans: list[ImageSpan] = []
    for place, digest in enumerate(digests):
        start = sum(map(len, ids[: place + 1])) + 4 * place
        spans.append(ImageSpan(digest, start, start + 4))
    tokens = ids[0]
    for piece in ids[1:]:
        tokens = np.concatenate([tokens, np.full(4, 7, np.int32), piece])
    written = chat.tokenizer.encode(f"{answer}<|im_end|>")
    none = np.zeros(len(written), np.int32)
    completion = Completion(written, none.astype(np.float32), none, "stop", answer)
    return Turn(tokens, completion, index, images=tuple(spans))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rollout 99 saw a picture, and another one in the result of a tool. Its journal has a page too."""
    root = tmp_path_factory.mktemp("runs")
    model = save(root / "model", byte_level(CHATML), CHATML, CHATML_ENDS)
    run = write_run(root / "run", steps=1, options=f"recipe: train\nmodel:\n  path: {model}\n")
    chat = ChatRenderer(Tokenizer.load(model))
    with closing(open_store(run / "journal.sqlite")) as store:
        for content in (FIRST, SECOND, HTML):
            store.put_images([StoredImage(ImageRef(image_digest(content), 1, 1), "text/html", content)])
        store.append([TaskIssued(9, 0, "", {"prompt": "?", "picture": f"image:{DIGESTS[0]}"}), RolloutQueued(99, 9, 0)])
        turns = [
            shown(chat, ASKED, DIGESTS[:1], "Zoom.", 0),
            shown(chat, ZOOMED, [DIGESTS[0], DIGESTS[1], DIGESTS[0]], "Two.", 1),
        ]
        begun, _, *ended = rollout_events(99, 1.0, turns[0])
        records = [event for turn in turns for event in rollout_events(99, 1.0, turn)[1:2]]
        store.append([begun, *records, *ended, RolloutsAdmitted(2, (99,), 10, 1)])
    return root


def test_images_are_named_at_their_places_and_served_by_their_hash(root: Path) -> None:
    viewer = Viewer(root)
    page = viewer.get("rollout", run="run", rollout=99)
    assert page["conversation"] == [
        {"by": "user", "text": f"Here:{NAMES[0]} How many?", "images": DIGESTS[0]},
        {"by": "model", "text": "Zoom."},
        {"by": "tool", "text": f"Closer.{NAMES[1]}{NAMES[0]} Again.", "images": f"{DIGESTS[1]} {DIGESTS[0]}"},
        {"by": "model", "text": "Two."},
    ]
    addresses = [page["pictures"][digest] for digest in DIGESTS[:2]]
    replies = [viewer.ask(address) for address in (*addresses, f"api/image?run=run&digest={DIGESTS[2]}")]
    assert [reply.content for reply in replies[:2]] == [FIRST, SECOND]
    assert {reply.headers["content-type"] for reply in replies[:2]} == {"image/png"}, "whatever the journal says"
    assert all(reply.headers["x-content-type-options"] == "nosniff" for reply in replies)
    assert replies[2].status_code == 404 and b"script" not in replies[2].content
    assert viewer.ask(f"api/image?run=run&digest={'0' * 64}").status_code == 404
    assert viewer.ask("api/image?run=run&task=9&image=0").content == FIRST
    assert page["fields"]["picture"] == "image 1" and viewer.ask(page["images"][0]).content == FIRST
    group = viewer.get("group", run="run", task=9)
    assert group["prompt"] == page["conversation"][:1] and group["pictures"].keys() == {DIGESTS[0]}


def test_tokens_of_an_image_are_its_name_once(root: Path) -> None:
    reply = Viewer(root).ask("api/tokens?run=run&rollout=99&turn=1").content
    assert [reply.count(name.encode()) for name in NAMES] == [2, 1, 0]


def test_answers_name_images(root: Path) -> None:
    step, (answer,) = load_answers(root / "run")
    assert step == 2 and answer["prompt"][0]["text"] == f"Here:{NAMES[0]} How many?"
    assert answer["conversation"][1]["text"] == f"Closer.{NAMES[1]}{NAMES[0]} Again."


def test_an_exported_rollout_has_the_images_that_it_shows(root: Path, tmp_path: Path) -> None:
    export_page(root / "run", tmp_path / "page.html", None, 99)
    saved = json.loads((tmp_path / "page.html").read_text().partition('id="saved">')[2].partition("</script>")[0])
    page = json.loads(gzip.decompress(base64.b64decode(saved["replies"]["api/rollout rollout=99 run=run"])))
    assert page["pictures"] == {DIGESTS[0]: data_url(FIRST), DIGESTS[1]: data_url(SECOND)} and page["images"] == []


@pytest.mark.integration
@pytest.mark.usefixtures("without_problems")
def test_a_page_shows_each_image_in_its_message(browser: Browser, address: str) -> None:
    browser.open(f"{address}rollout?run=run&rollout=99")
    browser.until(f"{READY} && document.querySelectorAll('.message img').length == 3")
    browser.until("[...document.querySelectorAll('.message img')].every(image => image.naturalWidth)")
    sizes = (
        "[...document.querySelectorAll('.message')].map(m => [...m.querySelectorAll('img')].map(i => i.naturalWidth))"
    )
    assert browser.evaluate(sizes) == [[60], [], [30, 60], []]
    assert texts(browser, ".message")[0].split() == ["user", "Here:", "How", "many?"]
    if folder := os.environ.get("SHOWN"):
        browser.screenshot(Path(folder, "shown.png"))
    click(browser, "Tokens")
    browser.until("document.querySelector('.tokens [data-place]')")
    assert texts(browser, ".tokens")[0].count(NAMES[1]) == 1
