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
from etude.observe import get_logger, make_console, progress
from etude.store import Journal
from etude.tools.rollouts.datasets import DatasetBuilder, Form, Row, dataset_schema, demonstration_rows, preference_rows
from etude.tools.rollouts.jsonl import rollout_to_dict
from etude.tools.rollouts.otlp import rollout_to_otlp
from etude.tools.rollouts.reader import load_tokenizer, open_journal, read_rollouts, read_settled_groups, reward_getter
from etude.tools.rollouts.writers import atomic_path, open_writer

__all__ = ["ExportOptions", "ExportResult", "export_rollouts", "to_dict"]

KINDS = {
    "sft": (".parquet", ".jsonl"),
    "dpo": (".parquet", ".jsonl"),
    "jsonl": (".jsonl",),
    "otlp": (".jsonl", ".json"),
}
"""What rollouts can be written as, and how the files are called."""
SETS = ("sft", "dpo")


@dataclass(frozen=True)
class ExportOptions:
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
class ExportResult:
    """What came of it."""

    file: Path
    rows: int
    skipped: dict[str, int]
    changed: int
    """Rows of text that are other tokens when they are read again."""


def export_rollouts(options: ExportOptions, console: Console | None = None) -> ExportResult:
    """Write the rollouts of a run to a file, and say what was written and what to do with it."""
    options.check()
    console = make_console() if console is None else console
    with open_journal(options.run) as store, atomic_path(options.to) as place:
        rows, chosen = _rows(options, store)
        layout = dataset_schema(options.kind, options.form) if options.kind in SETS else None
        count = 0
        with open_writer(place, options.to.suffix, layout) as file, _progress(options, console) as advance:
            for row in rows:
                file.write(row)
                advance()
                count += 1
            left_out = Counter() if chosen is None else +chosen.skipped
            if not count:
                raise ConfigError(_nothing_message(options, left_out))
    done = ExportResult(options.to, count, dict(left_out), 0 if chosen is None else chosen.changed)
    _show(options, done, console)
    return done


def _rows(asked: ExportOptions, store: Journal) -> tuple[Iterator[Row], DatasetBuilder | None]:
    """What is written, and who counts what is not."""
    counts = reward_getter(asked.run)
    if asked.kind in SETS:
        tokenizer = load_tokenizer(asked.run, asked.model)
        chosen = DatasetBuilder(asked.form, tokenizer, asked.min_reward, asked.min_gap, asked.tags)
        if asked.kind == "dpo":
            return preference_rows(read_settled_groups(store, counts), chosen), chosen
        return demonstration_rows(read_rollouts(store, asked.split, counts), chosen), chosen
    if asked.kind == "otlp":
        run = str(asked.run.resolve())
        return (rollout_to_otlp(story, run) for story in read_rollouts(store, asked.split, counts)), None
    speaks = _optional_tokenizer(asked)
    return (rollout_to_dict(story, speaks) for story in read_rollouts(store, asked.split, counts)), None


def _optional_tokenizer(asked: ExportOptions) -> Tokenizer | None:
    """The tokenizer, if it is still there: what the model was shown has its ids without one."""
    try:
        return load_tokenizer(asked.run, asked.model)
    except ConfigError as error:
        if asked.model is not None:
            raise
        get_logger("tools").warning("What the model was shown is written as ids alone. %s", error)
        return None


@contextmanager
def _progress(asked: ExportOptions, console: Console) -> Iterator[Callable[[], None]]:
    with progress(f"writing {asked.to.name}", None, console) as bar:
        yield bar.advance


def _nothing_message(asked: ExportOptions, skipped: Counter[str]) -> str:
    why = "; ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    if not why:
        what = "settled task" if asked.kind == "dpo" else f"rollout of the split '{asked.split}'"
        return (
            f"The run in {asked.run} has no {what} yet. Wait until it has, or choose another --split (train, val, all)."
        )
    return f"Nothing of the run in {asked.run} is as asked: of what it has, {why}. Ask for less."


def _show(asked: ExportOptions, done: ExportResult, console: Console) -> None:
    what = {"sft": "rows to learn", "dpo": "pairs", "jsonl": "rollouts", "otlp": "traces"}[asked.kind]
    console.print(Text(f"{done.rows:,} {what} in {done.file}"), soft_wrap=True)
    for reason, count in done.skipped.items():
        console.print(Text(f"left out: {count:,} {reason}", "yellow"), soft_wrap=True)
    if done.changed:
        told = (
            f"{done.changed:,} of them are other tokens when they are read again; `--form ids` keeps them as they were"
        )
        console.print(Text(told, "yellow"), soft_wrap=True)
    if (command := _next(asked)) is not None:
        console.print(Text.assemble("\nnext:  ", (command, "bold")), soft_wrap=True)


def _next(asked: ExportOptions) -> str | None:
    """What to type next."""
    if asked.kind in SETS:
        return f"etude {asked.kind} model.path=MODEL data.train=[{asked.to}]"
    return None


def to_dict(done: ExportResult) -> dict[str, Any]:
    """What came of it, as plain data."""
    return {"file": str(done.file), "rows": done.rows, "skipped": done.skipped, "changed": done.changed}
