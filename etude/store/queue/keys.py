"""The keys of the store and the model endpoint, and the access that each grants. No key is stored: any process that
knows the admin key can verify them.

A key is a readable payload and a signature. Only the admin key can create signatures:

    etude.model.12.0.1790000000.Kb0…      calls the model as attempt 0 of rollout 12, until that second
    etude.reward.12.0.1790000000.p3J…     writes rewards and events of that attempt
    etude.runner.9aX…                     claims rollouts and reports their results
    etude.admin.w7c…                      allows everything; it creates and verifies all other keys

The signature is an HMAC-SHA256 over the payload, with the admin key. That one is random, unless the user chose it.
Expiry times are wall-clock times, since keys are sent to other machines.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast

from etude.errors import ConfigError, InvalidKeyError
from etude.running_time import stopped_time
from etude.store.queue.records import AttemptId

Scope: TypeAlias = Literal["admin", "runner", "model", "reward"]
ADMIN = "etude.admin"
MIN_KEY_CHARACTERS = 16
"""Smallest length of an admin key. A shorter one can be guessed."""
ADMIN_KEY, RUNNER_KEY = "admin.key", "runner.key"
"""Files in a store's directory with its two long-lived keys, so that all other keys stay valid after a restart. Only
the owner of the files can read them."""


class Grant(NamedTuple):
    """The access that a key grants."""

    scope: Scope
    attempt_id: AttemptId | None
    """The attempt of the key; None for keys that belong to no attempt."""

    @property
    def owner(self) -> Hashable:
        """The owner under which requests are counted. Both keys of an attempt have the same owner."""
        return self if self.attempt_id is None else self.attempt_id


class Keyring:
    """Creates and verifies keys with the admin key, the one that allows everything."""

    def __init__(self, admin: str = "") -> None:
        """admin: the admin key. Without one it is generated, and all keys end with the process."""
        if admin and not re.fullmatch(rf"[!-~]{{{MIN_KEY_CHARACTERS},}}", admin):
            raise ConfigError(
                f"The admin key of a store is {MIN_KEY_CHARACTERS} or more letters, digits and signs without a space, "
                "and this is not. Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        self.admin = admin or f"{ADMIN}.{secrets.token_urlsafe(32)}"

    @classmethod
    def load_or_create(cls, directory: Path, admin: str = "") -> Keyring:
        """Load the keys of a directory, or create them if it has none. admin: the admin key to use from now on."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / ADMIN_KEY
        if not admin and path.exists():
            admin = path.read_text(encoding="utf-8").strip()
        keyring = cls(admin)
        for name, text in ((ADMIN_KEY, keyring.admin), (RUNNER_KEY, keyring.runner)):
            _write_private(directory / name, text)
        return keyring

    def __repr__(self) -> str:
        return "Keyring(…)"

    @property
    def runner(self) -> str:
        """The key for runners on other machines."""
        return self._make_key("etude.runner")

    def model_key(self, key: AttemptId, expires_s: float) -> str:
        """Return a key with which an agent calls the model as this attempt, for `expires_s` seconds."""
        return self._attempt_key("model", key, expires_s)

    def reward_key(self, key: AttemptId, expires_s: float) -> str:
        """Return a key with which an agent writes rewards and events of this attempt, for `expires_s` seconds."""
        return self._attempt_key("reward", key, expires_s)

    def read(self, text: str) -> Grant:
        """Return the grant of a key. A key of another keyring, or an expired one, raises `InvalidKeyError`. Time in
        which this process was stopped, or the machine slept, does not count."""
        if hmac.compare_digest(text.encode(errors="replace"), self.admin.encode()):
            return Grant("admin", None)
        claims, _, signature = text.rpartition(".")
        is_signed = hmac.compare_digest(_sign(self.admin, claims).encode(), signature.encode(errors="replace"))
        if not is_signed or claims == ADMIN:
            raise InvalidKeyError(
                "The key was not made by this server. Use the key shown when the server started, or the key of the "
                "attempt. Keys made before a restart with another admin key are no longer valid."
            )
        _, scope_name, *rest = claims.split(".")
        scope = cast(Scope, scope_name)  # signed by this server
        if not rest:
            return Grant(scope, None)
        rollout, attempt, expires = map(int, rest)
        if (late := _now() - expires) > 0:
            raise InvalidKeyError(
                f"The {scope} key of attempt {attempt} of rollout {rollout} expired {late:.0f} s ago. It lasts as long "
                "as the attempt may take. Raise the limit timeout_s to give the attempt more time."
            )
        return Grant(scope, AttemptId(rollout, attempt))

    def read_first(self, texts: Sequence[str]) -> Grant:
        """Return the grant of the first valid key. If none is valid, raise the `InvalidKeyError` of the first."""
        refused = None
        for text in texts:
            try:
                return self.read(text)
            except InvalidKeyError as error:
                refused = refused or error
        raise refused or InvalidKeyError("This needs a key, as the header 'Authorization: Bearer KEY'.")

    def read_headers(self, headers: Mapping[bytes, bytes]) -> Grant | None:
        """Return the grant of the key in a request's headers, of any scope; None without a valid key."""
        values = (headers.get(name, b"").decode("latin-1") for name in (b"authorization", b"x-api-key"))
        try:
            return self.read_first(keys_from_headers(*values))
        except InvalidKeyError:
            return None

    def _attempt_key(self, scope: str, key: AttemptId, expires_s: float) -> str:
        return self._make_key(f"etude.{scope}.{key.rollout}.{key.attempt}.{int(_now() + expires_s)}")

    def _make_key(self, claims: str) -> str:
        return f"{claims}.{_sign(self.admin, claims)}"


def _now() -> float:
    """Return the time by which keys expire: the wall clock, less the time in which this process could not run."""
    return time.time() - stopped_time()


def keys_from_headers(authorization: str | None, api_key: str | None) -> list[str]:
    """Return the keys of a request in the order in which they are tried: `Authorization: Bearer …`, then
    `x-api-key`."""
    scheme, _, text = (authorization or "").partition(" ")
    texts = (text if scheme.lower() == "bearer" else "", api_key or "")
    return [text.strip() for text in texts if text.strip()]


def _sign(key: str, claims: str) -> str:
    signature = hmac.digest(key.encode(), claims.encode(errors="replace"), "sha256")
    return urlsafe_b64encode(signature).rstrip(b"=").decode()


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically."""
    if path.exists() and path.read_text(encoding="utf-8").strip() == text:
        return
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    new.replace(path)
