"""The directory of a run: one process at a time works in it, and its files identify the run.

run.yaml        every option of the run, as it was started; its last line is a checksum of the others
inputs.json     sizes and hashes of the files that it was started on, and its numbers of threads
metrics.jsonl   the metrics of each step
sessions.jsonl  when the training process began, and how it ended
journal.sqlite  every rollout, and the step that trained on it
checkpoints/    the states that the run resumes from
ranks/          the output of each rank process
evaluations/    the answers that were scored
report/         the page of `etude report`
replays/        steps that were computed again under another algorithm
tasks/          tasks that a program gave directly, and not in a file
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from etude.checkpoint.names import list_paths
from etude.config import Config
from etude.config.compose import compose
from etude.config.env import etude_command
from etude.config.plugin import with_file
from etude.config.resume_marks import marked_options
from etude.config.secrets import mask
from etude.config.show import to_yaml
from etude.config.tree import replace_option, to_tree
from etude.data.files import split_source, with_source
from etude.errors import ConfigError, CrewError, EngineError, RunError
from etude.integrity import read_text, write_text
from etude.observe import get_logger, read_steps
from etude.observe.jsonl import METRICS_FILE
from etude.recipes.recipe import Recipe
from etude.recipes.run.config import Run

OPTIONS = "run.yaml"
INPUTS = "inputs.json"
LOCK = ".lock"
RANK_LOGS = "ranks"
SERVER_LOGS = "servers"
TASKS_FOLDER = "tasks"
REPLAY = "replay.json"
"""The file in a directory that `etude replay --to` trained in: the run whose rollouts it trained on."""
CHECKPOINTS = "checkpoints"
JOURNAL, STORE_RUN_FILE = "journal.sqlite", "joined.json"
"""The database of rollouts; and the file with the identity of this run at a remote store."""
R = TypeVar("R", bound=Recipe)


def new_directory(parent: Path, name: str) -> Path:
    """Return a directory that does not exist yet, named by date and time."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        directory = parent / f"{name}-{stamp}{suffix}"
        if not directory.exists():
            return directory
    raise RunError(f"{parent} holds a hundred runs named {name}-{stamp}. Name a directory with `directory=…`.")


