"""Grammars: the tokens that may come next in an answer that has to have a form.

    text of a grammar ─► GrammarCompiler.matcher ─► GrammarMatcher: mask() before a token, push(token) after it

A grammar is a text in the Lark dialect of llguidance. It is compiled for a tokenizer, once for each text. Its last
token is an end token of the tokenizer.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError, DataError, MissingPackageError
from etude.lazy import LazyModule

if TYPE_CHECKING:
    import llguidance

    from etude.chat.tokenizer import Tokenizer
else:
    llguidance = LazyModule("llguidance")

HEADER = "%llguidance {}\n"
"""The line that a grammar begins with."""
MAX_CHARACTERS = 2**18
"""The longest text of a grammar."""
MAX_COMPILED = 256
"""The most grammars that stay compiled."""
POSITION = re.compile(r"^(at )?\d+\(\d+\): ")
"""The line and the column that an error of llguidance begins with."""


class GrammarMatcher:
    """One answer's place in its grammar."""

    def __init__(self, inner: llguidance.LLMatcher, vocab_size: int) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), np.uint32)

    def mask(self, size: int) -> NDArray[np.bool_]:
        """[size]: return which tokens may come next; none after an error. size: that of the model's vocabulary."""
        self._words[:] = 0
        allowed = np.zeros(size, np.bool_)
        self._inner.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._inner.is_error():
            return allowed
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little", count=self._vocab_size)
        allowed[: self._vocab_size] = bits.view(np.bool_)
        return allowed

    def push(self, token: int) -> None:
        """Go on after a token."""
        self._inner.consume_token(token)
        self.check()

    def reset(self) -> None:
        """Go back to the beginning of the answer."""
        self._inner.reset()

    def check(self) -> None:
        """Raise the error that has ended the matcher, if there was one."""
        if self._inner.is_error():
            raise DataError(f"The answer cannot go on by its grammar: {self._inner.get_error().strip()}")


class GrammarCompiler:
    """The grammars of one tokenizer. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int] | None = None) -> None:
        """end_ids: the tokens that may end an answer; by default all end tokens."""
        self._tokenizer = tokenizer
        self.end_ids = tuple(tokenizer.eos_ids if end_ids is None else end_ids)
        self._lock = threading.RLock()
        self._others: dict[frozenset[int], GrammarCompiler] = {}
        self._loaded: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, grammar: str) -> GrammarMatcher:
        """Return the matcher of an answer; refuse a grammar that cannot be compiled."""
        return GrammarMatcher(self._compile(grammar).deep_copy(), self._tokenizer.vocab_size)

    def warnings(self, grammar: str) -> tuple[str, ...]:
        """Return what answers will not be held to, a sentence for each."""
        return tuple(self._compile(grammar).get_grammar_warnings())

    def literal(self, text: str) -> str:
        """Return the part of a grammar that is this text; pieces of it that are one marked token are that token."""
        parts = []
        while text:
            places = [(text.find(piece), piece) for piece in self._marks if piece in text]
            start, piece = min(places, key=lambda place: (place[0], -len(place[1])), default=(len(text), ""))
            parts += [json.dumps(text[:start])] if start else []
            parts += [f"<[{self._marks[piece]}]>"] if piece else []
            text = text[start + len(piece) :]
        return " ".join(parts) or '""'

    def is_mark(self, text: str) -> bool:
        """Return whether a text is one marked token, which free text has no part of."""
        return text in self._marks

    def ending_with(self, end_ids: Sequence[int]) -> GrammarCompiler:
        """Return the grammars whose answers may end with these tokens."""
        if set(end_ids) == set(self.end_ids):
            return self
        with self._lock:
            return self._others.setdefault(frozenset(end_ids), GrammarCompiler(self._tokenizer, end_ids))

    def is_read_directly(self) -> bool:
        """Return whether llguidance reads the tokenizer's file by itself, as servers have it do.

        That depends on the file's decoder, so no vocabulary is loaded.
        """
        described = json.loads(self._tokenizer.to_json())
        described["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
        described |= {"added_tokens": [], "pre_tokenizer": None, "post_processor": None}
        try:
            llguidance.LLTokenizer(json.dumps(described), n_vocab=1, eos_token=[0])
        except (ModuleNotFoundError, ValueError):
            return False
        return True

    @property
    def _inner(self) -> llguidance.LLTokenizer:
        """The tokenizer as llguidance has it. A large one takes seconds, so it is loaded once."""
        with self._lock:
            self._loaded = self._loaded or self._load()
            return self._loaded

    def _load(self) -> llguidance.LLTokenizer:
        tokenizer = self._tokenizer
        try:
            return llguidance.LLTokenizer(
                tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=list(self.end_ids)
            )
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                "An answer was asked for in a form, and llguidance is not installed. Install it with: "
                "pip install 'etude[agents]'"
            ) from error
        except ValueError:  # llguidance reads few kinds of decoders
            texts: Any = _TokenTexts(tokenizer)
            return llguidance.LLTokenizer(texts, n_vocab=tokenizer.vocab_size)

    @cached_property
    def _marks(self) -> dict[str, int]:
        """The tokens that stand for themselves: no other tokens spell their text."""
        inner, tokenizer = self._inner, self._tokenizer
        marks = (id for id in range(tokenizer.vocab_size) if inner.is_special_token(id))
        return {text: id for id in marks if (text := tokenizer.decode([id], keep_special_tokens=True))}

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
            if len(grammar) > MAX_CHARACTERS:
                raise DataError(
                    f"The grammar has {len(grammar)} characters, and {MAX_CHARACTERS} are the most. Ask for a smaller "
                    "schema."
                )
            matcher = llguidance.LLMatcher(self._inner, grammar, log_level=0)
            if matcher.is_error():
                raise DataError(f"The grammar cannot be used: {_reason(matcher.get_error())}")
            self._compiled[grammar] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher


class _TokenTexts:
    """A tokenizer by the texts of its tokens, in the form that llguidance reads."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        texts = [tokenizer.decode([id], keep_special_tokens=True) for id in range(tokenizer.vocab_size)]
        if broken := [id for id, text in enumerate(texts) if "\ufffd" in text]:
            raise ConfigError(
                f"Grammars cannot bind the answers of this model: the bytes of token {broken[0]} are not known from "
                "its tokenizer. Ask for the format in the messages."
            )
        self.tokens = [text.encode() for text in texts]
        self.special_token_ids = sorted(tokenizer.special_ids)

    def __call__(self, text: bytes | str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(
            text if isinstance(text, str) else text.decode(errors="replace")
        ).tolist()
        return ids


def _reason(error: str) -> str:
    """Return an error of llguidance in one line, without its position: that counts lines of the rules around a form.

    The cause of an unreadable pattern is in a later line, behind `error:`.
    """
    first, *others = error.strip().splitlines()
    cause = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), "")
    return f"{POSITION.sub('', first)} {cause}".rstrip()
