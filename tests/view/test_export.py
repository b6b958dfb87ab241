"""Exported pages: one file whose texts stay data, and that may load nothing."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

from etude.cli import main
from tests.view.made import write_run, write_step_replay

HOSTILE = "</script><script>alert(1)</script>\x1b[31m &lt;"


def exported(run: Path, *page: str) -> str:
    file = run.parent / "page.html"
    assert main(["view", str(run), "--export", str(file), *page]) == 0
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [("--step", "1"), ("--rollout", "1")])
def test_an_exported_page_has_its_data_as_data_and_runs_its_own_script_alone(tmp_path: Path, page: tuple[str]) -> None:
    run = write_run(tmp_path / "run", steps=2, texts=[HOSTILE])
    text = exported(run, *page)
    assert text.count("<script") == text.count("</script>") == 3 and "alert(1)" not in text and "\x1b" not in text
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    hashes = dict(re.findall(r"(script|style)-src '(sha256-[^']*)'", policy))
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and set(hashes) == {"script", "style"}
    for kind, tag in (("script", '<script type="module">'), ("style", "<style>")):
        content = text.partition(tag)[2].partition(f"</{kind}>")[0]
        assert hashes[kind] == f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
        assert not re.search(r"^\s*(import|export)\b", content, re.M), "every module is a function"
    assert f'"{page[0][2:]}": "1"' in text, "a text, since a script has no exact number above 2^53"
    saved = json.loads(text.partition('id="saved">')[2].partition("</script>")[0])
    replies = {name: gzip.decompress(base64.b64decode(reply)) for name, reply in saved["replies"].items()}
    expected = {
        "--step": ["api/step run=run step=1"],
        "--rollout": ["api/rollout rollout=1 run=run", "api/tokens attempt=0 rollout=1 run=run turn=0"],
    }
    assert list(replies) == expected[page[0]]
    assert not any(str(tmp_path).encode() in reply for reply in replies.values()), "no path of the machine"
    if page[0] == "--rollout":
        assert json.loads(replies[expected["--rollout"][0]])["attempts"][0]["turns"][0]["text"] == HOSTILE


def test_an_exported_rollout_has_the_signals_of_the_newest_readable_replay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    for changed in (False, True):
        newest = write_step_replay(run, changed)
    damaged = write_step_replay(run)
    (run / "replays" / f"{damaged}.npz").write_bytes(b"PK")
    saved = json.loads(exported(run, "--rollout", "1").partition('id="saved">')[2].partition("</script>")[0])
    page, *tokens = saved["replies"]
    replays = json.loads(gzip.decompress(base64.b64decode(saved["replies"][page])))["replays"]
    assert replays["names"] == [newest] and replays["command"] == "", "a command names a path of the machine"
    place = f"api/tokens attempt=0 replay={newest} rollout=1 run=run"
    assert tokens == [f"{place} side={side} turn=0" for side in ("recorded", "changed")]


def test_an_export_that_names_no_page_or_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, steps=1)
    file = str(tmp_path / "page.html")
    for arguments, sentence in (
        ([str(tmp_path / "one"), "--export", file], "--step K or by --rollout N"),
        ([str(tmp_path / "one"), "--step", "1"], "--export is missing"),
        ([str(tmp_path), "--export", file, "--step", "1"], "has 2. Name one"),
        ([str(tmp_path / "one"), "--export", file, "--step", "7"], "no step 7"),
        (["postgresql://me:hunter2@db/x", "--export", file, "--step", "1"], "A database has no pages"),
        (["postgres//me:hunter2@db/x", "--export", file, "--step", "1"], "There is no directory"),
    ):
        assert main(["view", *arguments]) != 0
        printed = " ".join(capsys.readouterr().err.split())
        assert sentence in printed and "hunter2" not in printed, arguments
    assert not Path(file).exists()
