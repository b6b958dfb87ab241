"""The first steps of a new user: the wheel that `pip install etude` brings, `etude demo`, and the commands that the
README shows for its run directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from etude.cli import main
from etude.recipes.run.directory import read_metrics
from tests.house.documents import ROOT, commands

pytestmark = [pytest.mark.integration, pytest.mark.smoke]

WAITS = {"chat", "serve", "view"}
"""These wait for a user; tests/tools/test_chat.py, tests/tools/test_serve.py and tests/view run them."""
PLUGIN = "etude/rollout/etude_vllm_weights"
"""The place in the wheel of the plug-in for vLLM, which stands in plugins/ in a clone."""
REPOSITORY = "https://example.org/owner/etude"


def output_of(*words: str | Path, cwd: Path, **env: str) -> str:
    """Return what a command prints. It sees no module of this clone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked source archive."""
    folder = tmp_path_factory.mktemp("dist")
    build = (sys.executable, "-m", "hatchling", "build")
    output_of(*build, "-t", "sdist", "-d", folder, cwd=ROOT, ETUDE_REPOSITORY=REPOSITORY)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    source = folder / archive.name.removesuffix(".tar.gz")
    output_of(*build, "-t", "wheel", "-d", folder, cwd=source, ETUDE_REPOSITORY=REPOSITORY)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and the requirements, which are those of these tests.

    A line of a .pth file adds a folder, and reads no .pth files in it: so the editable Etude of the tests is not there.
    """
    folder = tmp_path_factory.mktemp("installed")
    output_of(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    places = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", places))
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    python = folder / "bin" / "python"
    output_of(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    imported = output_of(python, "-c", "import etude; print(etude.__file__)", cwd=folder)
    assert Path(imported).is_relative_to(folder), "the etude of the wheel, and not of the clone"
    return folder / "bin"


@pytest.fixture(scope="module")
def demonstrated(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a demonstration of few steps from the wheel, and its output."""
    folder = tmp_path_factory.mktemp("demo")
    short = ["steps=2", "collect.tasks=4", "evaluate.limit=50"]
    printed = output_of(environment / "etude", "demo", *short, cwd=folder)
    (directory,) = (folder / "runs").iterdir()
    return directory, printed


def test_the_wheel_has_every_file_of_the_package_and_the_plugin_of_servers(wheel: Path) -> None:
    packed = {name for name in ZipFile(wheel).namelist() if name.startswith("etude/")}
    here = {path.relative_to(ROOT).as_posix() for path in (ROOT / "etude").rglob("*") if path.is_file()}
    plugin = {f"{PLUGIN}/{path.name}" for path in (ROOT / "plugins/vllm_weights/etude_vllm_weights").glob("*.py")}
    assert packed == {name for name in here if "__pycache__" not in name} | plugin


def test_the_description_on_an_index_links_to_the_repository(wheel: Path) -> None:
    with ZipFile(wheel) as packed:
        (metadata,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        text = packed.read(metadata).decode()
    assert f"Project-URL: Source, {REPOSITORY}\n" in text
    assert f"]({REPOSITORY}/raw/v" in text and f"]({REPOSITORY}/blob/v" in text
    assert "](docs/" not in text, "a link that an index cannot follow"


def test_the_demonstration_takes_its_first_steps(demonstrated: tuple[Path, str]) -> None:
    run, printed = demonstrated
    assert [step["step"] for step in read_metrics(run)] == [1, 2]
    for sentence in ("held-out accuracy, sampled at temperature 1", "held-out accuracy, greedy", run.name):
        assert sentence in printed, printed


def test_an_agent_is_trained_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    short = ("steps=1", "collect.tasks=2", "collect.group_size=2", "evaluate.limit=4", "agent.runners=1")
    output_of(environment / "etude", "demo", "agent", *short, cwd=tmp_path)
    (directory,) = (tmp_path / "runs").iterdir()
    assert [step["step"] for step in read_metrics(directory)] == [1]


def test_the_first_commands_of_the_readme_run(
    demonstrated: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = demonstrated
    monkeypatch.chdir(tmp_path)
    shown = [words for words in commands(ROOT / "README.md") if "RUN" in words and "FILE" not in words]
    assert {words[1] for words in shown} >= {*WAITS, "generate", "answers", "eval", "plot", "train", "export"}
    for words in shown:
        if words[1] not in WAITS:
            given = [re.sub(r"^steps=\d+$", "steps=3", word).replace("RUN", str(run)) for word in words[1:]]
            assert main(given) == 0, words
    assert [step["step"] for step in read_metrics(run)] == [1, 2, 3]
    assert (run / "plot.png").is_file() and (tmp_path / "my-model" / "model.safetensors").is_file()
