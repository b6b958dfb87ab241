"""Masking of secrets in all printed configuration: trees, YAML and error messages.

A value is a secret if its key names one (`api_key`, `hub.token`, `password`) or if it looks like one (`sk-…`, a JWT).
Keys about a model's tokens (`max_tokens`, `pad_token`, `token_budget`) and sort keys are not secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET_WORDS = frozenset(
    {
        *("password", "passwd", "passphrase", "pwd", "secret", "credential", "apikey", "token", "authtoken"),
        *("auth", "authorization", "cookie", "dsn"),
    }
)
_SECRET_PAIRS = frozenset({("connection", "string"), ("secret", "value"), ("secret", "id")})
# A key is a secret, unless rows are found, grouped or ordered by it.
_KEY_KINDS = frozenset(
    {
        *("answer", "cache", "column", "config", "data", "dict", "field", "foreign", "group", "hash", "index", "input"),
        *("item", "join", "label", "lookup", "map", "message", "metric", "order", "output", "partition", "primary"),
        *("prompt", "public", "query", "record", "reward", "row", "sample", "shard", "sort", "state", "task", "text"),
        *("tree", "unique", "value"),
    }
)
# Tokens of a model's vocabulary and of rates ("per token") are not secrets.
_TOKEN_KINDS = frozenset(
    {
        *("bos", "cls", "decoder", "end", "eos", "image", "mask", "next", "pad", "per", "sep", "special", "start"),
        *("stop", "unk"),
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_LOOKS_SECRET = re.compile(
    r"\bsk-[\w-]{6,}"  # OpenAI, Anthropic and others with this format
    r"|\bhf_(?=[A-Za-z]*\d)[A-Za-z0-9]{6,}|\bhf_[A-Za-z0-9]{20,}"  # Hugging Face; not words such as hf_format
    r"|\bgh[pousr]_\w{6,}|\bgithub_pat_\w{6,}"
    r"|\bAKIA[0-9A-Z]{12,}"
    r"|\bxox[a-z]-[\w-]{6,}"
    r"|\beyJ[\w-]+\.[\w-]+\.[\w-]*"  # a JSON web token
    r"|\bglpat-[\w-]{6,}|\bnvapi-[\w-]{6,}"
    r"|\bAIza[\w-]{12,}"  # Google
    r"|\b[rs]k_(?:live|test)_\w{4,}"  # Stripe
    r"|\bnpm_(?=[A-Za-z]*\d)[A-Za-z0-9]{6,}|\bnpm_[A-Za-z0-9]{20,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]+"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}"
    r"|(?<=\bBasic )(?-i:(?=\S+[A-Z])[\w+/]{6,}={0,2})"  # base64, unlike any word
    r"|-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)",
    flags=re.IGNORECASE | re.DOTALL,
)
_URL_PASSWORD = re.compile(r"(?<=://)([^\s/:]*):([^\s/]+)@")
_URL_TOKEN = re.compile(r"\b(https?://)[^\s/:@]+@", flags=re.IGNORECASE)
_FORTY_HEX = re.compile(r"\b[0-9a-f]{40}\b", flags=re.IGNORECASE)
_READ_FROM_FILE = re.compile(r"\$\(cat [^()$`;&|<>]+\)")
"""A shell substitution that reads a file: a path, and no secret."""
_VALUE = r"""((?:(?:basic|bearer|digest|token)[ \t]+)?)("[^"]*"|'[^']*'|\$\(cat [^()]*\)|[^\s,;{}\[\]]+)"""
# A name begins where no other one goes on. Without that, a long run of letters takes the square of its length.
_NAME = r"(?<![\w.-])([\w.-]+)"
_ASSIGNMENT = re.compile(_NAME + r"""("?'?\s*=\s*|["']\s*:\s*)""" + _VALUE, flags=re.IGNORECASE)
_YAML_ASSIGNMENT = re.compile(_NAME + r"""([ \t]*:[ \t]+)""" + _VALUE, flags=re.IGNORECASE)


def is_secret_key(key: str) -> bool:
    """Return True if the last words of a key (dotted or not) name a secret."""
    words = [word.lower() for word in _WORD.findall(key.rsplit(".", 1)[-1])]
    before, last = ["", "", *words][-2:]
    if last in {"key", "keys"}:
        return before not in {"", *_KEY_KINDS}
    if last == "token" and before in _TOKEN_KINDS:
        return False
    if (before, last) in _SECRET_PAIRS:
        return True
    return last in _SECRET_WORDS or (last != "tokens" and last.removesuffix("s") in _SECRET_WORDS)


def mask_text(text: str, *, yaml: bool = True) -> str:
    """Replace everything that looks like a secret, or is assigned to a secret key, by `***`.

    With `yaml`, `key: value` is an assignment too. Error sentences need `yaml=False`: there, a message follows the
    path and the colon.
    """
    text = _URL_PASSWORD.sub(rf"\1:{MASK}@", text)
    text = _URL_TOKEN.sub(rf"\1{MASK}@", text)
    text = _LOOKS_SECRET.sub(MASK, text)
    text = _ASSIGNMENT.sub(_mask_assignment, text)
    return _YAML_ASSIGNMENT.sub(_mask_assignment, text) if yaml else text


def mask(tree: Any, key: str = "") -> Any:
    """Return a copy of a plain tree with masked secrets; `key` is the key of `tree` itself."""
    if isinstance(tree, Mapping):
        # A secret key decides for everything below it.
        return {name: mask(value, key if is_secret_key(key) else str(name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [mask(value, key) for value in tree]
    if tree is None or isinstance(tree, bool) or tree == "":
        return tree
    if is_secret_key(key):
        return MASK
    return mask_text(_mask_hex(tree, key)) if isinstance(tree, str) else tree


def find_secret_key(path: str) -> str:
    """Return the secret key in a dotted path, or the last name. Everything below a secret key is secret."""
    names = path.split(".")
    return next(filter(is_secret_key, names), names[-1])


def _mask_hex(value: str, key: str) -> str:
    words = [word.lower() for word in _WORD.findall(key)]
    return _FORTY_HEX.sub(MASK, value) if {"key", "keys"} & set(words) else value


def _mask_assignment(match: re.Match[str]) -> str:
    key, separator, scheme, value = match.groups()
    if _READ_FROM_FILE.fullmatch(value):
        return match[0]
    return f"{key}{separator}{scheme}{MASK if is_secret_key(key) else _mask_hex(value, key)}"
