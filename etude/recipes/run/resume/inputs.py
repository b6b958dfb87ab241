"""The input files of a run, recorded by their bytes, so that a resumed run uses the same ones; and its threads.

A path is not enough: files are edited, and directories moved. The record has the size and a hash of each file. Data
files are hashed whole. Of a model's file only the first and the last part are hashed. So large weights cost only a few
reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import split_source
from etude.errors import RunError
from etude.integrity import read_json, write_json
from etude.models.vision_types import has_tower
from etude.observe import get_logger
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run
from etude.recipes.run.directory import INPUTS, is_module

CODE = ("reward", "environment", "tools", "agent", "external models")
"""Names of records for the run's own code, and for the external models that its agents may call. Unlike all other
inputs, these may change under a run."""
THREADS = "threads"
"""Name of the record of the numbers of threads, which may change too. The bits of results depend on them."""
PART = 1 << 20
"""Bytes at either end of a model's file that are hashed."""
REMEDY = (
    "It records the files that the run was started on: bring it back from a copy. Or, if the files are unchanged, "
    "remove it, and they are recorded again."
)


class RunInputs:
    """The input files of a run, and their record in its directory."""

    def __init__(self, directory: Path, run: Recipe) -> None:
        self._directory = directory
        self._run = run

    def record(self, threads: str = "") -> None:
        """Record the input files, once. threads: the numbers of threads that the run computes with, if any."""
        record = self._directory / INPUTS
        if not record.exists():
            own = {THREADS: threads} if threads else {}
            write_json(record, dict(sorted((self._hash_inputs() | own).items())))

    def check(self, threads: str = "") -> None:
        """Refuse to resume a run whose input files changed, and name them. Warn of other threads."""
        record = self._directory / INPUTS
        if not record.exists():
            return
        for name in self.code_changed():
            message = "The file of the %s changed since the run was started. What was collected stays as it is."
            get_logger("recipes").info(message, name)
        before, current = read_json(record, REMEDY), self._hash_inputs()
        if threads and before.get(THREADS, threads) != threads:
            get_logger("recipes").warning(
                "The run was started with these threads: %s. It continues with: %s. So the last bits of its results "
                "may differ from those of a run without a stop. `OMP_NUM_THREADS` sets the number of all.",
                before[THREADS],
                threads,
            )
        names = (before.keys() | current.keys()) - {*CODE, THREADS}
        changed = sorted(name for name in names if before.get(name) != current.get(name))
        if changed:
            listed = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            raise RunError(
                f"{self._directory} holds a run that was started on other files: {listed} changed, came or went since. "
                "It would continue as another run. Bring the files back, say where they are now (`model.path`, "
                "`data.train`, …), or start a new run in another `directory`."
            )

    def code_changed(self) -> list[str]:
        """Return the names from `CODE` whose files changed since the run was started."""
        record = self._directory / INPUTS
        if not record.exists():
            return []
        before, current = read_json(record, REMEDY), self.hash_code()
        return [name for name in CODE if before.get(name) != current.get(name)]

    def check_base_model(self) -> None:
        """Refuse a changed base model, of which a run trained only a part: adapters, or all but its frozen weights."""
        run = self._run
        sees = run.model.path is not None and has_tower(run.model.path, wanted=run.policy_head == "seeing")
        frozen_tower = sees and not run.trains_tower
        if not (run.lora.is_enabled or run.model.freeze or frozen_tower):
            return
        if changed := self._changed_model_files():
            raise RunError(
                f"The run in {self._directory} trained a part of a model, and the rest is read from "
                f"{self._run.model.path}, where {changed} changed, came or went since. Bring the files back, or say "
                "where they are now by `model.path`."
            )

    def check_model_files(self) -> None:
        """Refuse a model or adapter that changed since the run was started."""
        if changed := self._changed_model_files():
            raise RunError(
                f"The run in {self._directory} began with the model in {self._run.model.path}, where {changed} "
                "changed, came or went since. Bring the files back, or say where they are now by `model.path`."
            )

    def _changed_model_files(self) -> str:
        """Return the names of the model's and the adapter's files that changed since the run was started."""
        record = self._directory / INPUTS
        if not record.exists():
            return ""
        before = read_json(record, REMEDY)
        parts = ("model/", "adapter/")
        files = {name: path for name, path in self._files() if name.startswith(parts) and isinstance(path, Path)}
        changed = sorted(name for name, path in files.items() if before.get(name) != _hash_file(path))
        changed += sorted(name for name in before if name.startswith(parts) and name not in files)
        return ", ".join(changed[:5])

    def _hash_inputs(self) -> dict[str, str]:
        prints = {
            name: _hash_file(path, whole=name.startswith("data.")) if isinstance(path, Path) else path
            for name, path in self._files()
        }
        return prints | self.hash_code()

    def hash_code(self) -> dict[str, str]:
        """Return a hash of the files of each name from `CODE` that the run has."""
        run = self._run
        if not isinstance(run, Run):
            return {}
        prints = {}
        environments = [environment.options for environment in run.env.environments()]
        tools = [path for options in environments for path in options.tools]
        named = ([options.code for options in environments], tools, run.agent.names)
        source_files = ({Path(path.rpartition(":")[0]) for path in paths} for paths in named)
        external_files = {run.agent.external} if run.agent.external else set()
        for name, files in zip(CODE, (run.reward.files(), *source_files, external_files), strict=True):
            existing = sorted(file for file in files if file.is_file())
            if existing:
                prints[name] = "; ".join(_hash_file(file) for file in existing)
        return prints

    def _files(self) -> Iterator[tuple[str, Path | str]]:
        """Yield every file that affects the training, under a name that does not depend on its location.

        For data made by Python, yield its name.
        """
        for role, path in self._run.path_options.items():
            location = self._run.path_at(path)
            if location is not None:
                yield from _of_model(role, location)
        for role, option in self._run.path_mappings.items():
            for name, location in self._run.paths_at(option).items():
                yield from _of_model(f"{role}[{name}]", location)
        for number, name in enumerate(self._run.data.train):
            yield from _of_data(f"data.train[{number}]", name)


def evaluation_id(val: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Return an id of the way in which a run is scored on `data.val`. Scores with different ids are not comparable.

    val: the files and other data of `data.val`. settings: the options that affect a score, besides the files.
    """
    files = [file for name in val for file in _of_data("data.val", name)]
    prints = [[name, _hash_file(path, whole=True) if isinstance(path, Path) else path] for name, path in files]
    measured_with = {"tasks": prints, **settings}
    return f"val-{hashlib.blake2b(json.dumps(measured_with, sort_keys=True).encode(), digest_size=8).hexdigest()}"


def _of_data(role: str, name: str) -> Iterator[tuple[str, Path | str]]:
    source, path = split_source(name)
    role = f"{role} of {source}" if source else role
    if is_module(path):
        yield role, path
    else:
        yield from _within(role, Path(path).expanduser(), "**/*")


def _of_model(role: str, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that a model is read from. Other directories in its own may be anything, such as runs."""
    yield from _within(role, path, "*")
    if path.is_dir():
        yield from _within(role, path, "additional_chat_templates/*")


def _within(role: str, path: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    if path.is_dir():
        inside = (file for file in sorted(path.glob(pattern)) if file.is_file() and not file.name.startswith("."))
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
