"""The rules of prose: how docstrings, help lines and errors open, and how long their sentences are."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from inspect import cleandoc
from pathlib import Path

from tests.house import table
from tests.house.rules import Modules
from tests.house.source import FunctionNode, Module

QUESTION = re.compile(r"(?:what|who|whoever|whom|whose|whether|which|where|how|if|that)\b", re.IGNORECASE)
TEXT_STARTS = (
    r'"""[ \t]*',
    r'help=\(?\s*[rf]*["\']+\s*',
    r'description=\(?\s*[rf]*["\']+\s*',
    r'raise [\w.]+\(\s*[rf]*["\']+\s*',
)
QUESTION_STARTS = [re.compile(f"{start}(?i:{QUESTION.pattern})") for start in TEXT_STARTS]
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*] ")
CLAUSE_END = re.compile(r"(?<=[.!?;])\s+")
EXAMPLE = re.compile(r"\n(?:[ \t]*\n)?(?: {4}.*(?:\n|$))+")
TABLE = re.compile(r"\S {3,}\S|──")
HELP = frozenset({"help", "description"})


def openings(modules: Modules) -> Iterator[str]:
    """A docstring, a help line or an error opens with a verb or a noun phrase, not with a question word."""
    for room, findings in _by_room(modules, _opens_with_question):
        yield from _beyond(findings, table.QUESTIONS_LEFT.get(room, 0))


def quick_openings(folder: Path) -> Iterator[str]:
    """The findings of `openings` in a package, by parsing only the files that seem to have one."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(start.search(text) for start in QUESTION_STARTS):
            place, tree = path.relative_to(folder).as_posix(), ast.parse(text)
            modules[place] = Module(place, place, text, tree, tuple(ast.walk(tree)), {}, ())
    yield from openings(modules)


def sentences(modules: Modules) -> Iterator[str]:
    """Sentences of docstrings and errors are short enough to be read once; those of help lines are shorter."""
    for room, findings in _by_room(modules, _long_sentences):
        yield from _beyond(findings, table.LONG_SENTENCES_LEFT.get(room, 0))


RULES = (openings, sentences)


def _beyond(findings: list[str], allowed: int) -> list[str]:
    """Return all findings, if there are more than allowed."""
    return findings if len(findings) > allowed else []


def _by_room(modules: Modules, check: Callable[[Module], Iterator[str]]) -> Iterator[tuple[str, list[str]]]:
    """Return the findings in each package."""
    rooms: dict[str, list[str]] = {}
    for module in modules.values():
        rooms.setdefault(module.room, []).extend(check(module))
    yield from rooms.items()


def _opens_with_question(module: Module) -> Iterator[str]:
    for line, kind, text in texts(module):
        if QUESTION.match(text):
            yield f"{module.path}:{line}: the {kind} opens with a question word: {_start(text)}"


def _long_sentences(module: Module) -> Iterator[str]:
    for line, kind, text in texts(module):
        limit = table.MAX_HELP_WORDS if kind == "help line" else table.MAX_SENTENCE_WORDS
        ends = CLAUSE_END if kind == "help line" else SENTENCE_END
        for sentence in ends.split(_without_tables(EXAMPLE.sub("\n\n", text))):
            if (words := len(sentence.split())) > limit:
                long = f"a sentence of the {kind} has {words} words, not {limit}"
                yield f"{module.path}:{line}: {long}: {_start(sentence)}"


def texts(module: Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the kind and the text of each docstring, help line and error of a module."""
    for node, kind in _strings(module):
        if text := _text(node):
            yield node.lineno, kind, text


def _strings(module: Module) -> Iterator[tuple[ast.expr, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
            for before, after in zip([None, *node.body], node.body, strict=False):
                opens = before is None or isinstance(node, ast.Module | ast.ClassDef)
                if opens and isinstance(before, ast.Assign | ast.AnnAssign | None) and isinstance(after, ast.Expr):
                    yield after.value, "docstring"
        elif isinstance(node, ast.Call):
            yield from ((keyword.value, "help line") for keyword in node.keywords if keyword.arg in HELP)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.exc.args[0], "error"


def _text(node: ast.expr) -> str:
    """Return the text of a string, with one word in place of each value; empty for other expressions."""
    if isinstance(node, ast.Constant):
        return cleandoc(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
    return ""


def _without_tables(text: str) -> str:
    """Return the text without paragraphs that are tables: with columns set apart by three blanks, or with pictures."""
    return "\n\n".join(part for part in re.split(r"\n\s*\n", text) if not TABLE.search(part))


def _start(text: str) -> str:
    return " ".join(text.split())[:80]
