"""What looks like a secret is masked, and what only talks like one is not."""

from __future__ import annotations

import pytest

from etude.config.secrets import is_secret_key, mask, mask_text, telling_name


@pytest.mark.parametrize(
    "key",
    [
        *(
            "api_key",
            "apiKey",
            "OPENAI_API_KEY",
            "apikey",
            "token",
            "hf_token",
            "access-token",
            "hub.token",
            "password",
        ),
        *("db_passwords", "client_secret", "secrets", "aws_credentials", "secret_key", "private_key", "accessKey"),
    ],
)
def test_secret_keys(key: str) -> None:
    assert is_secret_key(key)
    assert mask({key: "value"}) == {key: "***"}


@pytest.mark.parametrize(
    "key",
    [
        *(
            "max_tokens",
            "tokenizer",
            "token_budget",
            "tokens",
            "pad_token",
            "eos_token",
            "loss_per_token",
            "key",
            "keys",
        ),
        *("monkey", "group_key", "secretary", "password_file", "token.path", "", "1"),
    ],
)
def test_keys_that_are_not_secret(key: str) -> None:
    assert not is_secret_key(key)
    assert mask({key: "value"}) == {key: "value"}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("use sk-proj-abc123DEF now", "use *** now"),
        ("hf_abcDEF123456", "***"),
        ("ghp_abcdef123456", "***"),
        ("github_pat_abcdef123456", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("xoxb-12345-abcdef", "***"),
        ("eyJhbGciOi.eyJzdWIiOi.abc-_1", "***"),
        ("Authorization: Bearer abcdef123456", "Authorization: Bearer ***"),
        ("postgres://me:hunter2@host/db", "postgres://me:***@host/db"),
        ("api_key=hunter2 max_tokens=5", "api_key=*** max_tokens=5"),
        ("""{"password": "a b", "x": "y"}""", """{"password": ***, "x": "y"}"""),
        (f"wandb_key={'a1' * 20}", "wandb_key=***"),
    ],
)
def test_text_is_masked_where_it_looks_secret(text: str, masked: str) -> None:
    assert mask_text(text) == masked


@pytest.mark.parametrize(
    "text", ["hf_safetensors", "sk-learn", "task-abcdefghij", "http://host:80/a@b", "a" * 39, "b" * 40]
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert mask_text(text) == text


def test_a_tree_is_masked_by_key_by_value_and_below_a_secret_key() -> None:
    tree = {
        "max_tokens": 5,
        "endpoint": {"api_key": "x", "url": "https://a:b@c"},
        "credentials": {"user": "me", "pins": [1, 2], "on": True, "none": None, "empty": ""},
        "headers": ("Bearer abcdefgh12",),
        "wandb_key": "0123456789abcdef" * 2 + "01234567",
        "commit": "0123456789abcdef" * 2 + "01234567",
        3: "three",
    }
    assert mask(tree) == {
        "max_tokens": 5,
        "endpoint": {"api_key": "***", "url": "https://a:***@c"},
        "credentials": {"user": "***", "pins": ["***", "***"], "on": True, "none": None, "empty": ""},
        "headers": ["Bearer ***"],
        "wandb_key": "***",
        "commit": tree["commit"],
        3: "three",
    }


def test_the_name_that_tells_of_a_path() -> None:
    assert telling_name("endpoint.credentials.user") == "credentials"
    assert telling_name("loss.clip_low") == "clip_low"
