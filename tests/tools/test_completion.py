"""Completion after a press of the Tab key: tested in the shells, and by the function that they call."""

from __future__ import annotations

import functools
import json
import os
import pty
import resource
import select
import shlex
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.cli import build_parser, main
from etude.commands import PREPARATIONS
from etude.config.compose import compose
from etude.recipes.presets import PRESETS
from etude.recipes.run.config import Run
from etude.tools.shell_completion import suggest as offers
from tests.option_lists import list_option_paths, list_options
from tests.pages.completion import FILE_OPTIONS

QUICK = 0.3


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a shell finds this `etude`, and some files."""
    command = tmp_path / "bin" / "etude"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m etude "$@"\n')
    command.chmod(0o755)
    (tmp_path / "my data").mkdir()
    (tmp_path / "my data" / "train.parquet").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(command.parent), os.environ["PATH"]]))
    return tmp_path


def offered(*typed: str) -> list[str]:
    """Return the offered completions of the last word."""
    return [offer.text for offer in offers.suggest(commands(), typed)]


@functools.cache
def commands() -> ArgumentParser:
    """The parser of the command line, which takes longer to build than to ask."""
    return build_parser()


def in_bash(line: str) -> list[str]:
    """Return the completions that bash gets for a line with the cursor at its end."""
    breaks = ' \\t\\n"><=;|&(:'
    code = (
        f"source <(etude completion bash); COMP_LINE=$0; COMP_POINT=${{#COMP_LINE}}; COMP_WORDBREAKS=$'{breaks}'; "
        '_etude etude; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code, line], capture_output=True, text=True, check=True)
    return [text for text in done.stdout.split("\n") if text]


def pressed(command: Sequence[str], setup: Sequence[str], keys: str, wanted: str) -> str:
    """Return the output of an interactive shell after keys are pressed, once it shows the expected text."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm", COLUMNS="150", PS1="$ ")
        os.execvp(command[0], [*command])
    shown = ""
    try:
        for text, wait_for in [*((f"{line}; echo do''ne\r", "done\r\n") for line in setup), (keys, wanted)]:
            shown, until = "", time.monotonic() + 20
            os.write(terminal, text.encode())
            while wait_for not in shown and time.monotonic() < until:
                if select.select([terminal], [], [], 0.1)[0]:
                    shown += os.read(terminal, 65536).decode(errors="replace")
    finally:
        os.close(terminal)
        os.kill(child, 9)
        os.waitpid(child, 0)
    return shown


# -- in a shell -------------------------------------------------------------------------------------------------------


LINES: list[tuple[str, list[str]]] = [
    ("etude train loss=gspo loss.clip_h", ["loss.clip_high="]),
    ("etude train data.train=[my\\ data/tr", ["[my\\ data/train.parquet"]),
    ("etude tr", ["train "]),
    ("etude config ", ["show "]),
    ("etude train dap", ["dapo "]),
    ("etude train grpo loss=gs", ["gspo "]),
    ("etude train --res", ["--resume "]),
    ("etude train --resume mod", ["model/"]),
    ("etude train reward=function reward.path=my\\ da", ["my\\ data/"]),
    ("etude completion z", ["zsh "]),
    ("FOO=1 etude data prepare countd", ["countdown "]),
    ("etude train 'lo", []),
    ("etude nonsense ", []),
]
FIRST = [*LINES[:3], *(pytest.param(*line, marks=pytest.mark.slow) for line in LINES[3:])]
"""The lines; each starts a shell and a process, and the quick tests try three."""


