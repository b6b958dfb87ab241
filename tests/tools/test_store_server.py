"""`etude store`: its errors and its output. Joining it is tested in `tests/recipes/agents/test_remote_store.py`."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from etude.cli import main
from etude.store.http.server_thread import reachable_url
from etude.store.queue.keys import Keyring
from tests.joined import started
from tests.store.servers import new_database

KEY = "a-key-of-sixteen-letters-and-more"


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (["stores/mine", "--listen", "8700"], "", "is no address and port"),
        (["stores/mine", "--listen", "127.0.0.1:99999"], "", "has the port 99999"),
        (["stores/mine", "--listen", "0.0.0.0:0"], "", "needs an admin key of yours"),
        (["file"], "", "is a file; a store needs its own directory"),
        (["stores/mine", "--listen", "127.0.0.1:0"], "short", "16 or more letters"),
        (["stores/mine", "--listen", "127.0.0.1:0"], "with a space in its middle", "without a space"),
        (["stores/mine", "--listen", "nowhere.invalid:0"], KEY, "cannot listen on nowhere.invalid"),
    ],
)
def test_invalid_arguments_are_refused(
    words: list[str],
    key: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_STORE_KEY", key)
    (tmp_path / "file").write_text("")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    assert main(["store", *words]) == 2
    assert message in capsys.readouterr().err
    assert {number: signal.getsignal(number) for number in before} == before


AGENT_RUN = ["model.path=empty", "data.train=[rows.jsonl]", "agent.path=tests.recipes.players:talker", "directory=run"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["store", "stores/mine"], "--listen "),
        (["view", "."], "--listen "),
        (["serve", "empty"], "--listen "),
        (["train", "grpo", *AGENT_RUN], "agent.listen="),
    ],
)
def test_a_taken_address_is_refused_before_a_model_is_loaded(
    words: list[str],
    option: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 9}')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*words, *f"{option}127.0.0.1:{port}".split()]) == 2
    wanted = f"port {port}: Address already in use. Choose another port. `{option}127.0.0.1:0` picks a free port."
    assert wanted in " ".join(capsys.readouterr().err.split())


def test_a_given_key_is_never_shown_and_replaces_the_stored_one(tmp_path: Path) -> None:
    words = ["store", str(tmp_path / "mine"), "--listen", "127.0.0.1:0"]
    for place, key in enumerate(("", KEY)):
        with started(words, tmp_path / f"log-{place}", ETUDE_STORE_KEY=key) as store:
            store.says("A trainer:")
            store.send_signal(signal.SIGINT)
            assert store.ends() == 0 and "Stopped. 0 rollouts are queued and 0 under way" in store.said
    admin, runner = (tmp_path / "mine" / f"{who}.key" for who in ("admin", "runner"))
    assert admin.read_text() == KEY and KEY not in store.said and "printed only now" not in store.said
    assert {path.stat().st_mode & 0o777 for path in (admin, runner)} == {0o600}


@pytest.mark.integration
def test_the_keys_of_a_database_are_shown_on_request(tmp_path: Path) -> None:
    words, runner = ["store", new_database(), "--listen", "127.0.0.1:0"], Keyring(admin=KEY).runner
    for flags in ([], ["--keys"]):
        with started([*words, *flags], tmp_path / f"log{len(flags)}", ETUDE_STORE_KEY=KEY) as store:
            store.says("A trainer:")
            assert (KEY in store.said) == (runner in store.said) == bool(flags)
            assert ("`--keys` prints both" in store.said) != bool(flags)


def test_the_shown_address_is_one_of_this_machine() -> None:
    assert reachable_url("http://127.0.0.1:8700") == "http://127.0.0.1:8700"
    url = reachable_url("http://0.0.0.0:8700")
    assert url.startswith("http://") and url.endswith(":8700") and "0.0.0.0" not in url
    assert reachable_url("http://0.0.0.0:8700", "127.0.0.1") == "http://127.0.0.1:8700"
