"""Keys: who may do what at the desk and the model endpoint. Nothing is stored, so any process that knows the secret
reads them.

A key is a sentence that everybody may read, and a seal that only the admin key makes:

    etude.model.12.0.1790000000.Kb0…      calls the model as attempt 0 of rollout 12, until that second
    etude.reward.12.0.1790000000.p3J…     writes what that attempt earned, and its events
    etude.runner.9aX…                     claims rollouts and hands them in
    etude.admin.w7c…                      may do everything, and therefore makes and reads all others

The seal is an HMAC-SHA256 over the sentence before it; that of the admin key is made by a secret, or somebody chose the
key. Times are those of the clock on the wall, as keys go to other machines.
"""

from __future__ import annotations

import hmac
import os
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from etude.errors import ConfigError, InvalidKeyError
from etude.store.rollout_queue import AttemptId

__all__ = ["ADMIN_KEY", "RUNNER_KEY", "Grant", "Keyring", "Scope", "keys_from_headers"]

Scope: TypeAlias = Literal["admin", "runner", "model", "reward"]
SCOPES: dict[str, Scope] = {scope: scope for scope in get_args(Scope)}
ADMIN = "etude.admin"
MIN_SECRET_BYTES = 16
"""Bytes: fewer can be guessed."""
ADMIN_KEY, RUNNER_KEY = "admin.key", "runner.key"
"""Files in a directory: the two keys that outlast a process, so that all others stay good too. Nobody else may read
them."""


class Grant(NamedTuple):
    """What a key allows."""

    scope: Scope
    attempt_id: AttemptId | None
    """The attempt it speaks for; None for those that speak for none."""

    @property
    def owner(self) -> Hashable:
        """Under which its requests are counted: both keys of an attempt are one owner."""
        return self if self.attempt_id is None else self.attempt_id


class Keyring:
    """Makes keys and reads them, with one secret. Without one it makes up its own, and its keys end with it."""

    def __init__(self, secret: bytes | None = None, *, admin: str = "") -> None:
        """admin: the admin key, of whoever has that in place of the secret."""
        if admin:
            if len(admin) < MIN_SECRET_BYTES or not admin.isascii() or not admin.isprintable() or " " in admin:
                raise ConfigError(
                    f"The admin key of a store is {MIN_SECRET_BYTES} or more letters, digits and signs without a "
                    "space, and this is not. "
                    "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
                )
            self._admin = admin
            return
        if secret is not None and len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"The secret of the keys has {len(secret)} bytes, and one below {MIN_SECRET_BYTES} can be guessed. "
                "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        self._admin = f"{ADMIN}.{_sign(secrets.token_bytes(32) if secret is None else secret, ADMIN)}"

    @classmethod
    def load_or_create(cls, directory: Path, admin: str = "") -> Keyring:
        """The keys that a directory keeps, made if it has none. admin: the key that it is to have from now on."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / ADMIN_KEY
        if not admin and path.exists():
            admin = path.read_text(encoding="utf-8").strip()
        keyring = cls(admin=admin)
        for name, text in ((ADMIN_KEY, keyring.admin), (RUNNER_KEY, keyring.runner)):
            _write_private(directory / name, text)
        return keyring

    def __repr__(self) -> str:
        return "Keyring(…)"

    @property
    def admin(self) -> str:
        """The key that may do everything."""
        return self._admin

    @property
    def runner(self) -> str:
        """The key that runners on other machines come with."""
        return self._make_key("etude.runner")

    def model_key(self, key: AttemptId, expires_s: float) -> str:
        """Lets an agent call the model as this attempt, for so many seconds."""
        return self._attempt_key("model", key, expires_s)

    def reward_key(self, key: AttemptId, expires_s: float) -> str:
        """Lets it write rewards and events of this attempt, for so many seconds."""
        return self._attempt_key("reward", key, expires_s)

    def read(self, text: str) -> Grant:
        """What a key allows. One that was not made with this secret, or that is too old, is a `InvalidKeyError`."""
        if hmac.compare_digest(text.encode(errors="replace"), self._admin.encode()):
            return Grant("admin", None)
        claims, _, signature = text.rpartition(".")
        is_signed = hmac.compare_digest(
            _sign(self._admin.encode(), claims).encode(), signature.encode(errors="replace")
        )
        if not is_signed or claims == ADMIN:
            raise InvalidKeyError(
                "The key was not made here. Give the one that was shown when the server started, or that the attempt "
                "was given; keys of a server that was started anew with another secret are no longer good."
            )
        _, scope_name, *rest = claims.split(".")
        scope = SCOPES[scope_name]
        if not rest:
            return Grant(scope, None)
        rollout, attempt, expires = map(int, rest)
        if (late := time.time() - expires) > 0:
            raise InvalidKeyError(
                f"The {scope} key of attempt {attempt} of rollout {rollout} expired {late:.0f} s ago: it lasts as long "
                "as an attempt may take. Allow the attempt more time with its limit timeout_s."
            )
        return Grant(scope, AttemptId(rollout, attempt))

    def read_first(self, texts: Sequence[str]) -> Grant:
        """Return what the first good key of these allows; raise the `InvalidKeyError` of the first where none is."""
        refused = None
        for text in texts:
            try:
                return self.read(text)
            except InvalidKeyError as error:
                refused = refused or error
        raise refused or InvalidKeyError("This needs a key, as the header 'Authorization: Bearer KEY'.")

    def read_headers(self, headers: Mapping[bytes, bytes]) -> Grant | None:
        """What the key allows that the headers of a request bring, whatever it opens; None without a good one."""
        values = (headers.get(name, b"").decode("latin-1") for name in (b"authorization", b"x-api-key"))
        try:
            return self.read_first(keys_from_headers(*values))
        except InvalidKeyError:
            return None

    def _attempt_key(self, scope: str, key: AttemptId, expires_s: float) -> str:
        return self._make_key(f"etude.{scope}.{key.rollout}.{key.attempt}.{int(time.time() + expires_s)}")

    def _make_key(self, claims: str) -> str:
        return f"{claims}.{_sign(self._admin.encode(), claims)}"


def keys_from_headers(authorization: str | None, api_key: str | None) -> list[str]:
    """The keys that a request brings, in the order in which they are tried: `Authorization: Bearer …`, `x-api-key`."""
    scheme, _, text = (authorization or "").partition(" ")
    texts = (text if scheme.lower() == "bearer" else "", api_key or "")
    return [text.strip() for text in texts if text.strip()]


def _sign(secret: bytes, claims: str) -> str:
    signature = hmac.digest(secret, claims.encode(errors="replace"), "sha256")
    return urlsafe_b64encode(signature).rstrip(b"=").decode()


def _write_private(path: Path, text: str) -> None:
    """Have a file hold this, which only its owner reads; it is whole or not there."""
    if path.exists() and path.read_text(encoding="utf-8").strip() == text:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
