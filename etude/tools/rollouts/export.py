"""The export of rollouts: check the options, write the file, print the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from etude.chat import Tokenizer
from etude.errors import ConfigError
from etude.observe import get_logger, make_console, progress
from etude.store import Journal
from etude.tools.rollout_reader import (
    Split,
    load_tokenizer,
    open_journal,
    read_rollouts,
    read_settled_groups,
    reward_getter,
)
from etude.tools.rollouts.datasets import DatasetBuilder, Form, Row, dataset_schema, demonstration_rows, preference_rows
from etude.tools.rollouts.jsonl import rollout_to_dict
from etude.tools.rollouts.otlp import rollout_to_otlp
from etude.tools.rollouts.writers import open_writer
from etude.tools.run_images import ImageFiles

KINDS = {
    "sft": (".parquet", ".jsonl"),
    "dpo": (".parquet", ".jsonl"),
    "jsonl": (".jsonl",),
    "otlp": (".jsonl", ".json"),
}
"""The formats, and the suffixes of their files."""
SETS = ("sft", "dpo")
NOUNS = {"sft": "training rows", "dpo": "pairs", "jsonl": "rollouts", "otlp": "traces"}


@dataclass(frozen=True)
class ExportOptions:
    """The options of `etude export rollouts`."""

    run: Path
    to: Path
    kind: str = "jsonl"
    min_reward: float | None = None
    min_gap: float = 0.0
    tags: tuple[str, ...] = ()
    split: Split = "train"
    form: Form = "ids"
    model: Path | None = None

    def check(self) -> None:
        """Refuse options without an effect, and impossible combinations."""
        suffixes = KINDS[self.kind]
        if self.to.suffix not in suffixes:
            raise ConfigError(
                f"`--as {self.kind}` writes {' or '.join(suffixes)} files, and {self.to} has another suffix. "
                f"Name it {self.to.with_suffix(suffixes[0])}."
            )
        flags = {"--min-reward": self.min_reward is not None, "--tags": self.tags, "--form": self.form != "ids"}
        for name, is_given in flags.items():
            if is_given and self.kind not in SETS:
                raise ConfigError(
                    f"{name} is for `--as sft` and `--as dpo`; `--as {self.kind}` writes everything. Leave it out."
                )
        if self.min_gap and self.kind != "dpo":
            raise ConfigError(
                f"--min-gap is for pairs, and `--as {self.kind}` writes none. Leave it out, or give --as dpo."
            )
        if self.kind == "dpo" and self.split != "train":
            raise ConfigError(
                "A pair needs several rollouts of one task, and evaluation has one rollout a task. Leave --split out."
            )
        if self.kind == "otlp" and self.model is not None:
            raise ConfigError("--model names a tokenizer, and `--as otlp` needs none. Leave it out.")


def export_rollouts(options: ExportOptions) -> dict[str, Any]:
    """Write the rollouts of a run to a file, print the result and the next command, and return the result."""
    options.check()
    schema, count = dataset_schema(options.kind, options.form) if options.kind in SETS else None, 0
    console = make_console()
    with open_journal(options.run) as store, open_writer(options.to, schema) as write:
        rows, builder = _rows(options, store)
        with progress(f"writing {options.to.name}", None, console) as bar:
            for row in rows:
                write(row)
                bar.advance()
                count += 1
        skipped = Counter[str]() if builder is None else +builder.skipped
        if not count:
            raise ConfigError(_nothing_message(options, skipped))
    changed = 0 if builder is None else builder.changed
    console.print(Text(f"{count:,} {NOUNS[options.kind]} in {options.to}"), soft_wrap=True)
    for reason, number in skipped.items():
        console.print(Text(f"skipped: {number:,} {reason}", "yellow"), soft_wrap=True)
    if changed:
        message = f"{changed:,} of them tokenize differently from the run; `--form ids` keeps the exact tokens"
        console.print(Text(message, "yellow"), soft_wrap=True)
    if options.kind in SETS:
        command = f"etude {options.kind} model.path=MODEL data.train=[{options.to}]"
        console.print(Text.assemble("\nnext:  ", (command, "bold")), soft_wrap=True)
    return {"file": str(options.to), "rows": count, "skipped": dict(skipped), "changed": changed}


def _rows(options: ExportOptions, store: Journal) -> tuple[Iterator[Row], DatasetBuilder | None]:
    """Return the rows to write, and the builder that counts the skipped ones; None for formats without skips."""
    reward_of = reward_getter(options.run)
    if options.kind == "dpo":
        builder = _builder(options)
        return preference_rows(read_settled_groups(store, reward_of), builder), builder
    rollouts = read_rollouts(store, options.split, reward_of)
    if options.kind == "sft":
        builder = _builder(options)
        return demonstration_rows(rollouts, builder), builder
    if options.kind == "otlp":
        run = str(options.run.resolve())
        return (rollout_to_otlp(rollout, run) for rollout in rollouts), None
    tokenizer = _optional_tokenizer(options)
    images = ImageFiles(store, options.to)
    return (rollout_to_dict(rollout, tokenizer, images) for rollout in rollouts), None


def _builder(options: ExportOptions) -> DatasetBuilder:
    tokenizer = load_tokenizer(options.run, options.model)
    return DatasetBuilder(options.form, tokenizer, options.min_reward, options.min_gap, options.tags)


def _optional_tokenizer(options: ExportOptions) -> Tokenizer | None:
    """Load the tokenizer if it is still there; without one, prompts are written as ids only."""
    try:
        return load_tokenizer(options.run, options.model)
    except ConfigError as error:
        if options.model is not None:
            raise
        get_logger("tools").warning("The prompts are written as ids only. %s", error)
        return None


def _nothing_message(options: ExportOptions, skipped: Counter[str]) -> str:
    reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    if not reasons:
        kind = "settled task" if options.kind == "dpo" else f"rollout of the split '{options.split}'"
        return f"The run in {options.run} has no {kind} yet. Wait, or choose another --split (train, val, all)."
    return f"No rollout of the run in {options.run} matches the options: {reasons}. Loosen the options."
