"""Text to ids and back, from the files a Hugging Face model directory has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from etude.errors import ConfigError

__all__ = ["DecodeStream", "Tokenizer"]

Ids = NDArray[np.int32]

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REPLACEMENT_CHARACTER = "\ufffd"
LONG_TEXT = 4096
"""Characters of a text, from which on encoding it lets other threads go on."""
_MAX_HELD = 32  # tokens; a character has four bytes, so what is still unfinished after these is not text


class Tokenizer:
    """A fast tokenizer and what its model's files say of it: special tokens, where answers end, chat templates."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: tuple[int, ...],
        templates: Mapping[str, str],
        adds_bos: bool,
        directory: Path,
    ) -> None:
        self._inner = inner
        self._special_ids = frozenset(id for id, token in inner.get_added_tokens_decoder().items() if token.special)
        self.special_tokens = dict(special_tokens)
        """The special tokens by their names (`bos_token`, …), as templates know them."""
        self.eos_ids = eos_ids
        """The ids that end an answer: the tokenizer's own first, then those the model's generation settings add."""
        self.templates = dict(templates)
        """The chat templates by name; most models have `default` alone, some also `tool_use`."""
        self.adds_bos = adds_bos
        """Whether a plain text begins with the beginning-of-sequence token."""
        self.directory = directory
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        """How many ids there are: one more than the largest."""

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json` and the files beside it."""
        directory = Path(directory)
        inner = _load_tokenizer(directory)
        config = _read_json(directory / "tokenizer_config.json")
        special_config = {**_read_json(directory / "special_tokens_map.json"), **config}
        generation = _read_json(directory / "generation_config.json")
        for _, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
            if inner.token_to_id(token["content"]) is None:
                inner.add_tokens([tokenizers.AddedToken(**token)])
        special_tokens = {
            name: _token_text(special_config[name]) for name in _SPECIAL_TOKEN_NAMES if special_config.get(name)
        }
        bos = inner.token_to_id(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
        return cls(
            inner,
            special_tokens=special_tokens,
            eos_ids=_find_eos_ids(inner, special_tokens, generation, directory),
            templates=_read_templates(directory, config),
            adds_bos=bos is not None and inner.encode("").ids[:1] == [bos],
            directory=directory,
        )

    @property
    def template(self) -> str | None:
        """The chat template, if the model has one."""
        return self.templates.get("default")

    @property
    def bos_id(self) -> int | None:
        """The id that begins a sequence, if there is one."""
        return self._special_token_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        """The id of padding, if there is one. Nothing in Etude pads with it."""
        return self._special_token_id("pad_token")

    @property
    def unk_id(self) -> int | None:
        """The id for what has no id, if there is one."""
        return self._special_token_id("unk_token")

    @cached_property
    def vocab_hash(self) -> str:
        """A name for what its ids mean: alike where every token has the same id."""
        vocabulary = sorted(self._inner.get_vocab(with_added_tokens=True).items())
        return blake2b(json.dumps(vocabulary).encode(), digest_size=8).hexdigest()

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens: what `decode` leaves out."""
        return self._special_ids

    def encode(self, text: str, add_special_tokens: bool = False) -> Ids:
        """The ids of a text; with `special`, after the beginning-of-sequence token if the tokenizer puts one there.

        Special tokens written out in the text are read as such.
        """
        if len(text) < LONG_TEXT:
            ids = self._inner.encode(text, add_special_tokens=False).ids
        else:  # by the one call that lets other threads go on, and makes no more than ids
            ids = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        bos = self.bos_id if add_special_tokens and self.adds_bos else None
        return np.array(ids if bos is None else [bos, *ids], dtype=np.int32)

    def encode_after_ids(self, ids: Ids, text: str) -> Ids:
        """The ids of a text that follows these ids. Where those end with the end of an answer it is encoded too, for
        tokenizers that treat a text's beginning in a way of its own."""
        end = int(ids[-1]) if len(ids) and int(ids[-1]) in self.eos_ids else None
        if end is not None:
            with_end = self.encode(self.decode([end], keep_special_tokens=True) + text)
            if len(with_end) and with_end[0] == end:
                return with_end[1:]
        return self.encode(text)

    def encode_after_text(
        self, before: str, text: str, add_special_tokens: bool = False, *, before_ids: Ids | None = None
    ) -> Ids:
        """The ids of a text that follows another, which was encoded by itself: what would have to be written after it.

        Where the two encoded together begin with the ids of the first, they are the rest of those. Where a token would
        reach over the border, they are the text's own. known: the ids of the first, where they are.
        """
        first = self.encode(before, add_special_tokens) if before_ids is None else before_ids
        joined = self.encode(before + text, add_special_tokens)
        if len(first) <= len(joined) and np.array_equal(joined[: len(first)], first):
            return joined[len(first) :]
        return self.encode(text)

    def decode(self, ids: Iterable[int], keep_special_tokens: bool = False) -> str:
        """The text of ids, without special tokens unless they are wanted."""
        return self._inner.decode([int(id) for id in ids], skip_special_tokens=not keep_special_tokens)

    @property
    def eos_tokens(self) -> dict[str, int]:
        """The texts of the tokens that end an answer, with their ids."""
        tokens = {self.decode([id], keep_special_tokens=True): id for id in reversed(self.eos_ids)}
        return {text: tokens[text] for text in reversed(tokens) if text}

    def id_to_token(self, id: int) -> str | None:
        """A token as it stands in the vocabulary, which for a special token is its text; None for an id it lacks."""
        return self._inner.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, if it has one."""
        return self._inner.token_to_id(token)

    def decode_stream(self, keep_special_tokens: bool = False) -> DecodeStream:
        """Decode ids as they come."""
        return DecodeStream(
            lambda ids: self.decode(ids, keep_special_tokens), frozenset() if keep_special_tokens else self._special_ids
        )

    def _special_token_id(self, name: str) -> int | None:
        return self._inner.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None


class DecodeStream:
    """Text from ids that come one after another: the pieces, joined, are the text of all the ids.

    A character that is not whole yet is held back, until its last byte comes or `finish`. Bytes that never become a
    character are given out as U+FFFD once it is sure, so that a model that writes garbage costs no more than another.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped_ids: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._ids: list[int] = []  # the last piece, for decoders that look back, and what came since
        self._last_text = ""  # the text of the last piece
        self._last_size = 0  # how many ids the last piece has

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids make certain."""
        return "".join(self._step(int(id)) for id in ids if int(id) not in self._skipped_ids)

    def finish(self) -> str:
        """What was held back. The stream can then be used for another text."""
        text = self._decode(self._ids)[len(self._last_text) :]
        self._restart([])
        return text

    def _step(self, id: int) -> str:
        self._ids.append(id)
        text = self._decode(self._ids)
        new = text[len(self._last_text) :]
        if text.endswith(_REPLACEMENT_CHARACTER):
            if len(self._ids) - self._last_size < _MAX_HELD:
                return ""
            self._restart([])
        elif new:
            self._restart(self._ids[self._last_size :])
        return new

    def _restart(self, ids: list[int]) -> None:
        self._ids, self._last_size = ids, len(ids)
        self._last_text = self._decode(ids) if ids else ""


def _load_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """The tokenizer itself. Truncation and padding that its file may ask for are switched off: nothing is cut here."""
    path = directory / "tokenizer.json"
    if not directory.is_dir():
        raise ConfigError(f"There is no directory {directory} to read a tokenizer from; give a model's directory.")
    if not path.is_file():
        files = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
        raise ConfigError(
            f"The tokenizer in {directory} has no tokenizer.json (there is: {files}). Make one: load the directory "
            "with transformers.AutoTokenizer.from_pretrained and write it back with save_pretrained."
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{path} is not a tokenizer that can be read: {error}. Fetch the file again.") from error
    inner.no_truncation()
    inner.no_padding()
    return inner


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. Fetch the file again.") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} must hold a JSON object; it holds a value of type {type(data).__name__}. Fetch the file again."
        )
    return data


def _token_text(token: str | Mapping[str, Any]) -> str:
    """A token's text: files have it plain, or within a description of it."""
    return token if isinstance(token, str) else str(token["content"])


def _find_eos_ids(
    inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str], generation: Mapping[str, Any], directory: Path
) -> tuple[int, ...]:
    eos_token = special_tokens.get("eos_token")
    eos_id = inner.token_to_id(eos_token) if eos_token is not None else None
    if eos_token is not None and eos_id is None:
        raise ConfigError(
            f"The tokenizer in {directory} names {eos_token!r} as its end-of-sequence token, but its vocabulary has no "
            "such token. Correct `eos_token` in tokenizer_config.json."
        )
    generation_ids = generation.get("eos_token_id")
    ids = [eos_id, *(generation_ids if isinstance(generation_ids, list) else [generation_ids])]
    eos_ids = tuple(dict.fromkeys(id for id in ids if id is not None))
    if not eos_ids:
        raise ConfigError(
            f"The tokenizer in {directory} has no end-of-sequence token, so no answer could end: write `eos_token` "
            "into tokenizer_config.json, or `eos_token_id` into generation_config.json."
        )
    return eos_ids


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: files of their own come before those written into the tokenizer's configuration."""
    configured = config.get("chat_template")
    if isinstance(configured, str):
        configured = {"default": configured}
    elif isinstance(configured, list):
        configured = {entry["name"]: entry["template"] for entry in configured}
    templates: dict[str, str] = dict(configured or {})
    template_file = directory / "chat_template.jinja"
    if template_file.is_file():
        templates = {"default": template_file.read_text(encoding="utf-8")}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates
