"""docs/reference/configuration.md: every option of every command, from the classes whose fields they are."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from inspect import cleandoc

from pydantic import BaseModel

from etude.cli import build_parser
from etude.config import load_plugin
from etude.config.choice import ChoiceOptions, options_of
from etude.config.tree import find_section_class, join_path, read_default
from tests.pages.options import HEAD, options, row
from tests.pages.text import cell, note

__all__ = ["page", "roots"]

PARAGRAPH = "\n\n"
INTRO = f"""\
# Configuration

{note("tests.pages.document")}

This page lists every option, with its values, its default and its meaning. On the command line an option is written
`key=value`. A file for `--config` is YAML of the same shape. `etude config show` prints the options of a run. Where an
option chooses by name, `module:Name` chooses your own class.

```sh
etude train grpo loss=gspo loss.clip_high=4e-4 sampling.max_tokens=512 model.path=my-model data.train=[tasks.jsonl]
etude config show grpo loss=gspo
```

The error about a wrong name gives the right one, also for a former name, and for a name from verl or TRL. An option
that the chosen class does not have is refused: `loss.clip_high` belongs to some losses only.
"""


def page() -> str:
    """Return the page."""
    parts, shown = [INTRO], dict[str, type[BaseModel]]()
    for root, commands in roots().items():
        kind = load_plugin(root, BaseModel)
        named = ", ".join(f"`etude {command}`" for command in commands)
        alike = {command: _alike(kind, other) for command, other in shown.items()}
        shared = {name: command for command, names in reversed(alike.items()) for name in names}
        parts += [f"## {named}", _as_before(shared), *_section(kind, "", 3, without=shared)]
        shown[commands[0]] = kind
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
        f"As for `etude {command}`: {', '.join(f'`{name}`' for name in each)}." for command, each in names.items()
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
    rows = [f"| `{name}` | {cell(cleandoc(kind.__doc__ or '').split(PARAGRAPH)[0])} |" for name, kind in kinds.items()]
    yield "\n".join(["| choice | meaning |", "|---|---|", *rows])
    shared = set.intersection(*(set(kind.model_fields) for kind in kinds.values())) if len(kinds) > 1 else set()
    some = next(iter(kinds.values()))
    if shared:
        yield "Options of every one, with these defaults unless its own options state others:"
        yield from _section(some, path, level, without=some.model_fields.keys() - shared)
    for name, kind in kinds.items():
        equal = {each for each in shared if _facts(kind, each) == _facts(some, each)}
        if kind.model_fields.keys() - equal:
            yield f"Options of `{path}={name}`:"
            yield from _section(kind, path, level, without=equal)


def _facts(kind: type[BaseModel], name: str) -> tuple[str, str, str | None]:
    """Return the type, the default and the description of an option."""
    field = kind.model_fields[name]
    return str(field.annotation), repr(read_default(field)), field.description


def _sentence(text: str) -> str:
    sentence = cell(text)
    return f"{sentence[:1].upper()}{sentence[1:]}."
