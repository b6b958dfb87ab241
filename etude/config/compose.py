"""Compose a run: defaults, files and overrides become one frozen, validated object; a sweep becomes several jobs.

    run = compose(Run, ["loss=gspo", "loss.clip_high=3e-4", "kl.controller=adaptive"], file=Path("mine.yaml"))
    run = compose(Run, values={"loss": "gspo", "sampling.stop": ["\\n\\n"]})
    jobs = multirun(Run, ["loss=ppo,gspo", "seed=range(1,4)"], train, directory=Path("sweeps/first"))

A single run is composed here in a few milliseconds, with Hydra's override grammar and OmegaConf's interpolations. Hydra
itself composes and launches the jobs of a sweep, from the same nodes. Hydra has global state in the process, so a sweep
holds a lock and restores that state. A job runs outside the lock, and may start a sweep itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Self, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse
from pydantic import BaseModel, ValidationError

from etude.config.composition_plan import ROOT, CompositionPlan
from etude.config.override import make_override, parse_override
from etude.config.secrets import MASK, mask_text
from etude.config.tree import iter_paths, join_path
from etude.config.validation_errors import merge_errors, to_config_error
from etude.errors import ConfigError, UnknownKeyError

R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")

_LOCK = Lock()
LOCK_TIMEOUT_S = 60
"""Seconds to wait for the composition of another thread, which takes less than a second."""
_RESERVED_KEYS = re.compile(r"hydra\.(sweep|run|output_subdir)(\.|$)|hydra$")
"""Hydra's output directories. A sweep has Etude's directory, and Hydra's own records would contain secrets."""
_HYDRA_OVERRIDES = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]


@dataclass(frozen=True)
class SweepJob(Generic[R, T]):
    """One finished job of a sweep."""

    number: int
    """Its index in the sweep, from 0."""
    overrides: tuple[str, ...]
    """The overrides of this job, as `key=value`."""
    directory: Path
    """The directory of this job."""
    run: R
    """The composed run."""
    result: T
    """The result of the task."""


def compose(
    root: type[R],
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
    file: Path | None = None,
    preset: Path | None = None,
    base: Mapping[str, Any] | None = None,
    unmask: Callable[[str], object] | None = None,
) -> R:
    """Return the run of the defaults, `base`, `preset`, `file`, `overrides` and `values`. The later one wins.

    base: a tree of options, shaped like the run.
    values: Python values of options by dotted path. They are not parsed: a `${` is no interpolation, a backslash no
    escape.
    unmask: returns the value of a path at which a file has a masked secret. Without it, an override must set the path;
    else the file is refused.
    """
    composer = _Composer(root, overrides, (preset, file), unmask, base, values)
    for override in composer.parsed_overrides:
        if override.is_hydra:
            raise ConfigError(
                f"{override.path} is an option of Hydra itself, which only a sweep uses. Leave it out, or add "
                "--multirun."
            )
        if override.is_sweep:
            raise ConfigError(
                f"{mask_text(f'{override.path}={override.text}')} asks for several values, which is a sweep. Add "
                "--multirun to run one job for each, or put a list in brackets and a text in quotes."
            )
    return composer.compose()


def multirun(
    root: type[R],
    overrides: Sequence[str],
    task: Callable[[R], T],
    *,
    file: Path | None = None,
    preset: Path | None = None,
    directory: Path,
) -> list[SweepJob[R, T]]:
    """Run `task` once for each combination of the swept values, each job in its own subdirectory of `directory`.

    Every job is composed and validated before the first one starts. A failed task does not stop the others. Its
    exception is raised at the end; several are raised as an exception group.
    """
    composer = _Composer(root, overrides, (preset, file))
    for override in composer.parsed_overrides:
        if _RESERVED_KEYS.match(override.path):
            raise ConfigError(
                f"{override.path} would make Hydra write elsewhere, and a sweep has one directory. Leave it out, and "
                "give that directory: `directory=…` both on the command line and in multirun()."
            )
    composer.sweep(lambda _: None, directory)
    return composer.sweep(task, directory)


