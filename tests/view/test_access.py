"""The viewer answers only who has its address, from this machine, and its replies let a page reach nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from etude.cli import main
from tests.view.made import KEY, Viewer, write_metrics

FOREIGN = [
    {"host": "evil.example"},
    {"host": "127.0.0.1.evil.example:8720"},
    {"host": "[bad"},
    {"origin": "https://evil.example"},
    {"origin": "http://127.0.0.1:9999"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "script"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
]
OWN = [
    {"host": "localhost:9000"},
    {"host": "[::1]:8720"},
    {"origin": "http://127.0.0.1:8720", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"},
]


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Viewer:
    root = tmp_path_factory.mktemp("root")
    (root / "secret.txt").write_text("hidden words")
    write_metrics(root / "runs" / "mine", 2)
    return Viewer(root / "runs")


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], f"{KEY}x", KEY.upper(), "%2e%2e", "é"])
def test_every_path_needs_the_key(viewer: Viewer, key: str) -> None:
    for path in ("", "api/runs", "api/changes", "api/image?run=mine&task=0&image=0", "static/app.js", "nothing"):
        reply = viewer.ask(path, key=key)
        assert reply.status_code == 403 and "etude view" in reply.json()["error"], path


@pytest.mark.parametrize(
    ("path", "key", "sentence"), [("x<b>", KEY, "no page at /x&lt;b&gt;"), ("", "x", "The key in")]
)
def test_a_browser_is_told_by_a_page(viewer: Viewer, path: str, key: str, sentence: str) -> None:
    reply = viewer.ask(path, key=key, headers={"accept": "text/html,*/*"})
    assert reply.headers["content-type"].startswith("text/html") and sentence in reply.text


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_request_of_another_site_is_refused_though_it_has_the_key(viewer: Viewer, headers: dict[str, str]) -> None:
    assert viewer.ask("api/runs", headers=headers).status_code == 403


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_a_request_of_the_own_page_or_of_a_link_is_answered(viewer: Viewer, headers: dict[str, str]) -> None:
    assert viewer.ask("api/runs", headers=headers).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_reading_is_allowed(viewer: Viewer, method: str) -> None:
    assert viewer.ask("api/runs", method=method).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "static/../server.py",
        "static/%2e%2e/server.py",
        "static/..%2fserver.py",
        "static//etc/passwd",
        "static/vendor/../../server.py",
        "static/",
        "static/vendor",
        "api/run?run=../root",
        "api/run?run=..%2f..",
        "api/run?run=/etc",
        "api/run?run=mine/../../secret.txt",
        "api/run?run=",
    ],
)
def test_a_path_reaches_nothing_but_the_listed_files_and_runs(viewer: Viewer, path: str) -> None:
    reply = viewer.ask(path)
    assert reply.status_code == 404 and "hidden" not in reply.text and "import" not in reply.text


def test_every_reply_confines_its_page(viewer: Viewer) -> None:
    for path, key in (("", KEY), ("api/runs", KEY), ("static/index.html", KEY), ("nothing", KEY), ("", "wrong")):
        headers = viewer.ask(path, key=key).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert headers["referrer-policy"] == "no-referrer" and "access-control-allow-origin" not in headers


def test_pages_load_no_script_or_style_that_the_policy_forbids(viewer: Viewer) -> None:
    page = viewer.ask("").text
    assert "static/app.js" in page and "http" not in page.replace("http-equiv", "")
    assert page.count("<script") == page.count("<script src=") + page.count('<script type="module" src=')
    assert "<style" not in page and " style=" not in page and " onload=" not in page


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--listen", "0.0.0.0:8720"], "it only listens on this machine"),
        (["--listen", "8720"], "`--listen 8720` is no address and port"),
        (["nowhere"], "There is no directory nowhere"),
    ],
)
def test_a_command_that_cannot_work_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["view", *words, "--no-browser"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_is_refused_with_a_free_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["view", str(tmp_path), "--listen", listen, "--no-browser"]) == 2
    assert "`--listen 127.0.0.1:0`" in capsys.readouterr().err
