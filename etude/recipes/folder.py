"""The directory of a run: one process at a time works in it, and what it holds says which run it is.

run.yaml        every option of the run, as it was started
metrics.jsonl   what each step measured
journal.sqlite  every rollout, and which step trained on it
checkpoints/    what the run goes on from
evaluations/    the answers that were scored
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.config.compose import compose
from etude.config.secrets import mask
from etude.config.show import to_yaml
from etude.config.tree import to_tree
from etude.errors import ConfigError, RunError
from etude.recipes.inputs import is_module
from etude.recipes.run import FREE, Run

__all__ = [
    "OPTIONS",
    "compare",
    "differences",
    "new_directory",
    "occupy",
    "read_metrics",
    "read_run",
    "rooted",
    "settle",
]

OPTIONS, LOCK = "run.yaml", ".lock"
PLACES = ("model.path", "model.tokenizer", "reference.path", "data.train", "chat.template")
"""Options that say where files lie, all of them known by what they hold."""


def new_directory(parent: Path, name: str) -> Path:
    """A directory that is not there yet, named by the date and time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        directory = parent / f"{name}-{stamp}{suffix}"
        if not directory.exists():
            return directory
    raise RunError(f"{parent} holds a hundred runs named {name}-{stamp}. Name a directory with `directory=…`.")


@contextmanager
def occupy(directory: Path) -> Iterator[None]:
    """Hold the directory for this process. The system lets go of it when the process ends, however it ends.

    A directory that was made for this and in which nothing came to be is removed again.
    """
    new = not directory.exists()
    if Path.cwd().is_relative_to(_absolute(directory)) and not (directory / OPTIONS).exists():
        raise ConfigError(
            f"`directory={directory}` is where you stand, or holds it: a run wants a directory of its own. Name a new "
            f"one, such as `directory=runs/mine`."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"No directory can be made at {directory}: {error.strerror}. Choose another.") from error
    with (directory / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip()
            raise RunError(
                f"The run directory {directory} is in use by process {owner or 'unknown'}. Wait until it has ended, or "
                f"choose another with `directory=…`."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        finally:
            if new and [path.name for path in directory.iterdir()] == [LOCK]:
                shutil.rmtree(directory)


def read_run(directory: Path, overrides: Sequence[str] = (), *, masked: Callable[[str], object] | None = None) -> Run:
    """The run that a directory holds, with some options changed.

    A secret was not written: what stands in its place is given by an override, or by `masked` for its path.
    """
    file = directory / OPTIONS
    if not file.exists():
        raise RunError(
            f"{directory} holds no run: it has no {OPTIONS}. Give the directory that `etude train` printed, "
            f"such as runs/train-20260101-120000."
        )
    elsewhere = [text for text in overrides if text.partition("=")[0].strip("+ ") == "directory"]
    if elsewhere:
        raise ConfigError(
            f"`{elsewhere[0]}` was given beside the run in {directory}, which stays where it is. Leave it out; to go "
            f"on elsewhere, copy the directory and name the copy."
        )
    run = compose(Run, overrides, file=file, masked=masked)
    return run.model_copy(update={"directory": _absolute(directory)})


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """What each step of training measured, in order. The line of step 0, which only scores, is none."""
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    lines = (json.loads(line) for line in text.split("\n")[:-1])  # a torn line is no line
    steps = {line["step"]: line for line in lines}
    return [steps[step] for step in sorted(steps) if step > 0]


def rooted(run: Run) -> Run:
    """The same run with every path as it is seen from anywhere."""

    def data(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name if is_module(name) else str(_absolute(Path(name))) for name in names)

    def path(of: Path | None) -> Path | None:
        return None if of is None else _absolute(of)

    parts: dict[str, Any] = {
        "directory": path(run.directory),
        "model": run.model.model_copy(
            update={"path": path(run.model.path), "tokenizer": path(run.model.tokenizer)},
        ),
        "reference": run.reference.model_copy(update={"path": path(run.reference.path)}),
        "chat": run.chat.model_copy(update={"template": path(run.chat.template)}),
        "data": run.data.model_copy(update={"train": data(run.data.train), "val": data(run.data.val)}),
        "reward": run.reward.rooted(_absolute),
    }
    return run.model_copy(update=parts)


def _absolute(path: Path) -> Path:
    """Without a step back in it, and with its symbolic links as they are: who moves a link knows why."""
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100


def compare(directory: Path, run: Run) -> None:
    """Refuse to go on with a run that was started with other options; says which. A secret that the directory does
    not tell is taken to be what it was."""
    if not (directory / OPTIONS).exists():
        return
    changed = differences(read_run(directory, masked=_values(run, shown=False).get), run)
    if changed:
        listed = "; ".join(f"{path} was {before}, is {after}" for path, before, after in changed)
        raise ConfigError(
            f"{directory} holds a run that was started otherwise: {listed}. Give the old values, or start a new "
            f"run in another `directory`. What may change in a run that goes on: {', '.join(FREE)} (`steps` only while "
            f"`train.schedule` is constant, which does not depend on them)."
        )


def settle(directory: Path, run: Run) -> None:
    """Write the run's options into its directory, whole or not at all."""
    writing = directory / f".{OPTIONS}"
    writing.write_text(to_yaml(run), encoding="utf-8")
    writing.replace(directory / OPTIONS)


def differences(before: Run, after: Run) -> list[tuple[str, object, object]]:
    """The options that make two runs different ones: path, value before, value after.

    Where files lie makes no difference: what is in them does, which `inputs` compares.
    """
    old, new = _values(rooted(before)), _values(rooted(after))
    free = FREE if before.train.schedule == "constant" else tuple(name for name in FREE if name != "steps")
    return [
        (path, old.get(path, "absent"), new.get(path, "absent"))
        for path in sorted(old.keys() | new.keys())
        if old.get(path, "absent") != new.get(path, "absent") and not _is_one_of(path, (*free, *PLACES))
    ]


def _values(run: Run, *, shown: bool = True) -> dict[str, object]:
    """Every value of a run by its dotted path; as it may be `shown`, without secrets."""

    def flat(tree: Mapping[str, object], path: str) -> Iterator[tuple[str, object]]:
        for name, value in tree.items():
            here = f"{path}.{name}" if path else name
            if isinstance(value, Mapping) and value:
                yield from flat(value, here)
            else:
                yield here, value

    return dict(flat(mask(to_tree(run)) if shown else to_tree(run), ""))


def _is_one_of(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)
