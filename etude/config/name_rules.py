"""Answers to option names of other programs, by the words of a name: rules hold for names that no table has.

A name is split into words, and words of one meaning become one: `eval_interval`, `test_freq` and `val_period` are all
`eval every`. A rule is a pattern of such words and the option that does the work here:

    "eval every": "evaluate.every"     both words must occur; `a|b` is either, and `a?` may occur
    "checkpoint every|steps limit?"

The last part of a dotted name must be explained whole: one word that no rule knows, and the rule does not hold. The
parts before it are only read for what the pattern needs, because each program groups its options in another way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

SWITCHES = {"enable", "enabled"}
"""Last parts of names that are on or off, and are called by the part before."""
_WORD = re.compile(r"\d*[A-Z]?[a-z]+\d*|[A-Z]+\d*(?![a-z])|\d+")


@dataclass(frozen=True)
class NameRule:
    """A pattern of words, and its answer."""

    required: tuple[frozenset[str], ...]
    """Words of which one each must occur."""
    optional: frozenset[str]
    answer: str

    @classmethod
    def parse(cls, pattern: str, answer: str) -> NameRule:
        """Read a pattern."""
        items = [(frozenset(item.rstrip("?").split("|")), item.endswith("?")) for item in pattern.split()]
        optional = frozenset().union(*(words for words, is_optional in items if is_optional))
        return cls(tuple(words for words, is_optional in items if not is_optional), optional, answer)

    @property
    def words(self) -> frozenset[str]:
        """All words that the pattern explains."""
        return self.optional.union(*self.required)


@dataclass(frozen=True)
class NameRules:
    """The rules of one vocabulary."""

    synonyms: Mapping[str, str]
    """Words and phrases of one meaning, separated by spaces, by the word that stands for them. The words of a phrase
    are joined by underscores."""
    fillers: frozenset[str]
    """Words that a name may have without another meaning."""
    contexts: Mapping[str, str]
    """Words for another object than the usual one. A rule that does not have such a word holds for the usual object
    only. The value is the section whose options of the same name are meant then; empty if there is none."""
    patterns: Mapping[str, str]
    """Patterns, and their answers."""
    ignored: frozenset[str] = field(default_factory=frozenset)
    """Parts of names that tell nothing."""

    def find_answers(self, path: str) -> list[str]:
        """Return the answers to a name; several if rules of equal weight differ. An answer of a context begins with
        its section."""
        parts = [self._words(part) for part in path.split(".") if part not in self.ignored]
        while len(parts) > 1 and set(parts[-1]) <= SWITCHES:
            parts.pop()
        if not parts:
            return []
        last, every = frozenset(parts[-1]), frozenset().union(*parts)
        found: dict[int, set[str]] = {}
        for rule in self._rules:
            if not all(words & every for words in rule.required) or not any(words & last for words in rule.required):
                continue
            if last - rule.words - self.fillers - self.contexts.keys():
                continue
            others = (every & self.contexts.keys()) - rule.words
            answer = self._in_context(rule.answer, others)
            if answer:
                weight = 2 * len(rule.required) + len(others) + len(last & rule.words)
                found.setdefault(weight, set()).add(answer)
        return sorted(found[max(found)]) if found else []

    def names_other_object(self, path: str) -> bool:
        """Return whether a name is about another object than the usual one."""
        parts = [part for part in path.split(".") if part not in self.ignored]
        return any(self.contexts.keys() & set(self._words(part)) for part in parts)

    def _in_context(self, answer: str, contexts: Iterable[str]) -> str:
        """Return an answer as it is for another object, such as the critic; empty if it has no such option."""
        for context in contexts:
            section = self.contexts[context]
            usual, _, replaced = section.partition(" ")
            if not section or not answer.removeprefix("`").startswith(usual):
                return ""
            answer = answer.replace(usual, replaced, 1)
        return answer

    @cached_property
    def _rules(self) -> list[NameRule]:
        return [NameRule.parse(pattern, answer) for pattern, answer in self.patterns.items()]

    @cached_property
    def _words_of(self) -> dict[str, str]:
        return {word: meaning for meaning, words in self.synonyms.items() for word in words.split()}

    @cached_property
    def _longest_phrase(self) -> int:
        return max((word.count("_") + 1 for word in self._words_of), default=1)

    def _words(self, part: str) -> list[str]:
        """Return the words of a part of a name; the longest phrases first."""
        raw, words = [word.lower() for word in _WORD.findall(part)], list[str]()
        while raw:
            for length in range(min(self._longest_phrase, len(raw)), 0, -1):
                phrase = "_".join(raw[:length])
                if length == 1 or phrase in self._words_of:
                    words += self._words_of.get(phrase, phrase).split("+")
                    del raw[:length]
                    break
        return words