@contextmanager
def lock_directory(directory: Path, option: str = "directory=…") -> Iterator[None]:
    """Lock the directory for this process. The system releases the lock when the process ends, in any way.

    option: that names another one, for the error.

    A directory that was created here is removed again if the run wrote nothing useful in it. Logs of ranks are removed
    where a run was refused. They stay after a `CrewError` or `EngineError`, because the error points to them.
    """
    new = not directory.exists()
    if Path.cwd().is_relative_to(_absolute(directory)) and not (directory / OPTIONS).exists():
        raise ConfigError(
            f"`directory={directory}` is the current directory or a parent of it: a run needs its own directory. Name "
            "a new one, such as `directory=runs/mine`."
        )
    create_directory(directory)
    with (directory / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            owner = lock.read().strip()
            raise RunError(
                f"The run directory {directory} is in use by process {owner or 'unknown'}. Wait until it has ended, or "
                f"choose another with `{option}`."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        disposable = {LOCK, RANK_LOGS, SERVER_LOGS, TASKS_FOLDER, STORE_RUN_FILE}
        try:
            yield
        except (CrewError, EngineError):
            disposable = {LOCK, TASKS_FOLDER, STORE_RUN_FILE}
            raise
        finally:
            names = {path.name for path in directory.iterdir()}
            if (
                new and {name for name in names if not name.startswith(JOURNAL)} <= disposable
            ):  # a journal without options
                shutil.rmtree(directory)


def create_directory(directory: Path) -> None:
    """Create the directory of a run, before the run begins; refuse a directory that holds something else."""
    names = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    others = sorted(name for name in names if not name.startswith((".", JOURNAL)))  # a journal without options
    if others and not names & {OPTIONS, INPUTS, LOCK}:
        listed = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
        raise ConfigError(
            f"`directory={directory}` is not empty and holds no run, but {listed}: a run needs its own directory. "
            f"Name a new one, such as `directory={directory / 'run'}`."
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / LOCK).touch()
    except OSError as error:
        raise RunError(f"No directory can be made at {directory}: {error.strerror}. Choose another.") from error


def read_options(directory: Path) -> dict[str, Any]:
    """Return the options of the run in a directory, as plain values; refuse a file that was edited.

    Paths below the directory that the run was started in are those below `directory`: a run may be moved.
    """
    options: dict[str, Any] = yaml.safe_load(
        read_text(
            directory / OPTIONS,
            "Options are given with the command, as `key=value`, and not changed in this file. Bring it back from a "
            "copy. Or remove it, and give the run's first command once more, with all its options and "
            f"`directory={directory}`: the run continues.",
        )
    )
    recorded = options.get("directory")
    return options if recorded is None else _moved(options, Path(recorded), _absolute(directory))


def _moved(tree: Any, recorded: Path, here: Path) -> Any:
    """Return a tree of plain values with the paths below one directory in another one."""
    match tree:
        case dict():
            return {name: _moved(value, recorded, here) for name, value in tree.items()}
        case list():
            return [_moved(value, recorded, here) for value in tree]
        case str() if Path(tree).is_relative_to(recorded):
            return str(_move(Path(tree), recorded, here))
    return tree


def _move(path: Path, recorded: Path, here: Path) -> Path:
    return here / path.relative_to(recorded) if path.is_relative_to(recorded) else path


def read_recipe_name(directory: Path) -> str:
    """Return the command of the run in a directory."""
    file = directory / OPTIONS
    if not file.exists():
        if (directory / INPUTS).exists():
            raise RunError(
                f"{file} is missing, which held the options of the run. Bring it back from a copy. Or give the run's "
                f"first command once more, with all its options and `directory={directory}`: the run continues."
            )
        if (directory / LOCK).exists():
            raise RunError(
                f"The run in {directory} has not started: it has no {OPTIONS}. Wait until its ranks and servers are "
                "ready. If it has ended, give its command once more."
            )
        if not directory.exists():
            raise RunError(
                f"There is no directory {directory} (seen from {Path.cwd()}). Give the one that `etude train` printed."
            )
        raise RunError(
            f"{directory} holds no run: it has no {OPTIONS}. Give the directory that `etude train` printed, "
            f"such as runs/train-20260101-120000."
        )
    return str(read_options(directory).get("recipe", "train"))


def read_run(directory: Path, overrides: Sequence[str] = (), *, masked: Callable[[str], object] | None = None) -> Run:
    """Return the `etude train` run in a directory; see `read_recipe`."""
    return read_recipe(Run, directory, overrides, masked=masked)


def read_recipe(
    kind: type[R], directory: Path, overrides: Sequence[str] = (), *, masked: Callable[[str], object] | None = None
) -> R:
    """Return the run in a directory, of one recipe, with some options overridden.

    Secrets are not written. Their values come from an override, or from `masked`, which is called with the option's
    path.
    """
    written, expected = read_recipe_name(directory), kind.model_fields["recipe"].default
    if written != expected:
        raise RunError(
            f"{directory} holds a run of `etude {written}`, and this is `etude {expected}`. Name another directory; "
            f"to continue that run, `etude {written} --resume {directory}`."
        )
    directory_overrides = [text for text in overrides if text.partition("=")[0].strip("+ ") == "directory"]
    if directory_overrides:
        raise ConfigError(
            f"`{directory_overrides[0]}` was given together with the run in {directory}, which stays where it is. "
            "Leave it out; to continue elsewhere, copy the directory and name the copy."
        )
    run = _compose_recorded(kind, directory, overrides, masked)
    here = _absolute(directory)
    recorded = run.directory or here
    return _with_paths(run, lambda path: _move(path, recorded, here)).model_copy(update={"directory": here})


def _compose_recorded(
    kind: type[R], directory: Path, overrides: Sequence[str], masked: Callable[[str], object] | None
) -> R:
    """Compose the options that a run has written. It wrote them whole, so one that is refused is of another version."""
    file = directory / OPTIONS
    try:
        return compose(kind, overrides, file=file, unmask=masked)
    except ConfigError as error:
        if str(file) not in str(error):
            raise
        raise ConfigError(
            f"{error}\nThe run was started with another version of Etude, or of its plug-ins. Use the versions in "
            f"{directory / 'sessions.jsonl'} to continue it, or to export its model for a new run."
        ) from error


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """Return the metrics of each training step, in order. Step 0, which only scores, is left out."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_steps(directory / METRICS_FILE):
        late = line.pop("late", False)
        steps[line["step"]] = steps.get(line["step"], {}) | line if late else line
    return [steps[step] for step in sorted(steps) if step > 0]


def with_absolute_paths(run: R) -> R:
    """Return the same run with absolute paths."""
    return _with_paths(run, _absolute)


def _with_paths(run: R, change: Callable[[Path], Path]) -> R:
    """Return the same run with changed paths."""

    def data(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(file, names))

    def file(name: str) -> str:
        """Change the file of `source=path/to/file`; leave `module:Name` as it is."""
        source, path = split_source(name)
        return name if is_module(path) else with_source(source, str(change(Path(path))))

    paths: dict[str, Any] = {path: run.path_at(path) for path in ("directory", *run.path_options.values())}
    paths = {path: change(location) for path, location in paths.items() if location is not None}
    for option in run.path_mappings.values():
        paths[option] = {name: change(location) for name, location in run.paths_at(option).items()}
    paths |= {"data.train": data(run.data.train), "data.val": data(run.data.val)}
    if isinstance(run, Run):
        paths |= {"env": run.env.with_absolute_paths(change)}
        paths |= {"agent.path": run.agent.path and with_file(run.agent.path, change)}
        paths |= {"agent.sources": {name: with_file(path, change) for name, path in run.agent.sources.items()}}
        paths |= {"agent.external": run.agent.external and change(run.agent.external)}
        paths |= {"reward": run.reward.with_absolute_paths(change)}
    for path, value in paths.items():
        run = replace_option(run, path, value)
    return run


def is_module(name: str) -> bool:
    """Return whether data comes from Python code, as `module:Name`, and not from a file."""
    return ":" in name and "/" not in name.rpartition(":")[2] and not Path(name).expanduser().exists()


def _absolute(path: Path) -> Path:
    """Return an absolute path without `..`, and with its symbolic links unresolved: the user may move a link on
    purpose."""
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100


def check_same_options(directory: Path, run: Recipe) -> None:
    """Refuse to resume a run that was started with other options, and name them. Secrets are not stored, and count as
    equal."""
    if (directory / REPLAY).exists():
        raise RunError(
            f"{directory} was trained by `etude replay` on the rollouts of another run, and cannot be continued. Write "
            f"its model with `{etude_command()} export {directory} my-model`, and begin a new run with "
            "`model.path=my-model`."
        )
    if not (directory / OPTIONS).exists():
        if (directory / INPUTS).exists():
            message = (
                "%s is missing: the options that are given now are taken to be those that the run was started with."
            )
            get_logger("recipes").warning(message, directory / OPTIONS)
        return
    changed = differences(read_recipe(type(run), directory, masked=_flat_options(run, masked=False).get), run)
    if changed:
        listed = "; ".join(f"{path} was {before}, is {after}" for path, before, after in changed)
        schedules = ""
        length_options = [path for path, mark in marked_options(run) if mark.sets_length]
        if any(path in length_options for path, *_ in changed):
            schedules = (
                f"{_listed(length_options)} may change only while nothing depends on it: "
                f"{_listed(run.schedules())} constant. "
            )
        remedy = "To train with other options, begin a new run in another `directory`: this one has saved no step."
        if list_paths(directory / CHECKPOINTS):
            remedy = (
                f"To train its model with other options, begin a new run from it: `etude export {directory} my-model`, "
                "then the same command with `model.path=my-model` and another `directory`."
            )
        raise ConfigError(
            f"{directory} holds a run that was started otherwise: {listed}. {schedules}To continue, leave that out. "
            f"{remedy}"
        )


def check_journal(directory: Path) -> None:
    """Refuse to resume a run whose journal is gone, before an empty one is in its place."""
    saved = list_paths(directory / CHECKPOINTS)
    if saved and not (directory / JOURNAL).exists():
        raise RunError(
            f"{directory / JOURNAL} is missing, which held the rollouts up to {saved[-1].name}. Bring it back from a "
            "copy, with its -wal file; or write the model with "
            f"`{etude_command()} export {directory} my-model`, and begin a new run with `model.path=my-model`."
        )


def write_tasks(directory: Path, tasks: Mapping[str, str]) -> None:
    """Write the tasks of a program as files of its run, by their use. Refuse other training tasks than the run started
    with; tasks for scoring may change."""
    for name, text in tasks.items():
        file = directory / TASKS_FOLDER / f"{name}.jsonl"
        existing = file.read_text(encoding="utf-8") if file.exists() else None
        if existing == text:
            continue
        if name == "train" and (directory / INPUTS).exists():
            raise ConfigError(
                f"{directory} holds a run that was started on other tasks than those that are given now. Give the "
                "same, in the same order, or start a new run in another `directory`."
            )
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_name(f".{file.name}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)


def write_options(directory: Path, options: Config) -> None:
    """Write the run's options into its directory, atomically."""
    write_text(directory / OPTIONS, to_yaml(options))


def differences(before: Recipe, after: Recipe) -> list[tuple[str, object, object]]:
    """Return the options that make two runs different: path, value before, value after.

    Paths of files do not count. The contents of the files do, and `inputs` compares those.
    """
    old = _flat_options(with_absolute_paths(before))
    new = _flat_options(with_absolute_paths(after))
    marks = {**dict(marked_options(after)), **dict(marked_options(before))}
    any_length = before.length_may_change
    free = [path for path, mark in marks.items() if any_length or not mark.sets_length]
    free += [*before.path_options.values(), *before.path_mappings.values(), "data.train"]
    return [
        (path, old.get(path, "absent"), new.get(path, "absent"))
        for path in sorted(old.keys() | new.keys())
        if old.get(path, "absent") != new.get(path, "absent") and not _is_one_of(path, free)
    ]


def _flat_options(options: Config, *, masked: bool = True) -> dict[str, object]:
    """Return every value of a run by its dotted path, with secrets masked if `masked`."""

    def flat(tree: Mapping[str, object], path: str) -> Iterator[tuple[str, object]]:
        for name, value in tree.items():
            here = f"{path}.{name}" if path else name
            if isinstance(value, Mapping) and value:
                yield from flat(value, here)
            else:
                yield here, value

    return dict(flat(mask(to_tree(options)) if masked else to_tree(options), ""))


def _listed(names: Iterable[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def _is_one_of(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def check_model(path: Path, name: str = "model.path") -> None:
    """Refuse a path that is not a model directory, and say what to give instead."""
    if not path.is_dir():
        raise ConfigError(
            f"`{name}={path}` is no directory (seen from {Path.cwd()}). Give one that holds a model's config.json, "
            "weights and tokenizer; or the name of a model of the Hugging Face hub, such as Qwen/Qwen3-0.6B."
        )
    if (path / OPTIONS).is_file():
        remedy = "It has saved no step yet, so it has no model to give."
        if list_paths(path / CHECKPOINTS):
            remedy = f"Write its model with `{etude_command()} export {path} my-model` and give that."
        raise ConfigError(
            f"`{name}={path}` is the directory of a run, not of a model. {remedy} To continue the run, "
            f"`{etude_command()} {read_recipe_name(path)} --resume {path}`."
        )
    if not (path / "config.json").is_file():
        contents = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"`{name}={path}` is no model's directory: it has no config.json. It holds {contents}. Give one that "
            f"holds a model's config.json, weights and tokenizer."
        )
