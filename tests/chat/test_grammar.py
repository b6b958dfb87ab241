"""Grammars: the tokens that may come next, by enumeration and for tokenizers of several kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from etude.chat import Tokenizer
from etude.chat.grammar import HEADER, MAX_CHARACTERS
from etude.errors import DataError
from tests.chat.made import byte_level, published, save
from tests.worlds import make_tokenizer


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of single letters, of a kind that llguidance does not read."""
    directory = tmp_path_factory.mktemp("letters")
    make_tokenizer(directory, "abc")
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory, ends = tmp_path_factory.mktemp("qwen"), ["<|im_end|>"]
    template = published()["qwen3"]
    save(directory, byte_level(template, ends), template, ends)
    return Tokenizer.load(directory)


def sequences(tokenizer: Tokenizer, grammar: str, size: int) -> Iterator[str]:
    """Yield the answers with an end token that a grammar allows, of `size` tokens."""
    end = tokenizer.eos_ids[0]
    for ids in product(range(tokenizer.vocab_size), repeat=size - 1):
        matcher = tokenizer.grammars.matcher(grammar)
        for token in (*ids, end):
            if not matcher.mask(tokenizer.vocab_size)[token]:
                break
            matcher.push(token)
        else:
            yield tokenizer.decode(ids)


def test_the_allowed_answers_are_those_of_the_language(letters: Tokenizer) -> None:
    for pattern in ("[ab]{2}", "a|bc|", "(ab)*c?"):
        grammar = f"{HEADER}start: /{pattern}/"
        found = {text for size in (1, 2, 3) for text in sequences(letters, grammar, size)}
        words = {"".join(word) for size in (0, 1, 2) for word in product("abc", repeat=size)}
        assert found == {word for word in words if re.fullmatch(pattern, word)}, pattern


def test_a_matcher_begins_anew_and_is_alone(letters: Tokenizer) -> None:
    grammar = f'{HEADER}start: "abc"'
    one, other = (letters.grammars.matcher(grammar) for _ in range(2))
    a, b, _ = letters.encode("abc").tolist()
    one.push(a)
    assert np.flatnonzero(one.mask(9)).tolist() == [b] and np.flatnonzero(other.mask(9)).tolist() == [a]
    one.reset()
    assert np.flatnonzero(one.mask(9)).tolist() == [a]


def test_a_token_that_the_grammar_forbids_ends_the_matcher_with_a_sentence(letters: Tokenizer) -> None:
    matcher = letters.grammars.matcher(f'{HEADER}start: "abc"')
    with pytest.raises(DataError, match="cannot go on by its grammar"):
        matcher.push(letters.encode("c").tolist()[0])
    assert not matcher.mask(9).any()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: /(ja|nein[0-9/", r'be used: invalid regex "\(ja.* regex parse error: unclosed character class$'),
        ('start: x\nx: %json {"type": "foo"}', "be used: failed to compile JSON schema: Invalid type: foo$"),
        ("start: missing", 'be used: unknown name: "missing"$'),
        ("start: ((", "be used: Expected token"),
        ('start: "' + "a" * MAX_CHARACTERS + '"', f"{MAX_CHARACTERS} are the most"),
        ('start: %json {"type": "array", "uniqueItems": true}', "uniqueItems"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(letters: Tokenizer, grammar: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        letters.grammars.matcher(HEADER + grammar)


def test_a_literal_names_the_tokens_that_stand_for_themselves(qwen: Tokenizer) -> None:
    text = '</think>\n"ä" <tool_call>'
    grammars = qwen.grammars
    matcher = grammars.matcher(f"{HEADER}start: {grammars.literal(text)}")
    ids = qwen.encode(text).tolist()
    assert qwen.token_to_id("</think>") in ids
    for token in [*ids, qwen.eos_ids[0]]:
        assert matcher.mask(qwen.vocab_size)[token]
        matcher.push(token)
