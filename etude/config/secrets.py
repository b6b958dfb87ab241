"""Secrets are masked wherever configuration is shown: trees, YAML and error messages.

A value is a secret when its key says so (`api_key`, `hub.token`, `password`) or when it looks like one (`sk-…`, a JWT).
Keys that merely talk about tokens (`max_tokens`, `pad_token`, `token_budget`) are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["is_secret_key", "mask", "mask_text", "telling_name"]

MASK = "***"

_SECRET_WORDS = frozenset({"password", "passwd", "passphrase", "secret", "credential", "apikey", "authtoken", "token"})
_KEY_OWNERS = frozenset({"api", "access", "auth", "encryption", "private", "secret", "signing", "ssh"})
# A model's vocabulary has tokens too, and so have rates ("per token"): none of them is a secret.
_TOKEN_KINDS = frozenset(
    {
        "bos",
        "cls",
        "decoder",
        "end",
        "eos",
        "image",
        "mask",
        "next",
        "pad",
        "per",
        "sep",
        "special",
        "start",
        "stop",
        "unk",
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_LOOKS_SECRET = re.compile(
    r"\bsk-[\w-]{6,}"  # OpenAI, Anthropic and those who copied them
    r"|\bhf_(?=[A-Za-z]*\d)[A-Za-z0-9]{6,}|\bhf_[A-Za-z0-9]{20,}"  # Hugging Face; not words such as hf_format
    r"|\bgh[pousr]_\w{6,}|\bgithub_pat_\w{6,}"
    r"|\bAKIA[0-9A-Z]{12,}"
    r"|\bxox[a-z]-[\w-]{6,}"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]*"  # a JSON web token
    r"|(?<=\bBearer )[\w.~+/=-]{8,}",
    flags=re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:@]*):([^\s/@]+)@")
_FORTY_HEX = re.compile(r"\b[0-9a-f]{40}\b", flags=re.IGNORECASE)
_ASSIGNMENT = re.compile(r"""([\w.-]+)("?'?\s*=\s*|["']\s*:\s*)("[^"]*"|'[^']*'|[^\s,;{}\[\]]+)""")


def is_secret_key(key: str) -> bool:
    """Whether a key (dotted or not) names a secret by its last words."""
    *before, last = ["", *(word.lower() for word in _WORD.findall(key.rsplit(".", 1)[-1]))]
    if last in {"key", "keys"}:
        return before[-1] in _KEY_OWNERS if before else False
    if last == "token" and before[-1] in _TOKEN_KINDS:
        return False
    return last in _SECRET_WORDS or (last != "tokens" and last.removesuffix("s") in _SECRET_WORDS)


def mask_text(text: str) -> str:
    """Text with everything in it that looks like a secret, or is assigned to a secret key, shown as `***`."""
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
    text = _LOOKS_SECRET.sub(MASK, text)
    return _ASSIGNMENT.sub(_mask_assignment, text)


def mask(tree: Any, key: str = "") -> Any:
    """A copy of a plain tree with its secrets shown as `***`; `key` is the key that `tree` itself stands under."""
    if isinstance(tree, Mapping):
        return {name: mask(value, _key_below(key, str(name))) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [mask(value, key) for value in tree]
    if tree is None or isinstance(tree, bool) or tree == "":
        return tree
    if is_secret_key(key):
        return MASK
    return mask_text(_mask_hex(tree, key)) if isinstance(tree, str) else tree


def telling_name(path: str) -> str:
    """The name in a dotted path that says whether its value is secret: all that lies under a secret key is."""
    names = path.split(".")
    return next(filter(is_secret_key, names), names[-1])


def _key_below(key: str, name: str) -> str:
    """The key a value answers to: all that lies under a secret key is secret."""
    return key if is_secret_key(key) else name


def _mask_hex(value: str, key: str) -> str:
    words = [word.lower() for word in _WORD.findall(key)]
    return _FORTY_HEX.sub(MASK, value) if {"key", "keys"} & set(words) else value


def _mask_assignment(match: re.Match[str]) -> str:
    key, between, value = match.groups()
    return f"{key}{between}{MASK if is_secret_key(key) else _mask_hex(value, key)}"
