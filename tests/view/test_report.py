"""The page of a run: what it tells, and that no text in it changes the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from matplotlib.image import imread

from etude.cli import main
from etude.errors import ConfigError
from etude.integrity import write_text
from etude.observe import format_seconds
from etude.recipes.run.resume.session_log import record_session
from etude.view.markdown import sentence
from etude.view.report import LONGEST, write_report
from tests.view.made import write_metrics, write_run

KEY = "sk-abcdef123456"
BREAKING = f"```\n# A heading\n<script>alert(1)</script> | `\n````\n~~~\n\x1b[2J api_key={KEY}"
HEADINGS = ["Evaluations", "Findings of etude doctor", "Speed", "Options", "Samples"]


def parsed(page: Path) -> list[Token]:
    """Return the tokens of a page."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def headings(tokens: list[Token], tag: str) -> list[str]:
    """Return the headings of one level, as text."""
    opened = [place for place, token in enumerate(tokens) if (token.type, token.tag) == ("heading_open", tag)]
    after = [tokens[place + 1] for place in opened]
    return ["".join(child.content for child in token.children or ()) for token in after]


def rows(tokens: list[Token]) -> dict[str, list[str]]:
    """Return the rows of all tables by their first cell."""
    lines: list[list[str]] = []
    for place, token in enumerate(tokens):
        if token.type == "tr_open":
            lines.append([])
        elif token.type in ("td_open", "th_open"):
            lines[-1].append(tokens[place + 1].content)
    return {line[0]: line[1:] for line in lines}


def test_the_page_tells_what_a_run_was_and_what_came_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "recipe: train\nsteps: 3\nmodel:\n  path: models/tiny\ntrain:\n  learning_rate: 3.0\n"
    run = write_run(tmp_path / "mine", steps=3, options=options, texts=["right", "wrong"])
    write_metrics(run, steps=3, action_tokens=7.0, tokens=100.0)  # also of the prompts
    with record_session(run, lambda: 3, lambda: True, preset="dapo", device="1 × cuda (H100)"):
        pass
    assert main(["report", str(run)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == run / "report" / "report.md" and imread(page.with_name("curves.png")).std() > 0.01
    tokens = parsed(page)
    assert headings(tokens, "h1") == ["mine"] and headings(tokens, "h2") == HEADINGS
    assert headings(tokens, "h3") == [
        f"The {name}" for name in ("best: reward 1.000", "median: reward 0.0000", "worst: reward 0.0000")
    ]
    told = rows(tokens)
    assert told["status"] == ["done after step 3 of 3"] and told["recipe"] == ["`etude train`, preset `dapo`"]
    assert told["device"] == ["1 × cuda (H100)"] and "python" in told["versions"][0]
    assert told["`train.learning_rate`"] == ["`3.0`", "`1e-06`"] and "`recipe`" not in told
    assert told["`reward`"] == ["0.3333", "1.000"] and told["3"] == ["0.5000"]
    assert told["collect"] == ["3.0 s", "50.0%"] and told["rollouts trained on"] == ["24"]
    assert told["tokens trained on"] == ["21"] and "means over neighboring steps" not in page.read_text()


def test_no_text_of_a_run_changes_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>`a|b", steps=2, texts=[BREAKING])
    with pytest.raises(RuntimeError), record_session(run, lambda: 1, lambda: False, device="<b>|"):
        raise RuntimeError(BREAKING)
    (run / "run.yaml").unlink()
    write_text(run / "run.yaml", "recipe: train\nmodel:\n  path: 'a``\\|b<i>'\n")
    page = write_report(run, tmp_path / "out")
    tokens = parsed(page)
    assert headings(tokens, "h2") == HEADINGS and len(headings(tokens, "h3")) == 3
    inline = [child for token in tokens for child in token.children or ()]
    assert not {"html_block", "html_inline"} & {token.type for token in [*tokens, *inline]}
    texts = [token.content for token in tokens if token.type == "fence" and "# A heading" in token.content]
    assert len(texts) == 4 and all("\n````\n" in text and "<script>" in text for text in texts), "and the error"
    assert rows(tokens)["device"] == ["&lt;b>|"] and rows(tokens)["model"] == ["```a``\\ |b<i>```"]
    text = page.read_text(encoding="utf-8")
    assert KEY not in text and "\x1b" not in text and (tmp_path / "out" / "curves.png").exists()


def test_a_killed_session_ends_with_its_last_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    start = {"process": 1, "host": "", "began": 0, "preset": "", "device": "", "versions": {}}
    lines = [{"at": last - 100, **start}, {"at": last + 1000, **start}]
    lines.append({"at": last + 1010, "ended": 2, "how": "done", "message": ""})
    (run / "sessions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert rows(parsed(write_report(run)))["trained"][0].endswith(f", for {format_seconds(110)}, started 2 times")


def test_a_secret_at_the_cut_of_a_long_text_is_masked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, texts=[f"{'x ' * (LONGEST // 3 - 3)}{KEY}{' y' * LONGEST}"])
    text = write_report(run).read_text()
    assert "characters are left out" in text and KEY[:5] not in text and "Step 1 has 8 rollouts." in text


def test_marks_outside_of_code_spans_are_text() -> None:
    text = sentence("![x](http://a) [b](javascript:c) **d** __e__ <i> `f_g` ``h \\")
    shown = MarkdownIt("commonmark").renderInline(f"{text} {sentence('`<b>')}")
    assert shown == ("![x](http://a) [b](javascript:c) **d** __e__ &lt;i&gt; <code>f_g</code> ``h \\ `&lt;b&gt;"), (
        "and a tick of one text ends no code span of another"
    )


def test_a_damaged_run_is_told_as_far_as_it_is_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=2)
    (run / "run.yaml").write_text("recipe: sft\n")
    (run / "journal.sqlite").write_bytes(b"nothing")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("broken\n")
    text = write_report(run).read_text()
    assert "1 line of metrics.jsonl is damaged" in text and "does not match its checksum" not in text
    assert "run.yaml is damaged" in text and "## Samples" in text and "`reward`" in text
    (run / "metrics.jsonl").unlink()
    (run / "journal.sqlite").unlink()
    assert "has no step" in write_report(run).read_text()
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="no run has started there"):
        write_report(tmp_path / "out")
