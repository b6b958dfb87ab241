"""Parsed command lines: the class whose fields are a command's options, and the composed options."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from etude.config import load_plugin
from etude.config.compose import compose
from etude.recipes.presets import PRESETS

__all__ = ["Commands", "composed", "in_turn", "root_of"]

# The process that started the tests may ignore Ctrl-C, as nohup does, and a child inherits that.
HEEDING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
FORKING = """
import json, os, sys
from etude.cli import main
from etude.demo.tabular import command
from etude.recipes.run import config

def start(words, folder, out, err, closed, encoding, environment):
    os.chdir(folder)
    os.environ.update(environment)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
        getattr(sys, ("stdout", "stderr")[descriptor - 1]).reconfigure(encoding=encoding, errors="strict")
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if name in closed:  # as an interpreter finds it
            os.close(descriptor)
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
    sys.exit(main(words))

for line in sys.stdin:
    if (child := os.fork()) == 0:
        start(*json.loads(line))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

IN_TURN = """
import os, sys
from etude.cli import main
from etude.recipes.run import config as run

codes = []
for line in sys.argv[2:]:
    if os.fork() == 0:
        sys.exit(main(line.split()))
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
with open(sys.argv[1], "w") as file:
    print(*codes, file=file)
"""


def root_of(arguments: Namespace, words: Sequence[str]) -> type[BaseModel] | None:
    """Return the class whose fields are the options of the command with these words, or None if it has no options."""
    roots = vars(arguments).get("roots", {})
    named = next((root for word, root in roots.items() if word in words), roots.get(""))
    return None if named is None else load_plugin(named, BaseModel)


def composed(arguments: Namespace, words: Sequence[str]) -> BaseModel | None:
    """Compose the options, over the preset that was named, if any."""
    root = root_of(arguments, words)
    if root is None:
        return None
    presets = [PRESETS[word] for word in arguments.overrides if word in PRESETS]
    options = [word for word in arguments.overrides if "=" in word]
    return compose(root, options, preset=presets[0] if presets else None)


class Commands:
    """Command lines, each in a process forked from one that has loaded what they need."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", HEEDING + FORKING]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(
        self,
        words: Sequence[str],
        folder: Path,
        *,
        out: str = "out",
        err: str = "err",
        closed: Sequence[str] = (),
        encoding: str = "utf-8",
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start a command, and return its process. out, err: files in its folder, or devices."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        asked = [list(words), str(folder), out, err, list(closed), encoding, dict(environment or {})]
        self._parent.stdin.write(json.dumps(asked) + "\n")
        self._parent.stdin.flush()
        process = int(self._parent.stdout.readline())
        assert process > 1, "the command before was waited for"
        return process

    def wait(self) -> int:
        """Return the exit code of the command that was started last."""
        assert self._parent.stdout is not None
        return int(self._parent.stdout.readline())

    def run(self, words: Sequence[str], folder: Path, **how: Any) -> tuple[int, bytes, bytes]:
        """Run a command; return its exit code, its output and its errors."""
        for name in ("out", "err"):
            (folder / name).unlink(missing_ok=True)
        self.start(words, folder, **how)
        return self.wait(), (folder / "out").read_bytes(), (folder / "err").read_bytes()

    def close(self) -> None:
        """End the process from which commands are forked."""
        self._parent.communicate()


def in_turn(
    tmp_path: Path, *lines: str, before: str = "", behind: str = ""
) -> tuple[list[int], subprocess.CompletedProcess[bytes]]:
    """Run command lines, each in a process forked from one that the shell started. Return their exit codes and the
    output of all. before: variables of the environment, behind: redirections of the shell."""
    command = shlex.join([sys.executable, "-c", IN_TURN, str(tmp_path / "codes"), *lines])
    done = subprocess.run(["sh", "-c", f"{before} {command} {behind}"], capture_output=True, check=True)
    return [int(code) for code in (tmp_path / "codes").read_text().split()], done
