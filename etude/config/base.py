"""The base of everything that has options."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic._internal._model_construction import ModelMetaclass  # it has no public name
from pydantic_core import PydanticCustomError

from etude.config.tree import find_item_type
from etude.config.validation_errors import to_config_error

__all__ = ["Config"]

T = TypeVar("T")


class _ConfigMeta(ModelMetaclass):
    """Makes construction by hand fail with the sentences that composition fails with.

    The call is where a construction by hand begins and where the fields inside it do not pass,
    so that the problems of a whole tree are still collected before any is told.
    """

    def __call__(cls: type[T], *args: Any, **fields: Any) -> T:
        try:
            return super().__call__(*args, **fields)  # type: ignore[misc, no-any-return]
        except ValidationError as error:
            raise to_config_error(cls, error, fields, title=cls.__name__) from error  # type: ignore[arg-type]


class Config(BaseModel, metaclass=_ConfigMeta):
    """A frozen object that is its own configuration: its fields are options, their descriptions what they mean."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, defer_build=True
    )
    aliases: ClassVar[Mapping[str, str]] = {}
    """Names that people bring from elsewhere, and the options that they mean: an unknown key is answered with those."""

    @classmethod
    def model_validate(cls, obj: Any, **settings: Any) -> Self:
        """Validate a plain tree; problems are told in sentences."""
        try:
            return super().model_validate(obj, **settings)
        except ValidationError as error:
            raise to_config_error(cls, error, obj, title=cls.__name__) from error

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take true for 1, which nobody means."""
        if _is_bool_for_number(cls.model_fields[str(info.field_name)].annotation, value):
            raise PydanticCustomError("truth_for_a_number", "true and false are not numbers")
        return value


def _is_bool_for_number(annotation: Any, value: Any) -> bool:
    """Whether true or false stands where a number should, and nothing there may be true or false."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(value, list | tuple):
        return any(_is_bool_for_number(find_item_type(annotation, index), item) for index, item in enumerate(value))
    if isinstance(value, Mapping):
        return any(_is_bool_for_number(find_item_type(annotation), item) for item in value.values())
    if not isinstance(value, bool):
        return False
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    types = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds}
    return bool(types & {int, float}) and bool not in types
