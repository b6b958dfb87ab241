"""Plug-ins: `module:Name` instead of a name from a table, so that a new choice needs no fork of Etude.

Code for one run need not be an importable module: `path/to/file.py:name` names it too (`load_object`).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from etude.config.suggestions import suggest_name
from etude.errors import PluginError

_FILE_MODULE_PREFIX = "etude_file_"
"""The prefix of the names of modules that were loaded by file path."""
_running: ContextVar[Path | None] = ContextVar("_running", default=None)

_SPEC = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def load_plugin(spec: str, base: type | None) -> Any:
    """Import the object `module:Name`; with `base` it must be a subclass of it."""
    if not _SPEC.fullmatch(spec):
        raise PluginError(
            f"The plug-in '{spec}' cannot be read. Write module:Name, for example my_package.losses:MyLoss."
        )
    module_name, _, name = spec.partition(":")
    target: Any = _import(spec, module_name)
    for part in name.split("."):
        if not hasattr(target, part):
            raise PluginError(
                f"The plug-in '{spec}' was requested, and {module_name} has no {part}.{_suggest(part, target)}"
            )
        target = getattr(target, part)
    if base is not None and not (isinstance(target, type) and issubclass(target, base)):
        raise PluginError(
            f"The plug-in '{spec}' must be a subclass of {base.__module__}.{base.__qualname__}, and it is not. "
            f"Derive it from {base.__qualname__}."
        )
    return target


def load_object(path: str, kind: str, example: str) -> Any:
    """Import the object `path/to/file.py:name` or `module:name`. A file runs once in a process, and again after it has
    changed.

    kind: the word for it in errors, such as `reward function`. example: a correct option, such as
    `reward.path=x.py:y`.
    """
    source, _, name = path.rpartition(":")
    if path.endswith(".py") or not (source and name):
        raise PluginError(
            f"The {kind} '{path}' is incomplete. Write the file or module, a colon, and the name in it: `{example}`."
        )
    if not source.endswith(".py"):
        return load_plugin(path, None)
    file = Path(source).expanduser()
    prefix = f"The {kind} '{path}' was requested, and"
    if not file.is_file():
        raise PluginError(f"{prefix} there is no file {file} (seen from {Path.cwd()}).")
    try:
        module = _run_file(file.resolve(), file.read_bytes())
    except Exception as error:  # a user's file may raise anything
        lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(file.resolve())]
        place = f" in line {lines[-1]}" if lines else ""
        raise PluginError(
            f"{prefix} running {file} raised {type(error).__name__}{place}: {str(error).rstrip('.')}."
        ) from error
    if not hasattr(module, name):
        raise PluginError(f"{prefix} {file} has no {name}.{_suggest(name, module)}")
    return getattr(module, name)


@cache
def _run_file(file: Path, content: bytes) -> ModuleType:
    """Run a file with its current content, and return it as a module."""
    digest = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()  # two files may have the same name
    spec = importlib.util.spec_from_file_location(f"{_FILE_MODULE_PREFIX}{file.stem}_{digest}", file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes in it look up their module there
    before = _running.set(file)
    try:
        # Not with the loader: its cached bytecode may be of an older text of the same length and second.
        exec(compile(content, str(file), "exec"), vars(module))
    finally:
        _running.reset(before)
    return module


def with_file(path: str, change: Callable[[Path], Path]) -> str:
    """Return `path/to/file.py:name` with its file changed; `module:name` stays as it is."""
    file, _, name = path.rpartition(":")
    return f"{change(Path(file))}:{name}" if file.endswith(".py") else path


def current_file() -> Path | None:
    """Return the file that `load_object` is running now; None if it runs none."""
    return _running.get()


def is_file_module(module: str) -> bool:
    """Return True if a module was loaded by file path; only the path can find it again."""
    return module.startswith(_FILE_MODULE_PREFIX)


def plugin_spec(kind: type) -> str:
    """Return the `module:Name` of a class, for `load_plugin`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _suggest(name: str, owner: Any) -> str:
    return suggest_name(name, (known for known in vars(owner) if not known.startswith("_"))) or " Check its spelling."


def _import(spec: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # a plug-in's module may raise anything while it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise PluginError(
                f"The plug-in '{spec}' was requested, and there is no module {missing}. "
                "Check its spelling, and that it is installed or on PYTHONPATH."
            ) from error
        raise PluginError(
            f"The plug-in '{spec}' was requested, and importing {module_name} raised {type(error).__name__}: {error}. "
            "Fix that module and try again."
        ) from error