class _HydraState:
    """Hydra's global state, while the lock is held: Etude's nodes and Hydra's own, and no application."""

    def __init__(self, nodes: Mapping[tuple[str, str], dict[str, Any]]) -> None:
        self._nodes = nodes

    def __enter__(self) -> Self:
        if not _LOCK.acquire(timeout=LOCK_TIMEOUT_S):
            raise ConfigError(
                f"Another thread has been composing a configuration for {LOCK_TIMEOUT_S} seconds, and Hydra allows one "
                "at a time. Find out what that thread waits for, or compose in a separate process."
            )
        store, application = ConfigStore.instance(), GlobalHydra.instance()
        self._saved = store.repo, application.hydra
        try:
            store.repo = {"hydra": store.repo["hydra"]}
            application.clear()
            for (group, name), node in self._nodes.items():
                store.store(group=group or None, name=name, node=node)
        except BaseException:  # also an interrupt: the lock must be free for the next thread
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        ConfigStore.instance().repo, GlobalHydra.instance().hydra = self._saved
        _LOCK.release()

    @contextmanager
    def release_lock(self) -> Iterator[None]:
        """Release the lock inside the block, so that other threads can compose."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class _Composer(Generic[R]):
    """The parsed overrides and files of one call, ready to compose once or as a sweep."""

    def __init__(
        self,
        root: type[R],
        overrides: Sequence[str],
        files: Sequence[Path | None],
        unmask: Callable[[str], object] | None = None,
        base: Mapping[str, Any] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        self._root = root
        parsed = [parse_override(text, example=next(iter(root.model_fields), "key")) for text in overrides]
        self._hydra = [text for text, override in zip(overrides, parsed, strict=True) if override.is_hydra]
        self.parsed_overrides = [*parsed, *(make_override(path, value) for path, value in (values or {}).items())]
        run_overrides = [override for override in self.parsed_overrides if not override.is_hydra]
        merged: dict[str, Any] = dict(base or {})
        self._origins: dict[str, str] = {}
        for file in filter(None, files):
            tree = _fill_masked(_read_file(file), file, {override.path for override in run_overrides}, unmask)
            merged = _merge_trees(merged, tree)
            self._origins |= {path: str(file) for path, _ in iter_paths(tree)}
        self._plan = CompositionPlan(
            root, run_overrides, merged, " over ".join(str(file) for file in reversed(files) if file is not None)
        )
        for override in run_overrides:
            parts = override.path.split(".")
            for depth in range(len(parts)):  # a section with an override is not the file's alone
                self._origins.pop(".".join(parts[: depth + 1]), None)
        _refuse_broken_references((o.path, value) for o in run_overrides for value in o.values)

    def compose(self) -> R:
        """Compose the single run."""
        tree = OmegaConf.create(self._plan.build_tree())
        for path, value in self._plan.iter_values():
            try:
                OmegaConf.update(tree, path, value, merge=True, force_add=True)
            except OmegaConfBaseException as error:
                override, reason = mask_text(f"{path}={value}"), mask_text(str(error).splitlines()[0])
                raise ConfigError(f"The override {override} does not fit with the others: {reason}") from error
        return self._validate(tree)

    def sweep(self, task: Callable[[R], T], directory: Path) -> list[SweepJob[R, T]]:
        """Compose every run of the sweep; Hydra's launcher passes each to the task."""
        hydra_state = _HydraState(self._plan.nodes)
        hydra_record = directory / "multirun.yaml"  # Hydra's record of the sweep, with unmasked secrets

        def job(tree: DictConfig) -> SweepJob[R, T] | Exception:
            hydra_record.unlink(missing_ok=True)
            hydra_config = HydraConfig.get()
            job_overrides = tuple(_format_hydra_override(text) for text in hydra_config.overrides.task)
            job_name = f"Job {hydra_config.job.num} ({' '.join(job_overrides)})"
            try:
                run = self._validate(tree)
            except ConfigError as error:
                return type(error)(f"{job_name}: {error}")
            try:
                with hydra_state.release_lock():
                    result = task(run)
            except Exception as error:  # a task may raise anything; the sweep continues, and raises it at the end
                error.add_note(job_name)
                return error
            return SweepJob(
                int(hydra_config.job.num), job_overrides, Path(hydra_config.runtime.output_dir), run, result
            )

        overrides = [
            *_HYDRA_OVERRIDES,
            f"hydra.sweep.dir={_quote(str(directory))}",
            *self._hydra,
            *self._plan.overrides,
        ]
        with (
            hydra_state,
            _translate_hydra_errors(),
            hydra.initialize(version_base="1.3", config_path=None, job_name=ROOT),
        ):
            application = GlobalHydra.instance().hydra
            assert application is not None
            try:
                batches = application.multirun(ROOT, job, overrides, with_log_configuration=False)
            finally:
                hydra_record.unlink(missing_ok=True)
        return _collect_jobs([job_return.return_value for batch in batches for job_return in batch])

    def _validate(self, tree: DictConfig) -> R:
        values = _resolve_interpolations(tree)
        try:
            return self._root.__pydantic_validator__.validate_python(values)  # type: ignore[no-any-return]
        except ValidationError as error:
            raise to_config_error(self._root, error, values, origins=self._origins) from error


