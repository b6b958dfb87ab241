"""Answers to option names of other programs: by tables of whole names, by the words of a name, or by its last parts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from etude.config.choice import options_of
from etude.config.name_rules import NameRules
from etude.config.tree import find_section_class

_NOT_NEEDED = "nothing: "
_CODE = re.compile("`([^`]*)`")


def answer_foreign_names(root: type[BaseModel], path: str, value: Any, known: Collection[str]) -> list[str]:
    """Return a sentence for each option that an unknown key sets; none if no name among them is known.

    value: the value of the key, which may be a whole section of another program. known: the paths of the options here.
    """
    elsewhere: Mapping[str, str] = getattr(root, "sections_elsewhere", {})
    if where := elsewhere.get(path.partition(".")[0]):
        return [f"{path} is not an option of this command. {where}"]
    keys = list(iter_leaf_paths(path, value))
    answers = [_find_answer(root, path, key, known) for key in keys]
    return [_to_sentence(key, answer) for key, answer in zip(keys, answers, strict=True)] if any(answers) else []


def _to_sentence(key: str, answer: str) -> str:
    if answer.startswith(_NOT_NEEDED):
        return f"{key} is not an option, and none is needed: {answer.removeprefix(_NOT_NEEDED)}."
    return f"{key} is not an option; here it is {answer.removesuffix(', …')}." if answer else f"{key} is not an option."


def _find_answer(root: type[BaseModel], unknown: str, key: str, known: Collection[str]) -> str:
    """Return the answer to a name; empty if there is none, or if several are as good. unknown: its part that no option
    here begins with.

    A full name is always translated. In a section that exists here, a name means an option of that section, unless it
    has two words or more.
    """
    aliases: Mapping[str, str] = getattr(root, "aliases", {})
    full_names: Mapping[str, str] = getattr(root, "verl_trl_options", {})
    rules: NameRules | None = getattr(root, "option_rules", None)
    if (name := _match_full_name(key, full_names)) and name != key:
        return name
    parent, _, last = key.rpartition(".")
    section = unknown.rpartition(".")[0]
    is_usual = rules is None or not parent or not rules.names_other_object(parent)
    alias = aliases.get(last, "")
    if alias and (is_usual if not section else parent == alias.split()[0].rpartition(".")[0]):
        return alias
    if is_usual and (same := _find_same_end(key, known, section)):
        return same
    answers = [] if rules is None else [_first_available(root, answer) for answer in rules.find_answers(key)]
    answers = [answer for answer in answers if answer and answer != key]
    if len(answers) != 1:
        return ""
    is_of_section = answers[0].lstrip("`").startswith(f"{section}.")
    return answers[0] if not section or parent != section or "_" in last or is_of_section else ""


def _find_same_end(key: str, known: Collection[str], section: str) -> str:
    """Return the only option that ends as a name of another program does: in two parts or more, or in one of several
    words; or that is that part alone."""
    parts = key.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if start == len(parts) - 1 and (section or not start or not ("_" in end or end in known)):
            return ""
        ends = [path for path in known if path != key and f".{path}".endswith(f".{end}")]
        if end in ends or len(ends) == 1:
            return end if end in ends else ends[0]
    return ""


def _first_available(root: type[BaseModel], answer: str) -> str:
    """Return the first part of an answer whose options the command has; empty if there is none."""
    for part in answer.split(" | "):
        codes = _CODE.findall(part) if "`" in part else part.split(" and ")
        names = [word.partition("=")[0] for code in codes if not code.startswith("etude ") for word in code.split()]
        options = [name for name in names if "." in name] or names[:1]
        if part.startswith(_NOT_NEEDED) or all(has_option(root, name) for name in options):
            return part
    return ""


def has_option(root: type[BaseModel], path: str) -> bool:
    """Return whether a path can be set, with some choice of each option before it."""
    kinds: list[type[BaseModel]] = [root]
    for name in path.split("."):
        fields = [kind.model_fields[name] for kind in kinds if name in kind.model_fields]
        if not fields:
            return False
        kinds = []
        for field in fields:
            options, section = options_of(field.annotation, field.metadata), find_section_class(field.annotation)
            kinds += list(options.table.values()) if options is not None else [section] if section is not None else []
    return True


def _match_full_name(path: str, full_names: Mapping[str, str]) -> str:
    """Translate a full name of another trainer, or a unique end of one; return an empty text for others."""
    if path in full_names:
        return full_names[path]
    matches = {name for key, name in full_names.items() if "." in path and key.endswith(f".{path}")}
    return matches.pop() if len(matches) == 1 else ""


def iter_leaf_paths(path: str, value: Any) -> Iterator[str]:
    """Iterate over the full keys of the leaves of the value at a path."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from iter_leaf_paths(f"{path}.{name}", inner)
    else:
        yield path
