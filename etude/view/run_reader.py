"""The files of one run, read as they grow. A file that is damaged or missing leaves the others readable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from etude.chat import PromptReader, Tokenizer
from etude.errors import EtudeError, NotFoundError, StoreError
from etude.observe.jsonl import METRICS_FILE
from etude.observe.step_history import MetricsFile
from etude.recipes.run.directory import JOURNAL, OPTIONS, read_options
from etude.recipes.run.resume.session_log import SESSIONS, Session, read_sessions
from etude.store import Journal, RolloutState, open_store
from etude.tools.metric_curves import LatestMetrics
from etude.tools.rollout_reader import RewardGetter, make_prompt_reader, reward_of_options
from etude.tools.step_index import StepIndex
from etude.view.images import split_images
from etude.view.task_index import TaskIndex

T = TypeVar("T")
MOST_IMAGE_BYTES = 2**25
"""Bytes of images that are kept."""
ANSWER_S = 2.0
"""Timeout of a connection to a database, in seconds. After a failure the next try waits as long."""


class RunReader:
    """The options, metrics, sessions and journal of a run. One thread uses it at a time, with its `lock`.

    Any thread may read `options`, `latest`, `sessions` and `problems` without it.
    """

    def __init__(self, name: str, directory: Path, database: str = "") -> None:
        """database: the address of the database that has the journal; empty if it is a file."""
        self.name = name
        self.directory = directory
        self.database = database
        self.lock = threading.RLock()
        self._metrics = MetricsFile(directory / METRICS_FILE)
        self._latest = LatestMetrics(directory)
        self._contents: dict[str, tuple[tuple[int, int], Any]] = {}
        """The content of small files, each with the time and size of the file."""
        self._journal: Journal | None = None
        self._journal_file: tuple[int, int] | None = None
        self._unanswered = 0.0, ""
        """The time before which no connection is tried again, and the error of the last one."""
        self._images: tuple[int, list[str]] | None = None
        """The images of the task that was read last."""
        self._index: StepIndex | None = None
        self._task_index: TaskIndex | None = None
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_path: str | None = None
        self._prompts: PromptReader | None = None
        self._problems: dict[str, str] = {}

    @property
    def problems(self) -> list[str]:
        """The sentences about files that could not be read so far."""
        return [*filter(None, [*self._problems.values(), self._metrics.problem])]

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the run; empty if they cannot be read."""
        return self._cached(OPTIONS, self._read_options, {})

    def _read_options(self, directory: Path) -> Mapping[str, Any]:
        self._problems.pop(OPTIONS, None)
        try:
            return read_options(directory)
        except EtudeError as error:
            self._problems[OPTIONS] = str(error)
            return {}

    @property
    def latest(self) -> Mapping[str, Any]:
        """The latest value of each metric, from the end of the file alone."""
        return self._cached(METRICS_FILE, lambda _: self._latest.refresh(), {})

    @property
    def metrics(self) -> MetricsFile:
        """The metrics up to the last whole line."""
        self._metrics.refresh()
        return self._metrics

    @property
    def sessions(self) -> list[Session]:
        """The sessions of the run; empty if none was recorded."""
        return self._cached(SESSIONS, read_sessions, [])

    def _cached(self, name: str, read: Callable[[Path], T], missing: T) -> T:
        """Return the content of a file, which is read again if the file has changed."""
        stamp = _stamp(self.directory / name)
        if stamp is None:
            self._contents.pop(name, None)
            return missing
        known = self._contents.get(name)
        if known is None or known[0] != stamp:
            known = self._contents[name] = stamp, read(self.directory)
        content: T = known[1]
        return content

    @property
    def has_journal(self) -> bool:
        """True if the run has a journal, which supervised runs do not have."""
        return bool(self.database) or (self.directory / JOURNAL).is_file()

    @property
    def journal(self) -> Journal:
        """The journal, open for reading."""
        path = self.directory / JOURNAL
        stamp = (0, 0) if self.database else _identity(path)
        if stamp != self._journal_file:
            self._close_journal()
        if self._journal is None:
            if stamp is None:
                raise NotFoundError(f"The run '{self.name}' has no {JOURNAL}, so it has no rollouts.")
            self._journal = self._open_journal(path)
            self._journal_file = stamp
        return self._journal

    def _open_journal(self, path: Path) -> Journal:
        until, why = self._unanswered
        if time.monotonic() < until:  # requests that waited for the one before
            raise StoreError(why)
        try:
            return open_store(self.database or path, read_only=True, answer_s=ANSWER_S)
        except StoreError as error:
            if self.database:
                self._unanswered = time.monotonic() + ANSWER_S, str(error)
            raise

    def images(self, task: int) -> list[str]:
        """Return the URLs of a task's images. They are kept until those of another task are needed, since a page loads
        them one after the other."""
        journal = self.journal  # another journal in its place has other tasks
        known, images = self._images or (None, [])
        if known != task:
            _, images = split_images(journal.task(task))
            self._images = (task, images) if sum(map(len, images)) <= MOST_IMAGE_BYTES else None
        return images

    @property
    def index(self) -> StepIndex:
        """The steps of the journal, up to now."""
        journal = self.journal
        if self._index is None:
            self._index = StepIndex(journal)
        else:
            self._index.refresh()
        return self._index

    @property
    def task_index(self) -> TaskIndex:
        """The tasks of the journal by their row, as far as they are read."""
        journal = self.journal
        if self._task_index is None:
            self._task_index = TaskIndex(journal)
        return self._task_index

    @property
    def reward_of(self) -> RewardGetter:
        """The function that gives a rollout's reward."""
        return reward_of_options(self.options)

    def rewards(self, states: list[RolloutState]) -> list[float | None]:
        """Return the rewards that training used."""
        reward_of = self.reward_of
        return [reward_of(state) for state in states]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run; None if it is no longer at its path."""
        model = self.options.get("model") or {}
        path = model.get("tokenizer") or model.get("path")
        if path != self._tokenizer_path:
            self._tokenizer_path = path
            self._tokenizer = None
            self._prompts = None
            self._problems.pop("tokenizer", None)
            try:
                self._tokenizer = None if path is None else Tokenizer.load(Path(path))
            except EtudeError as error:
                self._problems["tokenizer"] = f"Tokens cannot be shown as text. {error}"
        return self._tokenizer

    @property
    def prompts(self) -> PromptReader | None:
        """The reader of the recorded prompts; None without the tokenizer."""
        tokenizer = self.tokenizer
        if self._prompts is None and tokenizer is not None:
            self._prompts = make_prompt_reader(tokenizer, self.options)
        return self._prompts

    def close(self) -> None:
        """Close the journal and forget the metrics. Both are read again when they are used."""
        self._close_journal()
        self._metrics = MetricsFile(self.directory / METRICS_FILE)

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal = self._images = self._index = self._task_index = self._journal_file = None


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return the time and size of a file; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and number of a file, which another file in its place does not have."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
