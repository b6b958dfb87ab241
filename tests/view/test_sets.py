"""The sets that tokens were drawn from, and their alternatives: in the viewer's columns and in the exported lines."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.records import Completion, Turn
from etude.store import AttemptStarted, RolloutQueued, TaskIssued, TurnRecorded, open_store
from etude.store.http.otlp import JSON, parse_spans
from etude.support import SetKind, Support, decode_set, encode_ids, encode_set
from etude.tools.rollout_reader import read_rollout
from etude.tools.rollouts.jsonl import rollout_to_dict
from etude.tools.rollouts.otlp import rollout_to_otlp
from etude.tools.run_images import ImageFiles
from tests.view.browser import READY, Browser, texts
from tests.view.made import Viewer, turn, write_run
from tests.worlds import make_tokenizer

VOCAB = 4000
LEGAL = np.arange(VOCAB) % 2 == 0


def drawn() -> Turn:
    """Return a turn of five tokens: the only one, one of three, one of the even ones, any but 9, and any one."""
    sets = [
        encode_ids([0], VOCAB),
        encode_ids([1, 5, 7], VOCAB),
        encode_set(LEGAL),
        encode_set(np.arange(VOCAB) != 9),
        None,
    ]
    others = [[0, 0], [1, 7], [4, 2], [3, 5], [4, 6]]
    logp = np.log([[1, 1e-9], [0.5, 0.25], [0.7, 0.3], [0.6, 0.2], [0.9, 0.05]]).astype(np.float32)
    logp[0, 1] = -np.inf
    completion = Completion(
        np.array([0, 1, 2, 3, 4], np.int32),
        np.full(5, -0.5),
        np.zeros(5, np.int32),
        "stop",
        support=Support.build(sets),
        alternative_ids=np.array(others, np.int32),
        alternative_logp=logp,
    )
    return Turn(np.arange(4, dtype=np.int32), completion, 0)


def write_drawn(directory: Path, *turns: Turn) -> Path:
    """Write a run whose rollout 99 has these turns."""
    write_run(directory, steps=1)
    with closing(open_store(directory / "journal.sqlite")) as store:
        store.append([TaskIssued(9, 0, "sums", {"prompt": "?"}), RolloutQueued(99, 9, 0), AttemptStarted(99, 0)])
        store.append([TurnRecorded(99, 0, replace(each, index=place)) for place, each in enumerate(turns)])
    return directory


def columns_of(viewer: Viewer, index: int) -> dict[str, NDArray[Any]]:
    reply = viewer.ask(f"api/tokens?run=run&rollout=99&turn={index}").content
    (size,) = struct.unpack_from("<I", reply)
    parts = json.loads(reply[4 : 4 + size])["columns"].items()
    body = reply[4 + size :]
    return {name: np.frombuffer(body, part["type"], part["count"], part["offset"]) for name, part in parts}


def _texts(text: NDArray[Any], ends: NDArray[Any]) -> list[str]:
    return [text.tobytes()[begin:end].decode() for begin, end in pairwise([0, *ends.tolist()])]


def test_tokens_have_the_sizes_of_their_sets_and_the_texts_of_their_alternatives(tmp_path: Path) -> None:
    make_tokenizer(write_drawn(tmp_path / "run", drawn(), turn(3, 0)) / "model")
    columns = columns_of(Viewer(tmp_path), 0)
    assert columns["set_size"].tolist() == [1, 3, VOCAB // 2, -1, 0]
    assert columns["alternative_ids"].tolist() == [0, 0, 1, 7, 4, 2, 3, 5, 4, 6]
    np.testing.assert_array_equal(np.exp(columns["alternative_logp"])[:2], [1, 0])
    assert columns["named"].tolist() == list(range(8))
    texts = _texts(columns["named_text"], columns["named_ends"])
    assert all(texts) and texts[:5] == _texts(columns["text"], columns["ends"])[4:]
    plain = columns_of(Viewer(tmp_path), 1)
    assert not {"set_size", "alternative_ids", "named"} & plain.keys()


def test_alternatives_need_no_tokenizer(tmp_path: Path) -> None:
    write_drawn(tmp_path / "run", drawn())
    columns = columns_of(Viewer(tmp_path), 0)
    assert len(columns["alternative_ids"]) == 10 and "named_text" not in columns


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_tokenizer(write_drawn(root / "run", drawn()) / "model")
    return root


@pytest.mark.integration
@pytest.mark.usefixtures("without_problems")
def test_a_token_shows_its_set_and_its_alternatives(browser: Browser, address: str) -> None:
    browser.open(f"{address}rollout?run=run&rollout=99&view=tokens&signal=set")
    browser.until(f"{READY} && document.querySelector('[data-place=\"4\"]')")
    counts = ["the only one: 1", "up to 10: 1", "more than 100: 1", "all, or all but some: 2"]
    assert texts(browser, ".legend span:has(i)") == counts
    shown = {
        "the only one that could": ["1"],
        "a set of 3": ["0.5000", "0.2500"],
        "a set of 2,000": ["0.7000", "0.3000"],
        "all but 1": ["0.6000", "0.2000"],
        "the whole vocabulary": ["0.9000", "0.0500"],
    }
    for place, (text, likeliest) in enumerate(shown.items()):
        browser.evaluate(f"document.querySelector('[data-place=\"{4 + place}\"]').click()")
        browser.until(f"document.querySelector('.token-facts').innerText.includes('{text}')")
        probabilities = [entry.split()[-1] for entry in texts(browser, ".alternatives span:has(code)")]
        assert probabilities == likeliest
        assert len(texts(browser, ".alternatives .drawn")) == 1


def test_exported_lines_have_the_sets_and_the_alternatives(tmp_path: Path) -> None:
    with closing(open_store(write_drawn(tmp_path / "run", drawn(), turn(3, 0)) / "journal.sqlite")) as store:
        images = ImageFiles(store, tmp_path / "rollouts.jsonl")
        document = rollout_to_dict(read_rollout(store, store.rollout(99), lambda _: None), None, images)
    line, plain = json.loads(json.dumps(document, allow_nan=False))["attempts"][0]["turns"]
    assert line["support"]["index"] == [0, 1, 2, 3, -1]
    kept, three, bits, banned = line["support"]["sets"]
    assert (kept, three, banned) == ({"kept": [0]}, {"kept": [1, 5, 7]}, {"banned": [9]})
    words = np.frombuffer(b64decode(bits["bits"]), "<i4")
    np.testing.assert_array_equal(decode_set((SetKind.BITS, words), VOCAB), LEGAL)
    assert line["alternative_ids"][1] == [1, 7] and line["alternative_logp"][0] == [0.0, None]
    assert not {"support", "alternative_ids", "alternative_logp"} & plain.keys()


def test_traces_have_the_sizes_of_the_sets_and_the_number_of_alternatives(tmp_path: Path) -> None:
    with closing(open_store(write_drawn(tmp_path / "run", drawn(), turn(3, 0)) / "journal.sqlite")) as store:
        trace = rollout_to_otlp(read_rollout(store, store.rollout(99), lambda _: None), "run")
    read = parse_spans(json.dumps(trace).encode(), JSON)
    bound, plain = (span.data["attributes"] for span in read if span.data["name"].startswith("chat"))
    assert (bound["etude.support.bound_share"], bound["etude.support.forced_share"]) == (4 / 5, 1 / 5)
    assert bound["etude.support.size"] == pytest.approx((1 + 3 + VOCAB // 2) / 3)
    assert bound["etude.support.left_out"] == 1 and bound["etude.alternatives"] == 2
    assert not [name for name in plain if name.startswith(("etude.support", "etude.alternatives"))]
