"""Every error Etude raises on purpose, in one tree.

    EtudeError
    ├── ConfigError (ValueError)          what was asked for cannot be run as asked
    │   ├── UnknownKeyError               a key no option has; names the nearest that one does
    │   ├── UnknownChoiceError            a choice that does not exist; lists those that do
    │   └── PluginError                   a `module:Name` that does not import, or is not what it should be
    ├── DataError (ValueError)            the data handed in breaks a rule; names the row or rollout
    │   ├── BatchError                    columns of a batch that do not fit together
    │   ├── ChatError                     a conversation that cannot be shown to the model; says why
    │   ├── MissingColumnError            a column that an algorithm declared and nobody provided
    │   └── RewardError                   a reward that could not be had, or is no finite number; names the task
    ├── CheckpointError                   a checkpoint that cannot be written or read; names the file
    ├── CollectionError                   a step that got nothing to train on; says what failed
    ├── EnvError                          an environment or a tool that breaks its word; names it
    ├── AgentError (ValueError)           an agent that breaks its word: its parameters, its reward, its end; says which
    ├── RunError                          a run directory that cannot be used: in use, missing, not a run
    │   └── DamagedFileError              a file of it that is not what was written; names the file
    ├── TrainingError                     an update that cannot be taken; the weights are as they were
    ├── StoreError                        the journal cannot be opened, read or written as asked; names the file
    │   ├── IllegalTransitionError (ValueError) an event that may not follow what is recorded; names both states
    │   └── NotFoundError (LookupError)    something that the store has never heard of; names it
    ├── InvalidKeyError                   a key that does not open what was asked for; says whose it is
    ├── CrewError                         processes that work together cannot start or go on; names the rank
    ├── EngineError (RuntimeError)         an inference engine cannot go on; says which knob to turn
    └── MissingPackageError (ImportError) an optional package is absent; names the extra to install

Each message is a sentence or two: what was asked, what was found, where, and what to do about it.
A mistake of Etude's own is an `assert`, never one of these.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "AgentError",
    "BatchError",
    "ChatError",
    "CheckpointError",
    "CollectionError",
    "ConfigError",
    "CrewError",
    "DamagedFileError",
    "DataError",
    "EngineError",
    "EnvError",
    "EtudeError",
    "IllegalTransitionError",
    "InvalidKeyError",
    "MissingColumnError",
    "MissingPackageError",
    "NotFoundError",
    "PluginError",
    "RewardError",
    "RunError",
    "StoreError",
    "TrainingError",
    "UnknownChoiceError",
    "UnknownKeyError",
    "describe_out_of_memory",
    "describe_system_error",
    "translate_memory_errors",
]


class EtudeError(Exception):
    """The root of the tree: `except EtudeError` catches everything Etude raises on purpose."""


class ConfigError(EtudeError, ValueError):
    """What was asked for cannot be run as asked."""


class UnknownKeyError(ConfigError):
    """A key that no option has."""


class UnknownChoiceError(ConfigError):
    """A choice that does not exist."""


class PluginError(ConfigError):
    """A `module:Name` that does not import, or names something of the wrong kind."""


class DataError(EtudeError, ValueError):
    """The data handed in breaks a rule."""


class BatchError(DataError):
    """The columns of a batch do not fit together."""


class ChatError(DataError):
    """A conversation that cannot be shown to the model."""


class MissingColumnError(DataError):
    """An algorithm declared a column that the batch does not have."""


class RewardError(DataError):
    """A reward that could not be had, or that is not a finite number."""


class CheckpointError(EtudeError):
    """A checkpoint cannot be written or read."""


class CollectionError(EtudeError):
    """A step got nothing to train on."""


class EnvError(EtudeError):
    """An environment or a tool that breaks its word."""


class AgentError(EtudeError, ValueError):
    """An agent that breaks its word."""


class RunError(EtudeError):
    """A run directory cannot be used."""


class DamagedFileError(RunError):
    """A file of a run cannot be read, or is not what was written."""


class TrainingError(EtudeError):
    """An update cannot be taken; the weights are as they were before it."""


class StoreError(EtudeError):
    """The journal cannot be opened, read or written as asked."""


class IllegalTransitionError(StoreError, ValueError):
    """An event that may not follow what is recorded."""


class NotFoundError(StoreError, LookupError):
    """Something that the store has never heard of."""


class InvalidKeyError(EtudeError):
    """A key that is missing, wrong, expired, or another's."""


class CrewError(EtudeError):
    """A process of those that work together did not start, ended, fell silent, or met what is no error of ours."""


class EngineError(EtudeError, RuntimeError):
    """An inference engine cannot do what it was asked, or cannot go on."""


class MissingPackageError(EtudeError, ImportError):
    """An optional package is absent."""


def describe_out_of_memory(error: BaseException) -> str:
    """Return a sentence on an error that says that the system or a GPU gave no more memory; empty for any other."""
    if "CUDA out of memory" in str(error):
        return (
            f"The GPU has no more memory ({str(error).splitlines()[0]}). `etude plan` says how much a run takes, and "
            "which option lowers that; `nvidia-smi` shows whether another process holds memory there."
        )
    refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not refused and "allocate memory" not in str(error):
        return ""
    detail = f" ({str(error).splitlines()[0]})" if str(error) else ""
    return (
        f"The system gave this process no more memory{detail}. `etude plan` says how much a run takes; `ulimit -v` "
        "shows whether the address space of processes is bounded here, and `ulimit -v unlimited` lifts that."
    )


@contextmanager
def translate_memory_errors() -> Iterator[None]:
    """Raise memory that is refused within as a `TrainingError`, which says so and what to do."""
    try:
        yield
    except EtudeError:
        raise
    except (RuntimeError, OSError, MemoryError) as error:  # torch raises the first
        if message := describe_out_of_memory(error):
            raise TrainingError(message) from error
        raise


def describe_system_error(error: OSError | MemoryError) -> str:
    """Return a sentence on what the system refused."""
    if message := describe_out_of_memory(error):
        return message
    where = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return f"The system refused to read or write{where}: {getattr(error, 'strerror', None) or error}."
