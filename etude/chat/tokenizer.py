"""Text to ids and back, from the files of a Hugging Face model directory."""

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

from etude.chat.grammar import GrammarCompiler
from etude.errors import ConfigError

Ids = NDArray[np.int32]

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REPLACEMENT_CHARACTER = "\ufffd"
LONG_TEXT = 4096
"""Characters of a text from which on encoding releases the interpreter lock."""
_MAX_HELD = 32  # tokens; a character has at most four bytes, so these are not text if still incomplete


class Tokenizer:
    """A fast tokenizer, with its model's special tokens, end tokens and chat templates."""

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
        self.special_ids = frozenset(id for id, token in inner.get_added_tokens_decoder().items() if token.special)
        """The ids of all special tokens, which `decode` leaves out."""
        self.special_tokens = dict(special_tokens)
        """The special tokens by name (`bos_token`, …), as templates use them."""
        self.eos_ids = eos_ids
        """The ids that end an answer: first the tokenizer's own, then those of the model's generation config."""
        self.templates = dict(templates)
        """The chat templates by name. Most models only have `default`; some also have `tool_use`."""
        self.adds_bos = adds_bos
        """True if a plain text begins with the beginning-of-sequence token."""
        self.directory = directory
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        """The number of ids: one more than the largest."""

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
        """The default chat template, if the model has one."""
        return self.templates.get("default")

    @property
    def bos_id(self) -> int | None:
        """The beginning-of-sequence id, if there is one."""
        return self._special_token_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        """The padding id, if there is one. Etude does not pad with it."""
        return self._special_token_id("pad_token")

    @cached_property
    def vocab_hash(self) -> str:
        """A hash of the vocabulary: equal if every token has the same id."""
        vocabulary = sorted(self._inner.get_vocab(with_added_tokens=True).items())
        return blake2b(json.dumps(vocabulary).encode(), digest_size=8).hexdigest()

    def encode(self, text: str, add_special_tokens: bool = False) -> Ids:
        """Return the ids of a text. With `add_special_tokens` they begin with the beginning-of-sequence token, if the
        tokenizer adds one.

        Special tokens within the text are encoded as such.
        """
        if len(text) < LONG_TEXT:
            ids = self._inner.encode(text, add_special_tokens=False).ids
        else:  # this call releases the interpreter lock, and only computes ids
            ids = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        bos = self.bos_id if add_special_tokens and self.adds_bos else None
        return np.array(ids if bos is None else [bos, *ids], dtype=np.int32)

    def encode_after_ids(self, ids: Ids, text: str) -> Ids:
        """Return the ids of a text that follows these ids. If those end with an end token, it is encoded too: some
        tokenizers treat the beginning of a text differently."""
        end = int(ids[-1]) if len(ids) and int(ids[-1]) in self.eos_ids else None
        if end is not None:
            with_end = self.encode(self.decode([end], keep_special_tokens=True) + text)
            if len(with_end) and with_end[0] == end:
                return with_end[1:]
        return self.encode(text)

    def encode_after_text(
        self, before: str, text: str, add_special_tokens: bool = False, *, before_ids: Ids | None = None
    ) -> Ids:
        """Return the ids of a text that follows another text, which was encoded by itself.

        If the ids of both together begin with those of the first, the result is the rest of them. If a token would span
        the boundary, the text is encoded by itself. before_ids: the ids of the first text, if they are known.
        """
        first = self.encode(before, add_special_tokens) if before_ids is None else before_ids
        joined = self.encode(before + text, add_special_tokens)
        if len(first) <= len(joined) and np.array_equal(joined[: len(first)], first):
            return joined[len(first) :]
        return self.encode(text)

    def decode(self, ids: Iterable[int], keep_special_tokens: bool = False) -> str:
        """Return the text of ids, by default without special tokens."""
        return self._inner.decode([int(id) for id in ids], skip_special_tokens=not keep_special_tokens)

    @property
    def eos_tokens(self) -> dict[str, int]:
        """The texts of the end tokens, with their ids."""
        tokens = {self.decode([id], keep_special_tokens=True): id for id in reversed(self.eos_ids)}
        return {text: tokens[text] for text in reversed(tokens) if text}

    def id_to_token(self, id: int) -> str | None:
        """Return a token as it is in the vocabulary, which for a special token is its text; None for an unknown id."""
        return self._inner.id_to_token(id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token; None if it is not in the vocabulary."""
        return self._inner.token_to_id(token)

    def to_json(self) -> str:
        """Return the tokenizer in the form of `tokenizer.json`."""
        return self._inner.to_str()

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The grammars that answers may be held to."""
        return GrammarCompiler(self)

    def decode_stream(self, keep_special_tokens: bool = False) -> DecodeStream:
        """Return a decoder of ids that come one by one."""
        return DecodeStream(
            lambda ids: self.decode(ids, keep_special_tokens), frozenset() if keep_special_tokens else self.special_ids
        )

    def _special_token_id(self, name: str) -> int | None:
        return self._inner.token_to_id(self.special_tokens[name]) if name in self.special_tokens else None


class DecodeStream:
    """Decodes ids that come one by one: the joined pieces equal the text of all ids.

    An incomplete character is held back until its last byte comes, or until `finish`. Bytes that cannot become a
    character are returned as U+FFFD as soon as that is certain, so that invalid text does not slow the decoder down.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped_ids: frozenset[int] = frozenset()) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._ids: list[int] = []  # the last piece, for decoders that look back, and the ids since
        self._last_text = ""  # the text of the last piece
        self._last_size = 0  # the number of ids of the last piece

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these ids complete."""
        return "".join(self._step(int(id)) for id in ids if int(id) not in self._skipped_ids)

    def finish(self) -> str:
        """Return the text that was held back. The stream can then be used for another text."""
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
        self._ids = ids
        self._last_size = len(ids)
        self._last_text = self._decode(ids) if ids else ""


def _load_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    """Load the tokenizer, and switch off the truncation and padding that its file may request."""
    path = directory / "tokenizer.json"
    if not directory.is_dir():
        raise ConfigError(f"The tokenizer's directory {directory} does not exist. Give a model's directory.")
    if not path.is_file():
        files = ", ".join(sorted(path.name for path in directory.iterdir())) or "nothing"
        raise ConfigError(
            f"The tokenizer in {directory} has no tokenizer.json (its files: {files}). Create one: load the directory "
            "with transformers.AutoTokenizer.from_pretrained, and write it back with save_pretrained."
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"The tokenizer file {path} cannot be read: {error}. Download it again.") from error
    inner.no_truncation()
    inner.no_padding()
    return inner


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. Download it again.") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path} must hold a JSON object; it holds a value of type {type(data).__name__}. Download it again."
        )
    return data


def _token_text(token: str | Mapping[str, Any]) -> str:
    """Return a token's text: files have it as a string, or within an object."""
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
            f"The tokenizer in {directory} has no end-of-sequence token, so no answer could end. Write `eos_token` "
            "into tokenizer_config.json, or `eos_token_id` into generation_config.json."
        )
    return eos_ids


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. Separate files take precedence over the tokenizer's configuration."""
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
