"""Values that look like secrets are masked; text that only mentions secrets is not."""

from __future__ import annotations

import pytest

from etude.config.secrets import find_secret_key, is_secret_key, mask, mask_text


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
        *(
            "openai_key",
            "wandb_key",
            "license_key",
            "service_account_key",
            "api_keys",
            "auth",
            "Authorization",
            "db_pwd",
        ),
        *("sentry_dsn", "connection_string", "session_cookie", "secret_value", "client_secret_id"),
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
        *("key_value_heads", "num_key_value_heads", "sort_key", "primary_key", "metric_keys", "author", "pad_token_id"),
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
        ("postgres://u:p@ss@h/db", "postgres://u:***@h/db"),
        ("https://abc123@github.com/a/b", "https://***@github.com/a/b"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/services/***"),
        ("glpat-abcDEF12345 nvapi-abc_DEF-123", "*** ***"),
        ("AIzaSyA-1234567890abcdef", "***"),
        ("sk_live_abcdef123456 rk_test_abcdef", "*** ***"),
        ("npm_abcDEF123456", "***"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("send Basic dXNlcjpwYXNz", "send Basic ***"),
        ("a -----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY----- b", "a *** b"),
        ("password: hunter2", "password: ***"),
        ("{password: hunter2, x: y}", "{password: ***, x: y}"),
        ("api_key=hunter2 max_tokens=5", "api_key=*** max_tokens=5"),
        ("""{"password": "a b", "x": "y"}""", """{"password": ***, "x": "y"}"""),
        (f"wandb_key={'a1' * 20}", "wandb_key=***"),
        ("STORE_KEY=$(cat a.key; echo hunter2) x", "STORE_KEY=*** x"),
        ("STORE_KEY=$(echo hunter2)", "STORE_KEY=*** hunter2)"),
        ("STORE_KEY=$(cat sk-abcdefghij)", "STORE_KEY=$(cat ***)"),
    ],
)
def test_text_is_masked_where_it_looks_secret(text: str, masked: str) -> None:
    assert mask_text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        *(
            "npm_install",
            "Basic instructions",
            "max_tokens: 5",
            "tokenizer: gpt2",
            "ssh://git@github.com/a",
            "risk_live",
        ),
        *("ETUDE_STORE_KEY=$(cat runs/mine/runner.key) etude runner", "ETUDE_STORE_KEY=$(cat '/my runs/admin.key') x"),
        *("hf_safetensors", "sk-learn", "task-abcdefghij", "http://host:80/a@b", "a" * 39, "b" * 40, "c" * 300_000),
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert mask_text(text) == text


def test_an_error_about_a_path_is_not_masked() -> None:
    assert mask_text("api_key: must be even; password=hunter2", yaml=False) == "api_key: must be even; password=***"


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


def test_the_secret_part_of_a_path_is_found() -> None:
    assert find_secret_key("endpoint.credentials.user") == "credentials"
    assert find_secret_key("loss.clip_low") == "clip_low"
