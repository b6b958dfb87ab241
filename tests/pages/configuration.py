"""docs/reference/configuration/: every option of every command, from the classes whose fields they are."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from pydantic import BaseModel

from etude.cli import build_parser
from etude.config import load_plugin
from etude.config.choice import ChoiceOptions, options_of
from etude.config.tree import find_section_class, join_path, read_default
from tests.pages.options import COMMON, HEAD, common_options, equal_options, options, row
from tests.pages.text import cell, first_paragraph, note

__all__ = ["PAGES", "roots"]

INTRO = f"""\
# Configuration

{note("tests.pages.document")}

These pages list every option, with its values, its default and its meaning. On the command line an option is written
`key=value`. A file for `--config` is YAML of the same shape. `etude config show` prints the options of a run. Where an
option chooses by name, `module:Name` chooses your own class.

```sh
etude train grpo loss=gspo loss.clip_high=4e-4 sampling.max_tokens=512 model.path=my-model data.train=[tasks.jsonl]
etude config show grpo loss=gspo
```

The error about a wrong name gives the right one, also for a name from verl or TRL. An option
that the chosen class does not have is refused: `loss.clip_high` belongs to some losses only.

| page | has the options of |
|---|---|"""
ALGORITHM = """\
## Algorithm

The options of each choice are beside its formula, as are those of `correction`, `entropy` and `overlong`:
[algorithms](../algorithms/index.md)."""
ELSEWHERE = ("advantage", "loss", "kl", "correction", "entropy", "overlong")
"""Options of a run that docs/reference/algorithms has."""
SECTIONS = {
    "models.md": ("Models", ("model", "lora", "vision", "chat", "reference", "teacher", "critic")),
    "data.md": ("Data", ("data",)),
    "rewards.md": ("Rewards", ("reward", "judging")),
    "rollouts.md": ("Rollouts", ("sampling", "rollout", "collect", "env", "agent", "evaluate")),
    "training.md": ("Training", ("train", "checkpoint", "observe", "mesh", "crew", "placement")),
}
"""The pages of the sections of a run, with their titles; run.md has what is on none of them."""
TITLES = {"run.md": "Options of a run", "supervised.md": "Supervised training", "other.md": "Other commands"}
"""The pages of commands, with their titles."""
SUPERVISED = ("sft", "dpo", "reward-model", "distill")
"""The commands of supervised.md; other.md has those that are on no other page."""


def index() -> str:
    """Return the page that says on which page an option is."""
    placed = dict[str, list[str]]()
    for commands in roots().values():
        placed.setdefault(_place(commands[0]), []).extend(commands)
    rows = [f"| [{TITLES[uri]}]({uri}) | {_named(commands)} |" for uri, commands in placed.items()]
    rows[1:1] = [
        f"| [{title}]({uri}) | the sections {', '.join(f'`{name}`' for name in names)} of a run |"
        for uri, (title, names) in SECTIONS.items()
    ]
    return "\n".join([INTRO, *rows]) + "\n"


def run() -> str:
    """Return the options of a run that are in no section, and the choices of its algorithm."""
    root, commands = next(iter(roots().items()))
    kind = load_plugin(root, BaseModel)
    elsewhere = {*ELSEWHERE, *(name for _, names in SECTIONS.values() for name in names)}
    choices = [row(name, kind.model_fields[name]) for name in ("advantage", "loss", "kl")]
    return _joined(
        *_head(TITLES["run.md"], f"{_named(commands)} have these options, and [sections](index.md) of more."),
        *_section(kind, "", 2, without=elsewhere),
        ALGORITHM,
        "\n".join([HEAD, *choices]),
    )


def sections(uri: str) -> str:
    """Return a page of sections of a run."""
    title, names = SECTIONS[uri]
    kind = load_plugin(next(iter(roots())), BaseModel)
    return _joined(
        *_head(title, "Options of a run, below these sections."),
        *_section(kind, "", 2, without=kind.model_fields.keys() - set(names)),
    )


def commands(uri: str, text: str) -> str:
    """Return a page of the commands that are not `etude train` and have its options."""
    parts, shown = _head(TITLES[uri], text), dict[str, type[BaseModel]]()
    for root, named in roots().items():
        kind = load_plugin(root, BaseModel)
        if _place(named[0]) == uri:
            alike = {command: _alike(kind, other) for command, other in shown.items()}
            shared = {name: command for command, names in reversed(alike.items()) for name in names}
            parts += [f"## {_named(named)}", _as_before(shared), *_section(kind, "", 3, without=shared)]
        shown[named[0]] = kind
    return _joined(*parts)


def _place(command: str) -> str:
    """Return the page that has the options of a command."""
    return "run.md" if command == "train" else "supervised.md" if command in SUPERVISED else "other.md"


def _named(commands: Collection[str]) -> str:
    return ", ".join(f"`etude {command}`" for command in commands)


def _head(title: str, text: str) -> list[str]:
    return [f"# {title}", note("tests.pages.document"), text]


def _joined(*parts: str) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _alike(kind: type[BaseModel], other: type[BaseModel]) -> list[str]:
    """Return the options that two commands share: those that were written once, for both."""
    fields = [(name, field, other.model_fields.get(name)) for name, field in kind.model_fields.items()]
    return [
        name
        for name, field, theirs in fields
        if theirs is not None
        and (field.annotation, field.description) == (theirs.annotation, theirs.description)
        and read_default(field) == read_default(theirs)
    ]


def _as_before(shared: Mapping[str, str]) -> str:
    """Return a sentence for each earlier command that has some of the options too."""
    names = {command: [name for name, of in shared.items() if of == command] for command in shared.values()}
    sentences = [
        f"As for [`etude {command}`]({_place(command)}): {', '.join(f'`{name}`' for name in each)}."
        for command, each in names.items()
    ]
    return " ".join(sentences)


def roots() -> dict[str, list[str]]:
    """Return every class whose fields are options, as `module:Name`, with the commands whose options they are."""
    commands_of: dict[str, list[str]] = {}
    for command, classes in _commands(build_parser(), ""):
        for word, root in classes.items():
            if root not in commands_of or not word:
                commands_of.setdefault(root, []).append(f"{command} {word}".strip())
    return commands_of


def _commands(parsing: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    if parsing.get_default("roots") is not None:
        yield name, parsing.get_default("roots")
    for action in parsing._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from _commands(inner, f"{name} {word}".strip())


def _section(
    kind: type[BaseModel], path: str, level: int, without: Collection[str] = (), held: BaseModel | None = None
) -> Iterator[str]:
    """Yield single options first, then each choice and each section under its own heading. held: the default object, if
    its values differ from those of its class."""
    fields = {name: field for name, field in kind.model_fields.items() if name not in without}
    chosen = {name: options_of(field.annotation, field.metadata) for name, field in fields.items()}
    choices = {name for name, choice in chosen.items() if choice is not None}
    yield options(kind, path, without={*without, *choices}, held=held)
    for name, field in fields.items():
        here, choice, section = join_path(path, name), chosen[name], find_section_class(field.annotation)
        if choice is not None:
            yield f"{'#' * level} `{here}`"
            yield "\n".join([HEAD, row(here, field)])
            yield from _choices(choice, here, level + 1)
        elif section is not None:
            yield f"{'#' * level} `{here}`"
            yield _sentence(field.description or "")
            default = read_default(field) if held is None else getattr(held, name)
            yield from _section(section, here, level + 1, held=default if isinstance(default, section) else None)


def _choices(choice: ChoiceOptions, path: str, level: int) -> Iterator[str]:
    """Yield the docstring of each choice, the options that all of them have, and the other options of each."""
    kinds = choice.table
    rows = [f"| `{name}` | {first_paragraph(kind)} |" for name, kind in kinds.items()]
    yield "\n".join(["| choice | meaning |", "|---|---|", *rows])
    shared = common_options(kinds)
    some = next(iter(kinds.values()))
    if shared:
        yield COMMON
        yield from _section(some, path, level, without=some.model_fields.keys() - shared)
    for name, kind in kinds.items():
        equal = equal_options(kind, some) & shared
        if kind.model_fields.keys() - equal:
            yield f"Options of `{path}={name}`:"
            yield from _section(kind, path, level, without=equal)


def _sentence(text: str) -> str:
    sentence = cell(text)
    return f"{sentence[:1].upper()}{sentence[1:]}."


PAGES: dict[str, Callable[[], str]] = {
    "index.md": index,
    "run.md": run,
    **{uri: partial(sections, uri) for uri in SECTIONS},
    "supervised.md": partial(commands, "supervised.md", "Options of the commands that learn from files."),
    "other.md": partial(commands, "other.md", "Options of the commands that train no model."),
}
"""The pages of this folder, by the names of their files."""
