"""The log: its format, its masking of secrets, and its separation from other loggers."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from etude.observe.log import configure_logging, get_logger


def test_a_line_has_time_name_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", role="trainer", rank=3)
    get_logger("store").info("opened %d shards", 4)
    get_logger("store").error("lost one")
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d trainer\[3\] INFO  opened 4 shards", lines[0])
    assert re.fullmatch(r"\d\d:\d\d:\d\d trainer\[3\] ERROR lost one", lines[1])


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_records_below_the_level_are_not_shown(level: str, shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level)  # type: ignore[arg-type]
    log = get_logger("x")
    for say in (log.debug, log.info, log.warning, log.error):
        say("hello")
    assert capsys.readouterr().err.count("hello") == shown


def test_secrets_are_masked_in_arguments_and_tracebacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "logs" / "main.log"
    configure_logging("info", file=file, mask=lambda text: text.replace("sk-123", "***"))
    get_logger("agents").info("the key is %s", "sk-123")
    try:
        raise ValueError("refused sk-123")
    except ValueError:
        get_logger("agents").exception("the call failed")
    shown, written = capsys.readouterr().err, file.read_text(encoding="utf-8")
    assert shown == written
    assert "sk-123" not in shown
    assert "the key is ***" in shown
    assert "ValueError: refused ***" in shown


def test_configuring_again_replaces_only_etudes_handlers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root, other = logging.getLogger(), logging.getLogger("other.library")
    before = (list(root.handlers), root.level, list(other.handlers), other.level)
    configure_logging("info", file=tmp_path / "a.log")
    configure_logging("info", role="worker", file=tmp_path / "b.log")
    get_logger("x").info("once")
    other.warning("not ours")
    assert (list(root.handlers), root.level, list(other.handlers), other.level) == before
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "a.log").read_text() == ""
    assert "not ours" not in (tmp_path / "b.log").read_text()


def test_lines_follow_standard_error_and_survive_its_absence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure_logging("info")
    monkeypatch.setattr(sys, "stderr", None)
    get_logger("x").info("not shown")
    monkeypatch.undo()
    get_logger("x").info("heard")
    assert "heard" in capsys.readouterr().err


ODD = "a\n21:04:11 main[0] INFO  forged\x1b[31m\x9b\u2028\u2029\x85\u202e\ud800\xa0b é"


def test_text_from_outside_stays_on_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "main.log"
    configure_logging("info", file=file)
    for name in ("etude.x", "etude.one_that_nobody_got"):
        logging.getLogger(name).info("it says %s", ODD)
    get_logger("x").info("it says %s", ODD)
    get_logger("x").info(f"it says {ODD}")
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 4 and all(line.isprintable() and line.endswith("\\xa0b é") for line in lines)
    assert r"a\n21:04:11 main[0] INFO  forged\x1b[31m\x9b\u2028\u2029\x85\u202e\ud800" in lines[0]
    assert capsys.readouterr().err == file.read_text(encoding="utf-8")
    with caplog.at_level("INFO", logger="etude.x"):
        logging.getLogger("etude").propagate = True
        get_logger("x").info("it says %s", ODD)  # to handlers of others
    assert caplog.records[-1].getMessage().isprintable()


def test_no_line_of_a_traceback_looks_like_one_of_the_log(tmp_path: Path) -> None:
    configure_logging("info", file=tmp_path / "main.log")
    try:
        raise ValueError(ODD)
    except ValueError:
        get_logger("x").exception("the call failed")
    first, *others = (tmp_path / "main.log").read_text(encoding="utf-8").split("\n")[:-1]
    assert first.endswith("ERROR the call failed")
    assert others and all(line.startswith("  ") and line.isprintable() for line in others)
