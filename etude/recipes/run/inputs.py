"""What a run was started on, told by the bytes: so that a run that goes on finds what it began with.

A path says little: files are edited, and directories moved. What is kept of each file is its size and a hash: of all
of it, where it holds what is learned from, and of its first and its last part, where it is a model's, which costs a few
reads however large the weights are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.errors import RunError
from etude.integrity import read_json, write_json
from etude.observe import get_logger
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run

__all__ = [
    "INPUTS",
    "check_base_model",
    "check_inputs",
    "code_changed",
    "evaluation_id",
    "is_module",
    "path_option",
    "record_inputs",
]

INPUTS = "inputs.json"
CODE = ("reward", "environment", "tools", "agent", "external models")
"""The prints of files in which a run's own code lies, and whom its agents may ask. They may change under a run, unlike
what lies in the others."""
PART = 1 << 20
"""Bytes at either end of a model's file that are hashed."""
REMEDY = (
    "It says what lay in the files that the run was started on: bring it back from a copy; or, if they are what they "
    "were, remove it, and they are taken to be."
)


def record_inputs(directory: Path, run: Recipe) -> None:
    """Write down what a run is started on, once."""
    record = directory / INPUTS
    if not record.exists():
        write_json(record, dict(sorted(_hash_inputs(run).items())))


def check_inputs(directory: Path, run: Recipe) -> None:
    """Refuse to go on with a run whose files are others now than when it was started, and name them."""
    record = directory / INPUTS
    if not record.exists():
        return
    for name in code_changed(directory, run):
        message = "The file of the %s changed since the run was started. What was collected stays as it is."
        get_logger("recipes").info(message, name)
    before, current = read_json(record, REMEDY), _hash_inputs(run)
    names = (before.keys() | current.keys()) - set(CODE)
    changed = sorted(name for name in names if before.get(name) != current.get(name))
    if changed:
        listed = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise RunError(
            f"{directory} holds a run that was started on other files: {listed} changed, came or went since. What it "
            f"would go on to train is another run. Bring the files back, say where they lie now (`model.path`, "
            f"`data.train`, …), or start a new run in another `directory`."
        )


def code_changed(directory: Path, run: Recipe) -> list[str]:
    """The parts of a run's own code, as in `CODE`, that are not what they were when the run was started."""
    record = directory / INPUTS
    if not record.exists():
        return []
    before, current = read_json(record, REMEDY), _hash_code(run)
    return [name for name in CODE if before.get(name) != current.get(name)]


def check_base_model(directory: Path, run: Recipe) -> None:
    """Refuse a model of which a run trained a part, and whose other parts are not what they were then."""
    record = directory / INPUTS
    if not (run.lora.is_enabled or run.model.freeze) or not record.exists():
        return
    before = read_json(record, REMEDY)
    parts = ("model/", "adapter/")
    files = {name: path for name, path in _files(run) if name.startswith(parts) and isinstance(path, Path)}
    changed = sorted(name for name, path in files.items() if before.get(name) != _hash_file(path))
    changed += sorted(name for name in before if name.startswith(parts) and name not in files)
    if changed:
        raise RunError(
            f"The run in {directory} trained a part of a model, and the rest is read from {run.model.path}, where "
            f"{', '.join(changed[:5])} changed, came or went since. Bring the files back, or say where they lie now by "
            f"`model.path`."
        )


def evaluation_id(run: Recipe, settings: Mapping[str, Any]) -> str:
    """What a run's scores on `data.val` are measured with, in a word: scores with another do not compare.

    asked: what besides the files decides a score.
    """
    files = [file for name in run.data.val for file in _of_data("data.val", name)]
    prints = [[name, _hash_file(path, whole=True) if isinstance(path, Path) else path] for name, path in files]
    measured_with = {"tasks": prints, **settings}
    return f"val-{hashlib.blake2b(json.dumps(measured_with, sort_keys=True).encode(), digest_size=8).hexdigest()}"


def path_option(run: Recipe, path: str) -> Path | None:
    """Where the files lie that an option of a run names, by the option's dotted path."""
    value: Any = run
    for name in path.split("."):
        value = getattr(value, name)
    assert value is None or isinstance(value, Path), f"`{path}` names no place"
    return value


def is_module(name: str) -> bool:
    """Whether data is made by Python, as `module:Name` says, and lies in no file."""
    return ":" in name and "/" not in name.rpartition(":")[2] and not Path(name).expanduser().exists()


def _hash_inputs(run: Recipe) -> dict[str, str]:
    prints = {
        name: _hash_file(path, whole=name.startswith("data.")) if isinstance(path, Path) else path
        for name, path in _files(run)
    }
    return prints | _hash_code(run)


def _hash_code(run: Recipe) -> dict[str, str]:
    if not isinstance(run, Run):
        return {}
    prints = {}
    named = ((run.env.path or "",), run.env.tools, (run.agent.path or "",))
    source_files = ({Path(path.rpartition(":")[0]) for path in paths} for paths in named)
    external_files = {run.agent.external} if run.agent.external else set()
    for name, files in zip(CODE, (run.reward.files(), *source_files, external_files), strict=True):
        existing = sorted(file for file in files if file.is_file())
        if existing:
            prints[name] = "; ".join(_hash_file(file) for file in existing)
    return prints


def _files(run: Recipe) -> Iterator[tuple[str, Path | str]]:
    """Every file that decides what is trained, under a name that does not depend on where it lies; of data that Python
    makes, its name."""
    for role, path in run.path_options.items():
        location = path_option(run, path)
        if location is not None:
            yield from _within(role, location)
    for number, name in enumerate(run.data.train):
        yield from _of_data(f"data.train[{number}]", name)


def _of_data(role: str, name: str) -> Iterator[tuple[str, Path | str]]:
    if is_module(name):
        yield role, name
    else:
        yield from _within(role, Path(name).expanduser())


def _within(role: str, path: Path) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith("."))
        yield from ((f"{role}/{file.relative_to(path)}", file) for file in inside)
    elif path.is_file():
        yield f"{role}: {path.name}", path


def _hash_file(path: Path, *, whole: bool = False) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if whole:
            return f"{size} bytes, {hashlib.file_digest(file, 'blake2b').hexdigest()[:32]}"
        hashed = hashlib.blake2b(file.read(PART), digest_size=16)
        file.seek(max(size - PART, 0))
        hashed.update(file.read(PART))
    return f"{size} bytes, {hashed.hexdigest()}"
