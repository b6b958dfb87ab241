"""The pages that are generated from the code are up to date, and the others name existing options and metrics."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from etude.algorithms.reduce import Reduction
from etude.config import load_plugin
from etude.config.choice import options_of
from etude.config.tree import iter_possible_fields
from tests.house.documents import INLINE, ROOT, prose
from tests.pages import algorithms, configuration
from tests.pages.document import PAGES
from tests.pages.text import cell, docstring, linked

OPTION = re.compile(r"([a-z_]+(?:\.[a-z_*]+)*)(=.*)?")
ADVICE = (
    "start/concepts.md",
    "guides/troubleshooting.md",
    "guides/tuning.md",
    "guides/data.md",
    "guides/supervised.md",
)
"""Pages that name options in nearly every line."""
METRICS = {"eval/mean@n"}
"""Metrics whose names hold a number."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_generated_page_is_up_to_date(path: Path) -> None:
    message = f"{path.relative_to(ROOT)} is stale: run `python -m tests.pages.document`"
    assert path.read_text(encoding="utf-8") == PAGES[path](), message


def test_every_reduction_is_explained() -> None:
    assert tuple(algorithms.REDUCTIONS) == get_args(Reduction)


@cache
def known() -> dict[str, set[str]]:
    """Return every option and section of every command by its path, with the choices that it may be set to."""
    options: dict[str, set[str]] = {}
    for root in configuration.roots():
        for path, field in iter_possible_fields(load_plugin(root, BaseModel)):
            choice = options_of(field.annotation, field.metadata)
            options.setdefault(path, set()).update(choice.names if choice else ())
    return options


def wrong_options(text: str, known_options: dict[str, set[str]]) -> list[str]:
    """Yield each `inline code` that is written like an option and is none, or sets a choice to an unknown name."""
    tops = {path.partition(".")[0] for path in known_options if "." in path}
    wrong = []
    for code in INLINE.findall(prose(text)):
        for word in code.split():
            option = OPTION.fullmatch(word)
            if option is None or word.endswith(".parquet"):
                continue
            if option[2] is None and ("." not in option[1] or option[1].split(".")[0] not in tops):
                continue
            path, value = option[1], (option[2] or "=")[1:]
            is_name = re.fullmatch(r"[a-z_+]+", value) is not None and bool(known_options.get(path))
            if path not in known_options or (is_name and value not in known_options[path]):
                wrong.append(word)
    return wrong


@pytest.mark.parametrize("name", ADVICE)
def test_every_named_option_exists(name: str) -> None:
    assert not wrong_options((ROOT / "docs" / name).read_text(encoding="utf-8"), known())


def test_an_unknown_option_is_reported() -> None:
    text = "`loss=gspo` `loss.clip_high=0.3` `module:Name` `a.b` `loss=gspoo` `loss.clap` `trian.clip=1` `train.clap`"
    assert wrong_options(text, known()) == ["loss=gspoo", "loss.clap", "trian.clip=1", "train.clap"]


def test_the_metrics_to_watch_are_explained() -> None:
    """The metrics in a table of tuning are in the table of all metrics, or are its scores."""
    text = (ROOT / "docs" / "guides/tuning.md").read_text(encoding="utf-8")
    shown = text.partition("Without a message, read the curves")[2].partition("## Options to tune")[0]
    named = {code for line in re.findall(r"^\| (`[^|]*)\|", shown, re.MULTILINE) for code in INLINE.findall(line)}
    metrics = (ROOT / "docs" / "reference/metrics.md").read_text(encoding="utf-8")
    table = metrics.partition("## Reinforcement learning")[2].partition("\n## ")[0]
    explained = {code for line in re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE) for code in INLINE.findall(line)}
    groups = tuple(name.removesuffix("*") for name in explained if name.endswith("/*"))
    assert len(named) > 15
    assert {name for name in named - explained - METRICS if not name.startswith(groups)} == set()


def test_text_is_shown_unchanged() -> None:
    assert cell("a < b | c * d, `x|y`") == "a &lt; b \\| c \\* d, `x\\|y`"
    assert linked("Source: 2402.03300, arXiv 2503.14476; 1.5 and 12345.678901") == (
        "Source: [arXiv 2402.03300](https://arxiv.org/abs/2402.03300), "
        "[arXiv 2503.14476](https://arxiv.org/abs/2503.14476); 1.5 and 12345.678901"
    )

    class Documented:
        """First [line].

            a    table
            b    c*d

        Source: none.
        Ours: all.
        """

    assert docstring(Documented) == (
        "First \\[line\\].\n\n```text\na    table\nb    c*d\n```\n\n**Source:** none.\n\n**Ours:** all."
    )