@pytest.mark.parametrize(("line", "wanted"), FIRST)
def test_bash_gets_completions(line: str, wanted: list[str], shell: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    assert in_bash(line) == wanted


def test_a_press_of_the_key_completes_in_bash(shell: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    start = ["source <(etude completion bash)"]
    wanted = "train gspo loss=gspo "
    assert wanted in pressed(["bash", "--norc", "-i"], start, "etude tr\tgs\tloss=gs\t", wanted)


def test_a_press_of_the_key_completes_in_zsh(shell: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    start = ["autoload -U compinit", "compinit -u", "source <(etude completion zsh)"]
    wanted = "loss=gspo "
    assert wanted in pressed(["zsh", "-f", "-i"], start, "etude tr\tgs\tloss=gs\t", wanted)


def test_fish_gets_completions(shell: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    code = "etude completion fish | source; complete -C 'etude train loss=gs'"
    done = subprocess.run(["fish", "--no-config", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("loss=gspo\tGroup sequence policy optimization")


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_scripts_are_printed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", name]) == 0
    assert f"complete {name} " in capfd.readouterr().out


def test_an_answer_is_quick_and_loads_nothing_heavy(shell: Path) -> None:
    code = (
        "import sys; from etude.cli import main; main(sys.argv[1:]);"
        "print({'torch', 'pydantic', 'rich', 'hydra', 'yaml', 'numpy'} & sys.modules.keys(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "complete", "bash", "etude", "=:", "etude train grpo loss=g"]
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.stderr.strip() == "set()" and done.stdout.split() == ["gspo", "gmpo", "gpg"]
    assert min(spent) < QUICK


# -- the offered completions ------------------------------------------------------------------------------------------


def test_every_option_is_known_and_no_other() -> None:
    options = [
        option for option in json.loads(offers.OPTIONS_FILE.read_text())["options"] if "Run" in option["classes"]
    ]
    assert {option["path"] for option in options} == list_option_paths(Run)
    assert {option["path"] for option in options} >= FILE_OPTIONS
    assert all(option["meaning"] for option in options)


@pytest.mark.parametrize("line", [[], ["dapo"], ["distillation"], ["loss=gspo", "kl=reverse", "reward=math"]])
def test_the_options_offered_are_those_that_would_be_taken(line: list[str]) -> None:
    """The line is completed word by word, as a user types; the completed options are those of the run."""
    completed, prefixes = set(), [""]
    for start in prefixes:
        for text in offered("train", *line, start):
            if text.endswith("="):
                completed.add(text.removesuffix("="))
            elif text.endswith("."):
                prefixes.append(text)
    presets = [PRESETS[word] for word in line if word in PRESETS]
    run = compose(Run, [word for word in line if "=" in word], preset=presets[0] if presets else None)
    accepted = {leaf.path for leaf in list_options(run)}
    absent = {
        leaf.path for leaf in list_options(run) if leaf.type.startswith("a mapping of ")
    }  # until a field of it is set
    assert completed == (accepted - absent) | {
        path for path in list_option_paths(Run) if path.partition(".")[0] in absent
    }


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["loss=gs"], ["loss=gspo "]),
        (["observe.console="], ["observe.console=auto ", "observe.console=rich ", "observe.console=plain "]),
        (["data.overlong=t"], ["data.overlong=truncate "]),
        (["rollout.prepack="], ["rollout.prepack=true ", "rollout.prepack=false "]),
        (["kl=no"], ["kl=none "]),
        (["steps="], []),
        (["no.such=x"], []),
        (["learning_r"], ["train.learning_rate="]),
        (["le"], []),
        (["grpo", "g"], []),  # a second preset would be refused
        (["--config", "mo"], ["model/"]),
        (["--config", "mine.yaml", "kl.co"], ["kl.coefficient=", "kl.controller=", "kl.controller."]),
        (["loss=my:Loss", "loss."], []),
    ],
)
def test_completions_after_train(typed: list[str], wanted: list[str], shell: Path) -> None:
    assert offered("train", *typed)[: len(wanted) or None] == wanted


def test_a_command_with_few_options_offers_only_those() -> None:
    assert "train.learning_rate=" not in offered("eval", "run", "train.")
    assert offered("eval", "run", "train.") == ["train.precision="]
    assert offered("data", "prepare", "gsm8k", "held") == ["held_out="]
    assert offered("data", "prepare", "countdown", "held") == []
    assert offered("data", "prepare", "arithmetic", "operations=[add,m") == ["operations=[add,multiply"]
    assert {text.strip() for text in offered("data", "prepare", "")} == PREPARATIONS.keys()
    assert offered("config", "show", "--demo", "noi") == ["noise="] != offered("config", "show", "noi")


def test_files_are_completed(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered("plot", "m") == ["model/", "my\\ data/"]
    assert offered("plot", "") == ["bin/", "model/", "my\\ data/"]
    assert offered("data", "show", ".h") == [".hidden "]
    assert offered("data", "show", "my data/") == ["my\\ data/train.parquet "]
    assert offered("train", "data.train=[a,my data/t") == ["data.train=[a,my\\ data/train.parquet"]
    assert offered("train", "model.path=absent/") == []
    monkeypatch.setenv("HOME", str(shell))
    assert offered("plot", "~/mo") == ["~/model/"]


WORDS = st.lists(st.text(st.characters(categories=["L", "N", "P", "S", "Z"]), min_size=1), max_size=4)


@given(WORDS, st.text("ab=./", max_size=4))
def test_a_line_is_read_as_a_shell_reads_it(before: list[str], last: str) -> None:
    assert offers.split_words(f"etude {shlex.join(before)} {last}", "etude") == [*before, last]
    assert offers.split_words(f"etude {shlex.join(before)} '{last}", "etude") is None
    assert offers.split_words(last, "etude") is None


@given(st.text("ab=:", max_size=6), st.sampled_from(["=:", "=", ":", ""]))
def test_bash_gets_completions_of_its_current_word(current: str, breaks: str) -> None:
    (text,) = offers.format_for_bash([offers.Suggestion(f"{current}more ")], current, breaks)
    broken = max((current.rfind(sign) + 1 for sign in breaks), default=0)
    assert text == f"{current[broken:]}more "
