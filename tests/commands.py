"""Parsed command lines: the class whose fields are a command's options, and the composed options."""

from __future__ import annotations

import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from etude.config import load_plugin
from etude.config.compose import compose
from etude.recipes.presets import PRESETS

__all__ = ["composed", "in_turn", "root_of"]

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


def in_turn(
    tmp_path: Path, *lines: str, before: str = "", behind: str = ""
) -> tuple[list[int], subprocess.CompletedProcess[bytes]]:
    """Run command lines, each in a process forked from one that the shell started. Return their exit codes and the
    output of all. before: variables of the environment, behind: redirections of the shell."""
    command = shlex.join([sys.executable, "-c", IN_TURN, str(tmp_path / "codes"), *lines])
    done = subprocess.run(["sh", "-c", f"{before} {command} {behind}"], capture_output=True, check=True)
    return [int(code) for code in (tmp_path / "codes").read_text().split()], done
