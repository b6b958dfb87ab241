"""One export, from what was asked to what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from etude.chat import Tokenizer
from etude.errors import ConfigError
from etude.observe import get_log, make_console, progress
from etude.store import Journal
from etude.tools.rollouts.files import draft, writer
from etude.tools.rollouts.lines import document
from etude.tools.rollouts.reading import counting, opened, settled, stories, tokenizer_of
from etude.tools.rollouts.sets import Chosen, Form, Row, demonstrations, pairs, schema
from etude.tools.rollouts.spans import trace

__all__ = ["Export", "Exported", "export", "told"]

KINDS = {
    "sft": (".parquet", ".jsonl"),
    "dpo": (".parquet", ".jsonl"),
    "jsonl": (".jsonl",),
    "otlp": (".jsonl", ".json"),
}
"""What rollouts can be written as, and how the files are called."""
SETS = ("sft", "dpo")


@dataclass(frozen=True)
class Export:
    """What is asked for."""

    run: Path
    to: Path
    kind: str = "jsonl"
    min_reward: float | None = None
    min_gap: float = 0.0
    tags: tuple[str, ...] = ()
    split: str = "train"
    form: Form = "ids"
    model: Path | None = None

    def check(self) -> None:
        """Refuse what would do nothing, and what cannot be done."""
        suffixes = KINDS[self.kind]
        if self.to.suffix not in suffixes:
            raise ConfigError(
                f"`--as {self.kind}` writes {' or '.join(suffixes)} files, and {self.to} is called otherwise. Name it "
                f"{self.to.with_suffix(suffixes[0])}."
            )
        idle = {"--min-reward": self.min_reward is not None, "--tags": bool(self.tags), "--form": self.form != "ids"}
        for name, given in idle.items():
            if given and self.kind not in SETS:
                raise ConfigError(
                    f"{name} is for sets to learn from, and `--as {self.kind}` writes everything. Leave it out."
                )
        if self.min_gap and self.kind != "dpo":
            raise ConfigError(
                f"--min-gap is for pairs, and `--as {self.kind}` writes none. Leave it out, or: --as dpo."
            )
        if self.kind == "dpo" and self.split != "train":
            raise ConfigError(
                "Pairs are made of several tries at one task, and rollouts that score the model are one to a task. "
                "Leave --split out."
            )
        if self.kind == "otlp" and self.model is not None:
            raise ConfigError("--model says where a tokenizer is, and `--as otlp` needs none. Leave it out.")


@dataclass(frozen=True)
class Exported:
    """What came of it."""

    file: Path
    rows: int
    left_out: dict[str, int]
    changed: int
    """Rows of text that are other tokens when they are read again."""


def export(asked: Export, console: Console | None = None) -> Exported:
    """Write the rollouts of a run to a file, and say what was written and what to do with it."""
    asked.check()
    console = make_console() if console is None else console
    with opened(asked.run) as store, draft(asked.to) as place:
        rows, chosen = _rows(asked, store)
        layout = schema(asked.kind, asked.form) if asked.kind in SETS else None
        count = 0
        with writer(place, asked.to.suffix, layout) as file, _told(asked, console) as advance:
            for row in rows:
                file.write(row)
                advance()
                count += 1
            left_out = Counter() if chosen is None else +chosen.left_out
            if not count:
                raise ConfigError(_nothing(asked, left_out))
    done = Exported(asked.to, count, dict(left_out), 0 if chosen is None else chosen.changed)
    _show(asked, done, console)
    return done


def _rows(asked: Export, store: Journal) -> tuple[Iterator[Row], Chosen | None]:
    """What is written, and who counts what is not."""
    counts = counting(asked.run)
    if asked.kind in SETS:
        tokenizer = tokenizer_of(asked.run, asked.model)
        chosen = Chosen(asked.form, tokenizer, asked.min_reward, asked.min_gap, asked.tags)
        if asked.kind == "dpo":
            return pairs(settled(store, counts), chosen), chosen
        return demonstrations(stories(store, asked.split, counts), chosen), chosen
    if asked.kind == "otlp":
        run = str(asked.run.resolve())
        return (trace(story, run) for story in stories(store, asked.split, counts)), None
    speaks = _speaking(asked)
    return (document(story, speaks) for story in stories(store, asked.split, counts)), None


def _speaking(asked: Export) -> Tokenizer | None:
    """The tokenizer, if it is still there: what the model was shown has its ids without one."""
    try:
        return tokenizer_of(asked.run, asked.model)
    except ConfigError as error:
        if asked.model is not None:
            raise
        get_log("tools").warning("What the model was shown is written as ids alone. %s", error)
        return None


@contextmanager
def _told(asked: Export, console: Console) -> Iterator[Callable[[], None]]:
    with progress(f"writing {asked.to.name}", None, console) as bar:
        yield bar.advance


def _nothing(asked: Export, left_out: Counter[str]) -> str:
    why = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    if not why:
        what = "settled task" if asked.kind == "dpo" else f"rollout of the split '{asked.split}'"
        return (
            f"The run in {asked.run} has no {what} yet. Wait until it has, or choose another --split (train, val, all)."
        )
    return f"Nothing of the run in {asked.run} is as asked: of what it has, {why}. Ask for less."


def _show(asked: Export, done: Exported, console: Console) -> None:
    what = {"sft": "rows to learn", "dpo": "pairs", "jsonl": "rollouts", "otlp": "traces"}[asked.kind]
    console.print(Text(f"{done.rows:,} {what} in {done.file}"), soft_wrap=True)
    for reason, count in done.left_out.items():
        console.print(Text(f"left out: {count:,} {reason}", "yellow"), soft_wrap=True)
    if done.changed:
        told = (
            f"{done.changed:,} of them are other tokens when they are read again; `--form ids` keeps them as they were"
        )
        console.print(Text(told, "yellow"), soft_wrap=True)
    if (command := _next(asked)) is not None:
        console.print(Text.assemble("\nnext:  ", (command, "bold")), soft_wrap=True)


def _next(asked: Export) -> str | None:
    """What to type next."""
    if asked.kind in SETS:
        return f"etude {asked.kind} model.path=MODEL data.train=[{asked.to}]"
    return None


def told(done: Exported) -> dict[str, Any]:
    """What came of it, as plain data."""
    return {"file": str(done.file), "rows": done.rows, "left_out": done.left_out, "changed": done.changed}
