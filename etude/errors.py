"""Every error Etude raises on purpose, in one tree.

    EtudeError
    ├── ConfigError (ValueError)          what was asked for cannot be run as asked
    │   ├── UnknownKeyError               a key no option has; names the nearest that one does
    │   ├── UnknownChoiceError            a choice that does not exist; lists those that do
    │   └── PlugInError                   a `module:Name` that does not import, or is not what it should be
    ├── DataError (ValueError)            the data handed in breaks a rule; names the row or rollout
    │   ├── BatchError                    columns of a batch that do not fit together
    │   ├── MissingColumnError            a column that an algorithm declared and nobody provided
    │   └── RewardError                   a reward that is not a finite number; names the rollout
    └── MissingPackageError (ImportError) an optional package is absent; names the extra to install

Each message is a sentence or two: what was asked, what was found, where, and what to do about it.
A mistake of Etude's own is an `assert`, never one of these.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "ConfigError",
    "DataError",
    "EtudeError",
    "MissingColumnError",
    "MissingPackageError",
    "PlugInError",
    "RewardError",
    "UnknownChoiceError",
    "UnknownKeyError",
]


class EtudeError(Exception):
    """The root of the tree: `except EtudeError` catches everything Etude raises on purpose."""


class ConfigError(EtudeError, ValueError):
    """What was asked for cannot be run as asked."""


class UnknownKeyError(ConfigError):
    """A key that no option has."""


class UnknownChoiceError(ConfigError):
    """A choice that does not exist."""


class PlugInError(ConfigError):
    """A `module:Name` that does not import, or names something of the wrong kind."""


class DataError(EtudeError, ValueError):
    """The data handed in breaks a rule."""


class BatchError(DataError):
    """The columns of a batch do not fit together."""


class MissingColumnError(DataError):
    """An algorithm declared a column that the batch does not have."""


class RewardError(DataError):
    """A reward that is not a finite number."""


class MissingPackageError(EtudeError, ImportError):
    """An optional package is absent."""
