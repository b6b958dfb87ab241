"""`etude init`: the files of a first run, to be replaced by the user's own: data, code, options and a test."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from etude.errors import ConfigError
from etude.observe import make_console

TEMPLATES = Path(__file__).with_name("templates")
DOWNLOAD = "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
MODEL_COMMANDS = {"pictures": "etude demo vision directory=shapes     # makes a tiny model that sees, in two minutes"}
"""The command that brings the model of a kind, where it is not `DOWNLOAD`."""
MODELS = {"pictures": "shapes/world/model"}
"""The model's directory of such a kind."""
SUFFIX = ".txt"
"""The end of a template's name that its copy does not have: no tool takes the template for a part of this package."""


def new_project(directory: Path, kind: str) -> list[str]:
    """Write the files of one kind of run into a new or empty directory; return their names."""
    is_used = directory.is_dir() and any(directory.iterdir())
    if directory.is_file() or is_used:
        taken = "has files" if is_used else "is a file"
        raise ConfigError(f"`etude init` writes into a new or empty directory, and {directory} {taken}. Name another.")
    common = [file for file in TEMPLATES.iterdir() if file.is_file() and not (TEMPLATES / kind / file.name).exists()]
    templates = sorted([*(TEMPLATES / kind).iterdir(), *common])
    directory.mkdir(parents=True, exist_ok=True)
    names = {template: template.name.removesuffix(SUFFIX) for template in templates}
    for template, name in names.items():
        shutil.copyfile(template, directory / name)
    return sorted(names.values())


def show_new_project(directory: Path, kind: str) -> None:
    """Write the files, and print the commands that use them."""
    names = new_project(directory, kind)
    console = make_console()
    lines = [
        f"{directory} has {', '.join(names[:-1])} and {names[-1]}. Next:",
        "",
        f"  cd {shlex.quote(str(directory))}",
        "  python test_run.py       # two steps with a tiny model, without a download",
        f"  {MODEL_COMMANDS.get(kind, DOWNLOAD)}",
        f"  etude train grpo --config run.yaml model.path={MODELS.get(kind, 'Qwen3-0.6B')}",
    ]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