def _collect_jobs(outcomes: list[SweepJob[R, T] | Exception]) -> list[SweepJob[R, T]]:
    """Return the jobs if all succeeded; else raise their errors."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    refused = [failure for failure in failures if isinstance(failure, ConfigError)]
    if failures and len(refused) == len(failures):
        raise merge_errors(refused)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(outcomes)} jobs failed.", failures)
    return [outcome for outcome in outcomes if isinstance(outcome, SweepJob)]


def _read_file(file: Path) -> dict[str, Any]:
    """Read the user's YAML as plain data, with unresolved interpolations."""
    try:
        text = file.read_text(encoding="utf-8")
        top = yaml.compose(text, Loader=yaml.SafeLoader)
        if top is not None and not isinstance(top, yaml.MappingNode):
            raise ConfigError(f"{file} is YAML, and not a mapping. Write one `key: value` a line, shaped like the run.")
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except OSError as error:
        raise ConfigError(f"The configuration file {file} cannot be read: {error.strerror}. Check its path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The configuration file {file} is not text in UTF-8. Check that it is a YAML file."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = _mask_quoted(str(error.problem), text)
        raise ConfigError(f"{file}{where} is not YAML: {problem}. Correct the file there.") from None
    except RecursionError:
        raise ConfigError(
            f"{file} contains itself: an alias in it refers to its own parent. Write the value out."
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        if isinstance(error, GrammarParseError):
            _refuse_broken_references(iter_paths(yaml.safe_load(text)), f" It is set in {file}.")
        problem = _mask_quoted(str(error).splitlines()[0], text)
        raise ConfigError(f"{file} is not YAML that can be used: {problem}. Correct the file.") from None
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _fill_masked(
    tree: Mapping[str, Any],
    file: Path,
    overridden: AbstractSet[str],
    unmask: Callable[[str], object] | None,
    path: str = "",
) -> dict[str, Any]:
    """Return a file's tree without masked secrets. Overrides set them; `unmask` fills the others, or the file is
    refused."""
    filled: dict[str, Any] = {}
    for name, value in tree.items():
        here = join_path(path, str(name))
        if isinstance(value, Mapping):
            filled[name] = _fill_masked(value, file, overridden, unmask, here)
        elif value != MASK:
            filled[name] = value
        elif unmask is not None:
            filled[name] = unmask(here)
        elif not any(here == option or here.startswith(f"{option}.") for option in overridden):
            raise ConfigError(
                f"{here} is {MASK} in {file}: it was masked when the file was written. Set it again as {here}=… on "
                f"the command line or in the file, or permanently as {here}='${{oc.env:NAME}}' in the file, where "
                f"NAME is a variable of the environment."
            )
    return filled


def _merge_trees(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a file's tree over a lower one. If both name a different choice, the lower one's options are dropped."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(lower, Mapping) and isinstance(value, Mapping) and value.get("name") in (None, lower.get("name")):
            value = _merge_trees(lower, value)
        merged[key] = value
    return merged


def _mask_quoted(message: str, text: str) -> str:
    """Mask the message of a YAML reader. If the text has secrets, every quotation in the message is masked."""
    masked = mask_text(message)
    return masked if mask_text(text) == text else re.sub(r"(['\"])[^'\"]{3,}\1", "'***'", masked)


def _refuse_broken_references(values: Iterable[tuple[str, Any]], remark: str = "") -> None:
    """Refuse each `${` that begins no interpolation, and name its key; Hydra would not name it."""
    broken = {path: None for path, value in values if any(map(_is_broken, _iter_strings(value)))}
    if broken:
        raise merge_errors(
            [
                ConfigError(
                    f"{path} holds a ${{ that begins no reference. Write ${{other.key}} to refer to another option, "
                    f"or \\${{ for the two characters themselves.{remark}"
                )
                for path in broken
            ]
        )


def _is_broken(text: str) -> bool:
    if "${" not in text:
        return False
    try:
        parse(text)
    except GrammarParseError:
        return True
    return False


def _iter_strings(value: Any) -> Iterator[str]:
    if isinstance(value, QuotedString):
        yield value.text
    elif isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _iter_strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _iter_strings(item)


def _resolve_interpolations(tree: DictConfig) -> Any:
    """Return the composed tree as plain data, with resolved interpolations."""
    try:
        return OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        key, message = error.full_key, str(error).splitlines()[0]
    if variable := re.search(r"Environment variable '(.+?)' not found", message):
        raise ConfigError(
            f"{key} reads the environment variable {variable[1]}, which is not set. "
            f"Set it, or give a default: ${{oc.env:{variable[1]},default}}."
        )
    raise ConfigError(f"{key} refers to an option that does not exist: {mask_text(message)}. Correct the reference.")


@contextmanager
def _translate_hydra_errors() -> Iterator[None]:
    try:
        yield
    except HydraException as error:
        message = str(error.__cause__ or error).splitlines()[0]
    else:
        return
    if missing := re.search(r"Could not override '(.+?)'\. No match", message):
        path = missing[1].replace("/", ".")
        raise UnknownKeyError(
            f"{path} is not an option of every job: it is missing under another choice. Sweep those separately."
        )
    raise ConfigError(f"Hydra could not compose this: {mask_text(message)}")


def _format_hydra_override(override: str) -> str:
    """Return one of Hydra's overrides as a user writes it, with masked secrets."""
    key, _, value = override.removeprefix("++").partition("=")
    return mask_text(f"{key.replace('/', '.')}={value.replace(chr(92) + ':', ':')}")


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
