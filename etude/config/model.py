"""The base of everything that has options."""

from __future__ import annotations

from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # it has no public name

from etude.config.check import problem

__all__ = ["Config"]

T = TypeVar("T")


class _Spoken(ModelMetaclass):
    """Makes construction by hand fail with the sentences that composition fails with.

    The call is where a construction by hand begins and where the fields inside it do not pass,
    so that the problems of a whole tree are still collected before any is told.
    """

    def __call__(cls: type[T], *args: Any, **fields: Any) -> T:
        try:
            return super().__call__(*args, **fields)  # type: ignore[misc, no-any-return]
        except ValidationError as error:
            raise problem(cls, error, fields, title=cls.__name__) from error  # type: ignore[arg-type]


class Config(BaseModel, metaclass=_Spoken):
    """A frozen object that is its own configuration: its fields are options, their descriptions what they mean."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    @classmethod
    def model_validate(cls, obj: Any, **settings: Any) -> Self:
        """Validate a plain tree; problems are told in sentences."""
        try:
            return super().model_validate(obj, **settings)
        except ValidationError as error:
            raise problem(cls, error, obj, title=cls.__name__) from error
