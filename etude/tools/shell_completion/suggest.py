"""Completion suggestions, from the words before the cursor, the parser, and the options of `options.json`.

This file imports only the standard library, because each key press starts a new Python.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

OPTIONS_FILE = Path(__file__).parent / "options.json"
"""The options of every command, generated from the classes: those import torch, and a key press cannot wait for it."""
MIN_MATCH_LENGTH = 3
"""The shortest text that may match inside an option's name."""


class Suggestion(NamedTuple):
    """One possible word."""

    text: str
    """The whole word, with a space at the end if it is complete."""
    meaning: str = ""


def suggest(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[Suggestion]:
    """Return the suggestions for the last of these words."""
    *before, current = words
    command, names, rest = _command(parser, before)
    if current.startswith("-"):
        flags = [(flag, action.help or "") for action in command._actions for flag in action.option_strings]
        return [Suggestion(f"{flag} ", help_text) for flag, help_text in flags if flag.startswith(current)]
    pending = _pending_flag(command, rest)
    if pending is not None:
        return list(_suggest_argument(pending, current))
    commands = _subcommands(command)
    if commands and any(not word.startswith("-") for word in rest):
        return []
    if commands:
        return [Suggestion(f"{name} ", help_text) for name, help_text in commands.items() if name.startswith(current)]
    if command.get_default("roots") is not None:
        return list(_suggest_for_run(command, names, rest, current))
    positionals = [action for action in command._actions if not action.option_strings]
    return list(_suggest_argument(positionals[-1], current)) if positionals else []


def completion_script(shell: str) -> str:
    """Return the script of a shell."""
    return (Path(__file__).parent / "shells" / f"etude.{shell}").read_text(encoding="utf-8")


def unquote(word: str) -> str:
    """Remove the shell quoting of a word; leave a word with an open quote."""
    try:
        return " ".join(shlex.split(word)) if word else ""
    except ValueError:
        return word


def split_words(line: str, program: str) -> list[str] | None:
    """Split a line into the words after the program's name; return None if the last word is quoted."""
    words = [""]
    quote = ""
    quoted = False
    letters = iter(line)
    for letter in letters:
        if letter == "\\" and quote != "'":
            words[-1] += next(letters, "")
        elif quote:
            quote, words[-1] = ("", words[-1]) if letter == quote else (quote, words[-1] + letter)
        elif letter in "'\"":
            quote, quoted = letter, True
        elif letter.isspace():
            quoted = False
            words += [""] if words[-1] else []
        else:
            words[-1] += letter
    if quoted or program not in words[:-1]:
        return None
    return words[words.index(program) + 1 :]


def format_for_bash(suggestions: Sequence[Suggestion], current: str, breaks: str) -> list[str]:
    """Return the texts for bash, which replaces only the part after a sign at which it breaks words."""
    signs = [sign for sign in current if sign in breaks and sign in "=:"]
    texts = [suggestion.text for suggestion in suggestions]
    for sign in signs:
        texts = [text.partition(sign)[2] for text in texts]
    return texts


# -- the parser -------------------------------------------------------------------------------------------------------


def _command(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.ArgumentParser, str, list[str]]:
    """Return the parser of the subcommand in these words, its name, and the remaining words."""
    name, rest = "", list(words)
    for index, word in enumerate(words):
        subcommands = next(
            (action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None
        )
        if subcommands is None or word.startswith("-"):
            continue
        if word not in subcommands.choices:
            break
        parser = subcommands.choices[word]
        name = word
        rest = list(words[index + 1 :])
    return parser, name, rest


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the subcommands with their help; commands without a help are internal."""
    commands: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands |= {choice.dest: choice.help or "" for choice in action._choices_actions}
    return commands


def _pending_flag(parser: argparse.ArgumentParser, rest: Sequence[str]) -> argparse.Action | None:
    """Return the flag that needs the current word as its value."""
    for action in parser._actions:
        if rest and rest[-1] in action.option_strings and action.nargs != 0:
            return action
    return None


def _suggest_argument(action: argparse.Action, current: str) -> Iterator[Suggestion]:
    if action.choices is not None:
        yield from (Suggestion(f"{choice} ") for choice in action.choices if str(choice).startswith(current))
    elif action.type is Path:
        yield from _paths(current, directories=action.metavar in ("RUN", "DIRECTORY"))


# -- options ----------------------------------------------------------------------------------------------------------


def _suggest_for_run(
    command: argparse.ArgumentParser, name: str, rest: Sequence[str], current: str
) -> Iterator[Suggestion]:
    roots = command.get_default("roots")
    root = next((root for word, root in roots.items() if word in rest), roots.get("", ""))
    known = json.loads(OPTIONS_FILE.read_text(encoding="utf-8"))
    options = [option for option in known["options"] if root.partition(":")[2] in option["classes"]]
    key, equals, value = current.partition("=")
    if equals:
        match = next((option for option in options if option["path"] == key), None)
        yield from _values(match, value) if match is not None else ()
        return
    names = [word for word in rest if "=" not in word and not word.startswith("-")]
    if not names:
        yield from _suggest_names(command.get_default("words"), roots, current, known)
    read = known["read"].get(name)
    available = [
        option for option in options if read is None or any(f"{option['path']}.".startswith(f"{r}.") for r in read)
    ]
    yield from _keys(_available_options(available, rest, known), current)


def _suggest_names(
    words: str, roots: Mapping[str, str], current: str, known: Mapping[str, Any]
) -> Iterator[Suggestion]:
    """Iterate over names without an equals sign: a preset, a data set, a file or a run."""
    if "PRESET" in words:
        meanings = {name: preset["meaning"] for name, preset in known["presets"].items()}
        meanings |= {word: "" for word in roots if word and not word.startswith("-")}
        yield from (Suggestion(f"{name} ", meaning) for name, meaning in meanings.items() if name.startswith(current))
    elif "SET" in words:
        yield from (Suggestion(f"{name} ") for name in roots if name.startswith(current))
    elif words:
        yield from _paths(current, directories="FILE" not in words)


def _available_options(
    options: Sequence[Mapping[str, Any]], rest: Sequence[str], known: Mapping[str, Any]
) -> list[Any]:
    """Return the options that the choices so far allow; all options if a file or a run may make choices."""
    if any(not word.startswith("--demo") and "=" not in word and word not in known["presets"] for word in rest):
        return list(options)
    chosen = {option["path"]: option["chosen"] for option in options if "chosen" in option}
    for word in rest:
        chosen |= known["presets"].get(word, {"chosen": {}})["chosen"]
    chosen |= dict(word.split("=", 1) for word in rest if "=" in word)
    return [
        option
        for option in options
        if any(all(chosen.get(path) == name for path, name in when.items()) for when in option["when"])
    ]


def _keys(options: Sequence[Mapping[str, Any]], current: str) -> Iterator[Suggestion]:
    """Iterate over option names, one part of the dotted path at a time; else those that contain the text."""
    parent = current.rpartition(".")[0]
    start = len(parent) + 1 if parent else 0
    suggestions: dict[str, str] = {}
    for option in options:
        path = option["path"]
        if path.startswith(current):
            part, dot, _ = path[start:].partition(".")
            suggestions.setdefault(path[:start] + part + (dot or "="), "" if dot else option["meaning"])
    if not suggestions and len(current) >= MIN_MATCH_LENGTH:
        matches = [option for option in options if current in option["path"].split(".")[-1]]
        matches.sort(key=lambda option: option["path"].count("."))
        suggestions = {f"{option['path']}=": option["meaning"] for option in matches}
    yield from (Suggestion(text, meaning) for text, meaning in suggestions.items())


def _values(option: Mapping[str, Any], value: str) -> Iterator[Suggestion]:
    key, is_list = option["path"], option.get("list", False)
    if is_list and not value and (option["values"] or option["paths"]):
        yield Suggestion(f"{key}=[", option["meaning"])
        return
    start = max(value.rfind("["), value.rfind(",")) + 1 if is_list else 0
    before = f"{key}={value[:start]}"
    last = value[start:]
    end = "" if is_list else " "
    for name, meaning in option["values"]:
        if name.startswith(last):
            yield Suggestion(f"{before}{name}{end}", meaning)
    if option.get("paths"):
        for path in _paths(last):
            yield Suggestion(before + (path.text.rstrip(" ") if is_list else path.text))


def _paths(current: str, *, directories: bool = False) -> Iterator[Suggestion]:
    """Iterate over files and directories with this prefix; hidden ones only after a typed dot."""
    parent, slash, name = current.rpartition("/")
    with suppress(OSError, RuntimeError):  # an unreadable directory, an unknown home
        for entry in sorted(Path(parent + slash).expanduser().iterdir()):
            if not entry.name.startswith(name) or (entry.name.startswith(".") and not name):
                continue
            if entry.is_dir() or not directories:
                text = re.sub(r"([^\w./~@%+=:,-])", r"\\\1", parent + slash + entry.name)
                yield Suggestion(text + ("/" if entry.is_dir() else " "))
