"""Verifiable constraints on a text: those of IFEval under IFEval's names, and a few more of the same kind.

Each is a function of the text and of further arguments. IFEval uses language libraries for some of them; this module
uses simpler rules. A sentence ends at a mark before a space or the end, if the mark ends no abbreviation. Words are
runs of letters and digits. `english_capital` and `english_lowercase` check the case alone. `response_language` cannot
be verified.

Source: 2311.07911.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LIST_ARGUMENTS = ("keywords", "forbidden_words")
"""The arguments that are lists of strings."""

UNVERIFIABLE = {"response_language": "detecting a language needs a model, which this reward does not have"}
"""Constraints that occur in data and cannot be verified here, with the reason."""

_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": lambda count, bound: count >= bound,
    "less than": lambda count, bound: count < bound,
    "at most": lambda count, bound: count <= bound,
    "more than": lambda count, bound: count > bound,
    "exactly": lambda count, bound: count == bound,
}
_ABBREVIATED = re.compile(r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|No|Fig|cf|al)\.$")
# A run of marks matches only from its first mark, so that the search stays linear in the text.
_SENTENCE_END = re.compile(r"(?<![.!?…。！？])[.!?…。！？]++[\"'”’)\]*_]{0,4}(?=\s|$)|[。！？]")
_DECIDED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_NAME_ENDS = re.compile(r"[.,?!'\"]")


def make_loose_variants(text: str) -> list[str]:
    """Return the text, and the text without its first line, its last line or both; each also without asterisks.

    A loose check accepts any variant, and so forgives an introduction, a closing remark and emphasis.
    """
    lines = text.split("\n")
    shortened = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text, *shortened, *(variant.replace("*", "") for variant in (text, *shortened))]


def list_arguments(constraint: Callable[..., bool]) -> dict[str, bool]:
    """Return the arguments of a constraint besides the text, each with True if it is required."""
    parameters = list(inspect.signature(constraint).parameters.values())[1:]
    return {parameter.name: parameter.default is inspect.Parameter.empty for parameter in parameters}


def _compare(count: int, bound: int, relation: str) -> bool:
    if relation not in _RELATIONS:
        raise ValueError(f"'{relation}' is no relation; there are {', '.join(_RELATIONS)}")
    return _RELATIONS[relation](count, int(bound))


def _split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _count_sentences(text: str) -> int:
    """Count the sentences. Words after the last mark count as one more."""
    count, end = 0, 0
    for mark in _SENTENCE_END.finditer(text):
        if not _ABBREVIATED.search(text[max(mark.start() - 8, 0) : mark.start() + 1]) or mark.end() >= len(
            text.rstrip()
        ):
            count, end = count + 1, mark.end()
    return count + bool(re.search(r"\w", text[end:]))


# -- keywords ---------------------------------------------------------------------------------------------------------


def existence(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword occurs, in any case."""
    return all(keyword.lower() in text.lower() for keyword in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    """A keyword occurs the given number of times."""
    return _compare(text.lower().count(keyword.lower()), frequency, relation)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of these words occurs in the text as a word."""
    return not any(re.search(rf"(?i)(?<!\w){re.escape(word)}(?!\w)", text) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    """A letter occurs the given number of times, in any case."""
    return _compare(text.lower().count(letter.lower()), let_frequency, let_relation)


# -- length -----------------------------------------------------------------------------------------------------------


def number_words(text: str, num_words: int, relation: str = "at least") -> bool:
    """The text has the given number of words."""
    return _compare(len(_split_words(text)), num_words, relation)


def number_sentences(text: str, num_sentences: int, relation: str = "at least") -> bool:
    """The text has the given number of sentences."""
    return _compare(_count_sentences(text), num_sentences, relation)


def number_characters(text: str, num_characters: int, relation: str = "at most") -> bool:
    """The text has the given number of characters, without spaces around it. (Not in IFEval.)"""
    return _compare(len(text.strip()), num_characters, relation)


def number_lines(text: str, num_lines: int, relation: str = "exactly") -> bool:
    """The text has the given number of lines that are not empty. (Not in IFEval.)"""
    return _compare(sum(bool(line.strip()) for line in text.split("\n")), num_lines, relation)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """The text has exactly the given number of paragraphs, separated by `***`."""
    parts = re.split(r"\s?\*\*\*\s?", text)
    paragraphs = [part for part in parts if part.strip()]
    inner = parts[1:-1] if len(parts) > 2 else []
    return len(paragraphs) == int(num_paragraphs) and all(part.strip() for part in inner)


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """The text has exactly `num_paragraphs`, separated by empty lines, and one of them begins with `first_word`."""
    parts = [part.strip() for part in text.split("\n\n")]
    paragraphs = [part for part in parts if part]
    if len(paragraphs) != int(num_paragraphs) or not 0 < int(nth_paragraph) <= len(paragraphs):
        return False
    word = paragraphs[int(nth_paragraph) - 1].split()[0].lstrip("'\"")
    return _NAME_ENDS.split(word)[0].lower() == first_word.lower()


# -- form -------------------------------------------------------------------------------------------------------------


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """The text has exactly the given number of bullets, which begin with `*` or `-`."""
    bullets = re.findall(r"(?m)^[^\S\n]*\*[^*\n].*$", text) + re.findall(r"(?m)^[^\S\n]*-.*$", text)
    return len(bullets) == int(num_bullets)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """The text has at least the given number of highlights, written *so* or **so**."""
    highlights = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in highlights) >= int(num_highlights)


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """The text has at least the given number of sections, each titled with `section_spliter` and a number."""
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= int(num_sections)


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """The text has at least the given number of placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= int(num_placeholders)


def json_format(text: str) -> bool:
    """The whole text is JSON, in a fence or not."""
    content = re.sub(r"(?i)^```(?:json)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """The text has a title in double angular brackets."""
    return any(part.strip("<> ") for part in re.findall(r"<<(?!<)[^\n<>]+>>", text))


def constrained_response(text: str) -> bool:
    """The text contains one of the three answers that IFEval allows."""
    return any(decided in text for decided in _DECIDED)


def two_responses(text: str) -> bool:
    """The text is two different texts, separated by six asterisks."""
    parts = text.split("******")
    responses = [part.strip() for part in parts if part.strip()]
    return len(responses) == 2 and responses[0] != responses[1] and all(part.strip() for part in parts[1:-1])


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """The text begins with the request, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def postscript(text: str, postscript_marker: str) -> bool:
    """The text has a postscript after this marker. `P.S.` and `P.P.S` may contain spaces."""
    spaced = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(spaced.get(postscript_marker) or re.escape(postscript_marker.lower()), text.lower()) is not None


# -- beginning, end, case and marks -----------------------------------------------------------------------------------


def starts_with(text: str, start_phrase: str) -> bool:
    """The text begins with this phrase, in any case. (Not in IFEval.)"""
    return text.strip().lower().startswith(start_phrase.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """The text ends with this phrase, in any case and in quotes or not."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """The whole text is in double quotes."""
    plain = text.strip()
    return len(plain) > 1 and plain[0] == plain[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    """The given number of words are in capitals."""
    return _compare(sum(word.isupper() for word in _split_words(text)), capital_frequency, capital_relation)


def english_capital(text: str) -> bool:
    """All letters are capitals."""
    return text.isupper()


def english_lowercase(text: str) -> bool:
    """All letters are lower case."""
    return text.islower()


def no_comma(text: str) -> bool:
    """The text has no comma."""
    return "," not in text


CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "existence": existence,
    "frequency": frequency,
    "forbidden_words": forbidden_words,
    "letter_frequency": letter_frequency,
    "number_words": number_words,
    "number_sentences": number_sentences,
    "number_characters": number_characters,
    "number_lines": number_lines,
    "number_paragraphs": number_paragraphs,
    "nth_paragraph_first_word": nth_paragraph_first_word,
    "number_bullet_lists": number_bullet_lists,
    "number_highlighted_sections": number_highlighted_sections,
    "multiple_sections": multiple_sections,
    "number_placeholders": number_placeholders,
    "json_format": json_format,
    "title": title,
    "constrained_response": constrained_response,
    "two_responses": two_responses,
    "repeat_prompt": repeat_prompt,
    "postscript": postscript,
    "starts_with": starts_with,
    "end_checker": end_checker,
    "quotation": quotation,
    "capital_word_frequency": capital_word_frequency,
    "english_capital": english_capital,
    "english_lowercase": english_lowercase,
    "no_comma": no_comma,
}


def is_satisfied(name: str, arguments: Mapping[str, Any], text: str) -> bool:
    """Return True if a text satisfies a constraint. An empty text satisfies none."""
    return bool(text.strip()) and CONSTRAINTS[name](text, **arguments)
