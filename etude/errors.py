"""The errors that Etude raises on purpose, in one tree.

    EtudeError
    ├── ConfigError (ValueError)          options that cannot run
    │   ├── UnknownKeyError               an unknown option; names the nearest known one
    │   ├── UnknownChoiceError            an unknown choice; lists the known ones
    │   └── PluginError                   a `module:Name` that does not import, or has the wrong type
    ├── DataError (ValueError)            data that breaks a rule; names the row or the rollout
    │   ├── BatchError                    columns of a batch that do not fit together
    │   ├── ChatError                     a conversation that the chat template cannot render; says why
    │   ├── ImageError                    an image that cannot be taken; says why
    │   ├── MissingColumnError            a column that an algorithm requires and the batch lacks
    │   └── RewardError                   a reward that failed, or is not a finite number; names the task
    ├── CheckpointError                   a checkpoint that cannot be written or read; names the file
    ├── CollectionError                   a step that collected no rollout to train on; says what failed
    ├── EnvError                          an environment or a tool that breaks its protocol; names it
    ├── HubError                          an environment of a hub that failed; says how
    │   └── GuestLostError                its process ended or broke its protocol: the attempt does not count
    ├── AgentError (ValueError)           an agent with wrong parameters, a wrong reward or a wrong end; says which
    ├── RunError                          a run directory that cannot be used: in use, missing, not a run
    │   └── DamagedFileError              a file of a run that has changed since it was written; names the file
    ├── TrainingError                     an update that failed; the weights are unchanged
    ├── StoreError                        a journal that cannot be opened, read or written; names the file
    │   ├── IllegalTransitionError (ValueError) an event that cannot follow the recorded state; names both states
    │   └── NotFoundError (LookupError)    an object that the store does not have; names it
    ├── InvalidKeyError                   an API key without access to the request; says which key it is
    ├── CrewError                         a worker group that cannot start or continue; names the rank
    ├── EngineError (RuntimeError)         an inference engine that cannot continue; names the option to change
    └── MissingPackageError (ImportError) an optional package is missing; names the extra to install

Each message is one or two sentences: the request, the problem, its place, and the remedy. A bug of Etude itself is an
`assert`, never one of these errors.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class EtudeError(Exception):
    """The root of the tree: `except EtudeError` catches everything Etude raises on purpose."""


class ConfigError(EtudeError, ValueError):
    """The options of a run cannot run."""

    problems: tuple[ConfigError, ...] = ()
    """The single problems, of an error that tells several."""


class UnknownKeyError(ConfigError):
    """An option does not exist."""


class UnknownChoiceError(ConfigError):
    """A choice does not exist."""


class PluginError(ConfigError):
    """A `module:Name` does not import, or has the wrong type."""


class DataError(EtudeError, ValueError):
    """The data breaks a rule."""


class BatchError(DataError):
    """The columns of a batch do not fit together."""


class ChatError(DataError):
    """The chat template cannot render a conversation."""


class ImageError(DataError):
    """An image cannot be taken: it is damaged, too large, or of a shape that the model does not take."""


class MissingColumnError(DataError):
    """An algorithm requires a column that the batch does not have."""


class RewardError(DataError):
    """A reward failed, or is not a finite number."""


class CheckpointError(EtudeError):
    """A checkpoint cannot be written or read."""


class CollectionError(EtudeError):
    """A step collected no rollout to train on."""


class EnvError(EtudeError):
    """An environment or a tool breaks its protocol."""


class HubError(EtudeError):
    """An environment of a hub failed."""


class GuestLostError(HubError):
    """The process that plays environments of a hub ended, or broke its protocol."""


class AgentError(EtudeError, ValueError):
    """An agent breaks its protocol: its parameters, its reward or its end."""


class RunError(EtudeError):
    """A run directory cannot be used."""


class DamagedFileError(RunError):
    """A file of a run cannot be read, or has changed since it was written."""


class TrainingError(EtudeError):
    """An update failed; the weights are unchanged."""


class StoreError(EtudeError):
    """The journal cannot be opened, read or written."""


class IllegalTransitionError(StoreError, ValueError):
    """An event cannot follow the recorded state."""


class NotFoundError(StoreError, LookupError):
    """The store has no such object."""


class InvalidKeyError(EtudeError):
    """An API key is missing, wrong, expired, or belongs to another object."""


class CrewError(EtudeError):
    """A rank of a worker group did not start, died, stopped responding, or raised an unexpected error."""


class EngineError(EtudeError, RuntimeError):
    """An inference engine cannot serve a request, or cannot continue."""


class MissingPackageError(EtudeError, ImportError):
    """An optional package is missing."""


def describe_out_of_memory(error: BaseException) -> str:
    """Return a sentence for an out-of-memory error of the system or of a GPU; empty for any other error."""
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
    """Raise an out-of-memory error of the block as a `TrainingError` that names the remedy."""
    try:
        yield
    except EtudeError:
        raise
    except (RuntimeError, OSError, MemoryError) as error:  # torch raises RuntimeError
        if message := describe_out_of_memory(error):
            raise TrainingError(message) from error
        raise


def describe_system_error(error: OSError | MemoryError) -> str:
    """Return a sentence for an error of the operating system."""
    if message := describe_out_of_memory(error):
        return message
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return (
            f"The system lets this process open no more files ({error.strerror}); sockets count too. `ulimit -n` shows "
            "how many it may open, and `ulimit -n 4096` raises that."
        )
    where = f" at {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return f"The system refused to read or write{where}: {getattr(error, 'strerror', None) or error}."
