"""A key opens what it says, for as long as it says, and nothing else."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, InvalidKeyError
from etude.store.queue.keys import Grant, Keyring
from etude.store.queue.rollout_queue import AttemptId

KEYRING = Keyring("0123456789abcdef0123456789abcdef")
MODEL = KEYRING.model_key(AttemptId(12, 3), 7 * 24 * 3600)


def test_a_key_has_its_scope() -> None:
    assert KEYRING.read(KEYRING.admin) == Grant("admin", None)
    assert KEYRING.read(KEYRING.runner) == Grant("runner", None)
    assert KEYRING.read(MODEL) == Grant("model", AttemptId(12, 3))
    assert KEYRING.read(KEYRING.reward_key(AttemptId(2**63 - 1, 0), 60)) == Grant("reward", AttemptId(2**63 - 1, 0))
    assert MODEL.startswith("etude.model.12.3.") and re.fullmatch(r"[A-Za-z0-9._-]+", MODEL), "fit for a header"


def test_the_admin_key_makes_and_reads_all_other_keys() -> None:
    other = Keyring(KEYRING.admin)
    assert other.read(MODEL) == KEYRING.read(MODEL) and other.runner == KEYRING.runner and other.admin == KEYRING.admin
    assert KEYRING.read(other.reward_key(AttemptId(12, 3), 60)).attempt_id == AttemptId(12, 3)
    chosen = Keyring("chosen-by-another")
    assert chosen.read("chosen-by-another") == Grant("admin", None)
    with pytest.raises(InvalidKeyError):
        chosen.read(KEYRING.runner)
    with pytest.raises(InvalidKeyError):  # the word admin with the signature of other keys opens nothing
        KEYRING.read(KEYRING._make_key("etude.admin"))


def test_a_directory_keeps_its_keys(tmp_path: Path) -> None:
    first, again = Keyring.load_or_create(tmp_path / "kept"), Keyring.load_or_create(tmp_path / "kept")
    assert again.admin == first.admin and again.read(first.runner).scope == "runner"
    other = Keyring.load_or_create(tmp_path / "kept", admin="chosen-by-another")
    assert Keyring.load_or_create(tmp_path / "kept").admin == other.admin == "chosen-by-another"
    assert (tmp_path / "kept" / "runner.key").read_text() == other.runner != first.runner


def test_keys_of_another_admin_key_are_invalid() -> None:
    other = Keyring("fedcba9876543210fedcba9876543210")
    for key in (KEYRING.admin, KEYRING.runner, MODEL):
        with pytest.raises(InvalidKeyError, match="was not made by this server"):
            other.read(key)
    assert Keyring().admin != Keyring().admin, "each makes up its own"


@pytest.mark.parametrize(
    "change",
    [
        ("model", "reward"),
        ("model", "admin"),
        (".12.", ".13."),
        (".12.3.", ".12.4."),
        (".12.3.", ".123.."),
        ("etude.", ""),
        ("etude.", "etude.etude."),
    ],
)
def test_another_payload_needs_another_signature(change: tuple[str, str]) -> None:
    with pytest.raises(InvalidKeyError):
        KEYRING.read(MODEL.replace(*change))


def test_a_later_expiry_needs_another_signature() -> None:
    *claims, expires, signature = MODEL.split(".")
    with pytest.raises(InvalidKeyError):
        KEYRING.read(".".join([*claims, str(int(expires) + 1), signature]))


def test_the_signature_of_one_key_fits_no_other() -> None:
    signatures = [
        key.rpartition(".")[2] for key in (KEYRING.admin, KEYRING.runner, KEYRING.reward_key(AttemptId(12, 3), 60))
    ]
    for signature in signatures:
        with pytest.raises(InvalidKeyError):
            KEYRING.read(f"{MODEL.rpartition('.')[0]}.{signature}")


@given(st.integers(0, len(MODEL) - 1), st.characters())
def test_a_key_with_a_changed_character_is_invalid(place: int, character: str) -> None:
    changed = MODEL[:place] + character + MODEL[place + 1 :]
    if changed == MODEL:
        assert KEYRING.read(changed).scope == "model"
    else:
        with pytest.raises(InvalidKeyError):
            KEYRING.read(changed)


@given(st.text() | st.text().map(lambda text: f"etude.admin.{text}"))
def test_other_text_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(InvalidKeyError, match="was not made by this server"):
        KEYRING.read(text)


def test_the_signature_covers_all_its_bits() -> None:
    """Base64 has spare bits at its end: another text that decodes to the same signature is refused too."""
    claims, _, signature = MODEL.rpartition(".")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    twin = signature[:-1] + alphabet[alphabet.index(signature[-1]) ^ 1]
    assert base64.urlsafe_b64decode(twin + "=") == base64.urlsafe_b64decode(signature + "=") and twin != signature
    with pytest.raises(InvalidKeyError):
        KEYRING.read(f"{claims}.{twin}")


def test_a_key_expires_at_its_time() -> None:
    old = KEYRING.reward_key(AttemptId(7, 1), -5)
    with pytest.raises(InvalidKeyError, match=r"The reward key of attempt 1 of rollout 7 expired \d+ s ago"):
        KEYRING.read(old)
    short = KEYRING.model_key(AttemptId(7, 1), 2)
    assert KEYRING.read(short).attempt_id == AttemptId(7, 1)
    deadline = time.monotonic() + 10
    with pytest.raises(InvalidKeyError, match="expired"):
        while time.monotonic() < deadline:
            KEYRING.read(short)
            time.sleep(0.05)


def test_a_stop_before_a_key_was_made_does_not_extend_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.store.queue.keys.stopped_time", lambda: 100.0)
    with pytest.raises(InvalidKeyError, match="expired"):
        KEYRING.read(KEYRING.reward_key(AttemptId(7, 1), -5))
    kept = KEYRING.reward_key(AttemptId(7, 1), 5)
    monkeypatch.setattr("etude.store.queue.keys.stopped_time", lambda: 200.0)
    assert KEYRING.read(kept).attempt_id == AttemptId(7, 1), "a stop while it lasts does"


def test_a_key_that_can_be_guessed_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ConfigError, match="is 16 or more letters"):
        Keyring("12345")
    assert "0123456789abcdef" not in repr(KEYRING)
